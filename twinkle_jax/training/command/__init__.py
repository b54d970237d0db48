"""The command `twinkle-jax`: one file a sub-command."""

from twinkle_jax.training.command.entry import main

__all__ = ["main"]
