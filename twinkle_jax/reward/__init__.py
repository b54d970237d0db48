"""Text to rewards. Nothing here needs jax, and no model output is ever evaluated."""

from twinkle_jax.reward.by_name import find_reward, find_rewards
from twinkle_jax.reward.math_reward import MathReward
from twinkle_jax.reward.reward import (
    FunctionReward,
    GroundTruths,
    Reward,
    RewardFunction,
    as_reward,
)
from twinkle_jax.reward.scoring import (
    TrajectoryScores,
    WeightedReward,
    compute_rewards,
    score_trajectories,
)
from twinkle_jax.reward.text import (
    ExactMatchReward,
    FormatReward,
    GSM8KAccuracyReward,
    GSM8KFormatReward,
    OverlongPenalty,
    last_boxed,
    token_f1,
)

__all__ = [
    "ExactMatchReward",
    "FormatReward",
    "FunctionReward",
    "GSM8KAccuracyReward",
    "GSM8KFormatReward",
    "GroundTruths",
    "MathReward",
    "OverlongPenalty",
    "Reward",
    "RewardFunction",
    "TrajectoryScores",
    "WeightedReward",
    "as_reward",
    "compute_rewards",
    "find_reward",
    "find_rewards",
    "last_boxed",
    "score_trajectories",
    "token_f1",
]
