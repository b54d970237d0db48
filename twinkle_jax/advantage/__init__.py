"""Rewards -> advantages: pure functions, and stateless objects with Twinkle's signature."""

from twinkle_jax.advantage._grpo import grpo_advantage
from twinkle_jax.advantage._rloo import rloo_advantage
from twinkle_jax.advantage._segments import segment_grpo_advantage, segment_rloo_advantage
from twinkle_jax.advantage._statistics import GroupStatistics, group_statistics
from twinkle_jax.advantage._wrappers import Advantage, GRPOAdvantage, RLOOAdvantage, get_advantage

__all__ = [
    "Advantage",
    "GRPOAdvantage",
    "GroupStatistics",
    "RLOOAdvantage",
    "get_advantage",
    "group_statistics",
    "grpo_advantage",
    "rloo_advantage",
    "segment_grpo_advantage",
    "segment_rloo_advantage",
]
