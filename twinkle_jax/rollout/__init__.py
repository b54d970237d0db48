"""Rollouts: prompts to scored trajectories; the interface that every run draws through.

What is listed here is public; all else in this folder is private.
"""

from twinkle_jax.rollout.dynamic_sampling import draw_until_signal, has_signal
from twinkle_jax.rollout.engine import Drawn, Engine, LocalEngine
from twinkle_jax.rollout.rollout import (
    Rollout,
    encode_prompts,
    training_batch,
    with_advantages,
)
from twinkle_jax.rollout.settings import RolloutConfig
from twinkle_jax.rollout.single_turn import RolloutSource, SingleTurn

__all__ = [
    "Drawn",
    "Engine",
    "LocalEngine",
    "Rollout",
    "RolloutConfig",
    "RolloutSource",
    "SingleTurn",
    "draw_until_signal",
    "encode_prompts",
    "has_signal",
    "training_batch",
    "with_advantages",
]
