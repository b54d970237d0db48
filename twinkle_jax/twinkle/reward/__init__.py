"""Twinkle's `reward`."""

from twinkle_jax.reward import (
    FormatReward,
    GSM8KAccuracyReward,
    GSM8KFormatReward,
    MathReward,
    Reward,
)

__all__ = [
    "FormatReward",
    "GSM8KAccuracyReward",
    "GSM8KFormatReward",
    "MathReward",
    "Reward",
]
