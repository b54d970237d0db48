"""Reinforcement learning of language models in JAX: pure functions, with Twinkle's names."""

from twinkle_jax._version import __version__
from twinkle_jax.advantage import GRPOAdvantage, RLOOAdvantage, grpo_advantage, rloo_advantage

__all__ = ["GRPOAdvantage", "RLOOAdvantage", "__version__", "grpo_advantage", "rloo_advantage"]
