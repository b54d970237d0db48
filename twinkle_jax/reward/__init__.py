"""Text to rewards. Nothing here needs jax, and no model output is ever evaluated."""

from twinkle_jax.reward.boxed import last_boxed
from twinkle_jax.reward.checked import compute_rewards
from twinkle_jax.reward.exact_match import ExactMatchReward
from twinkle_jax.reward.gsm8k import GSM8KAccuracyReward, GSM8KFormatReward
from twinkle_jax.reward.math_reward import MathReward
from twinkle_jax.reward.overlong import OverlongPenalty
from twinkle_jax.reward.reward import FunctionReward, Reward
from twinkle_jax.reward.tags import FormatReward
from twinkle_jax.reward.weighted import WeightedReward

__all__ = [
    "ExactMatchReward",
    "FormatReward",
    "FunctionReward",
    "GSM8KAccuracyReward",
    "GSM8KFormatReward",
    "MathReward",
    "OverlongPenalty",
    "Reward",
    "WeightedReward",
    "compute_rewards",
    "last_boxed",
]
