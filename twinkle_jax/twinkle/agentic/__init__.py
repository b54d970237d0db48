"""`twinkle_agentic`: environments, tools and rollouts of many turns, as its scripts import them.

The command and [`MultiTurn`][twinkle_jax.rollout.MultiTurn] are what training here draws through;
these are for scripts that call a sampler themselves.
"""
