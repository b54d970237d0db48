"""Rewards for GSM8K: whether the number is right, and whether it is where it should be."""

import re
from collections.abc import Sequence
from typing import Any

from twinkle_jax.data.trajectory import Trajectory
from twinkle_jax.reward.boxed import last_boxed
from twinkle_jax.reward.reward import (
    GroundTruths,
    Reward,
    completions_of,
    find_ground_truths,
)

_AFTER_HASHES = re.compile(r"####\s*([-\d,.][-\d,.\s]*)")
_TAIL = 500
_TOLERANCE = 1e-5


class GSM8KAccuracyReward(Reward):
    r"""1 if the final number is right, otherwise 0.

    The answer is what stands in the last `\boxed{…}`, or else after the last `####`, in the last
    500 characters. Numbers are compared to within 1e-5, commas and spaces aside; what is no number
    is compared as text.

    Example:
        >>> said = [{"messages": [{"role": "assistant", "content": "So #### 1,234"}]}]
        >>> GSM8KAccuracyReward()(said, ["1234"])
        [1.0]
    """

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None, **kwargs: Any
    ) -> list[float]:
        """Compare each completion's answer with its ground truth."""
        texts = completions_of(trajectories)
        truths = find_ground_truths(trajectories, ground_truths)
        return [float(_same(_answer(x), _bare(y))) for x, y in zip(texts, truths, strict=True)]


class GSM8KFormatReward(Reward):
    r"""1 if there is an answer in `\boxed{…}` or after `####`, otherwise 0.

    Example:
        >>> said = [{"messages": [{"role": "assistant", "content": "It is 7."}]}]
        >>> GSM8KFormatReward()(said)
        [0.0]
    """

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None, **kwargs: Any
    ) -> list[float]:
        """Look for an answer in each completion; ground truths are not needed."""
        texts = completions_of(trajectories)
        return [float(bool(last_boxed(x) or _AFTER_HASHES.search(x))) for x in texts]


def _answer(completion: str) -> str:
    tail = completion[-_TAIL:]
    boxed = last_boxed(tail)
    if boxed:
        return _bare(boxed)
    found = _AFTER_HASHES.findall(tail)
    return _bare(found[-1]) if found else ""


def _bare(answer: str) -> str:
    return answer.replace(",", "").replace(" ", "").strip()


def _same(answer: str, truth: str) -> bool:
    if not answer:
        return False
    try:
        return abs(float(answer) - float(truth)) < _TOLERANCE
    except ValueError:
        return answer == truth
