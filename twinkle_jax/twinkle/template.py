"""Twinkle's `template`."""

from twinkle_jax.data import (
    Template,
)

__all__ = [
    "Template",
]
