"""The command `twinkle-jax`: train, evaluate, sample, export."""

from twinkle_jax.command.main import main

__all__ = ["main"]
