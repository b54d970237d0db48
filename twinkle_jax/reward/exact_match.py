"""The plainest reward: whether a completion is the answer and nothing else."""

from collections.abc import Sequence
from typing import Any

from twinkle_jax.data.trajectory import Trajectory
from twinkle_jax.reward.reward import (
    GroundTruths,
    Reward,
    completions_of,
    find_ground_truths,
)


class ExactMatchReward(Reward):
    """1 if a completion is its ground truth, blanks around it aside, otherwise 0.

    Example:
        >>> said = [{"messages": [{"role": "assistant", "content": "7"}]}]
        >>> ExactMatchReward()(said, ["7"])
        [1.0]
    """

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None, **kwargs: Any
    ) -> list[float]:
        """Compare each completion with its ground truth, letter by letter."""
        texts = completions_of(trajectories)
        truths = find_ground_truths(trajectories, ground_truths)
        return [float(text.strip() == truth) for text, truth in zip(texts, truths, strict=True)]
