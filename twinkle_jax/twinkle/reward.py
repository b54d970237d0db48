"""Twinkle's `reward`."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle_jax.data import Trajectory, user_data_get
from twinkle_jax.reward import (
    FormatReward,
    GroundTruths,
    GSM8KAccuracyReward,
    GSM8KFormatReward,
    Reward,
)
from twinkle_jax.reward import MathReward as BaseMathReward
from twinkle_jax.twinkle.names import add_submodules

__all__ = [
    "FormatReward",
    "GSM8KAccuracyReward",
    "GSM8KFormatReward",
    "MathReward",
    "Reward",
]


class MathReward(BaseMathReward):
    """A [`MathReward`][twinkle_jax.reward.MathReward] with ground truths where Twinkle has them.

    Args:
        ground_truth_key: of a trajectory that is a ground truth, the name in its `user_data`;
            without it the base class looks for the answer.
        options: arguments of the base class.
    """

    def __init__(self, ground_truth_key: str = "solution", **options: Any) -> None:
        super().__init__(**options)
        self.ground_truth_key = ground_truth_key

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None, **kwargs: Any
    ) -> list[float]:
        """Compare each completion's answer with its ground truth."""
        if isinstance(ground_truths, list | tuple):
            ground_truths = [self._read(truth) for truth in ground_truths]
        return super().__call__(trajectories, ground_truths, **kwargs)

    def _read(self, truth: Any) -> Any:
        if not isinstance(truth, Mapping):
            return truth
        answer = user_data_get(truth.get("user_data"), self.ground_truth_key)
        return truth if answer is None else answer


add_submodules(__name__, "base", "format_reward", "gsm8k", "math_reward")
