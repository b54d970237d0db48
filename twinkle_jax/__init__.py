"""Reinforcement learning of language models in JAX: pure functions, with Twinkle's names.

`import twinkle_jax` loads the advantages and jax. The other sub-packages load when they are first
asked for: `twinkle_jax.loss.GRPOLoss` works after `import twinkle_jax` alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

from twinkle_jax import advantage
from twinkle_jax._version import __version__
from twinkle_jax.advantage import GRPOAdvantage, RLOOAdvantage, grpo_advantage, rloo_advantage

if TYPE_CHECKING:
    from twinkle_jax import data, loss, model

_LAZY = ("data", "loss", "model")

__all__ = [
    "GRPOAdvantage",
    "RLOOAdvantage",
    "__version__",
    "advantage",
    "data",
    "grpo_advantage",
    "loss",
    "model",
    "rloo_advantage",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"twinkle_jax.{name}")
    raise AttributeError(f"module 'twinkle_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
