"""Twinkle's `reward`."""

from twinkle_jax.reward import (
    FormatReward,
    GSM8KAccuracyReward,
    GSM8KFormatReward,
    MathReward,
    Reward,
)
from twinkle_jax.twinkle.names import add_submodules

__all__ = [
    "FormatReward",
    "GSM8KAccuracyReward",
    "GSM8KFormatReward",
    "MathReward",
    "Reward",
]

add_submodules(__name__, "base", "format_reward", "gsm8k", "math_reward")
