"""The interface of rewards."""

from twinkle_jax.reward import Reward

__all__ = ["Reward"]
