"""Reinforcement learning of language models in JAX: pure functions, with Twinkle's names.

Everything loads when it is first asked for: `twinkle_jax.loss.GRPOLoss` works after
`import twinkle_jax` alone, and rewards are computed without jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

from twinkle_jax._package import __version__

if TYPE_CHECKING:
    from twinkle_jax import advantage as advantage
    from twinkle_jax import data as data
    from twinkle_jax import loss as loss
    from twinkle_jax import model as model
    from twinkle_jax import reward as reward
    from twinkle_jax import rollout as rollout
    from twinkle_jax import sampler as sampler
    from twinkle_jax import training as training
    from twinkle_jax import twinkle as twinkle
    from twinkle_jax.advantage import GRPOAdvantage, RLOOAdvantage, grpo_advantage, rloo_advantage

_LAZY = (
    "advantage",
    "command",
    "data",
    "loss",
    "model",
    "reward",
    "rollout",
    "sampler",
    "training",
    "twinkle",
)
_OF_ADVANTAGE = ("GRPOAdvantage", "RLOOAdvantage", "grpo_advantage", "rloo_advantage")

__all__ = ["GRPOAdvantage", "RLOOAdvantage", "__version__", "grpo_advantage", "rloo_advantage"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"twinkle_jax.{name}")
    if name in _OF_ADVANTAGE:
        return getattr(importlib.import_module("twinkle_jax.advantage"), name)
    raise AttributeError(f"module 'twinkle_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LAZY})
