"""`twinkle_agentic`: environments, tools and rollouts of several turns, for scripts that sample.

Runs of the command draw through [`MultiTurn`][twinkle_jax.rollout.MultiTurn].
"""
