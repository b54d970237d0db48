"""`twinkle_agentic.rollout`: conversations of a sampler with tools."""

from twinkle_jax.twinkle.agentic.rollout.bridge import extend_with_bridge
from twinkle_jax.twinkle.agentic.rollout.multi_turn import MultiTurnRollout, Rollout

__all__ = ["MultiTurnRollout", "Rollout", "extend_with_bridge"]
