"""Twinkle's `advantage`."""

from twinkle_jax.advantage import (
    Advantage,
    GRPOAdvantage,
    RLOOAdvantage,
)

__all__ = [
    "Advantage",
    "GRPOAdvantage",
    "RLOOAdvantage",
]
