"""Rewards for GSM8K: whether the number is right, and whether there is one to be read."""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from twinkle_jax.data.trajectory import Trajectory
from twinkle_jax.reward.reward import GroundTruths, Reward, completions_of, find_ground_truths
from twinkle_jax.reward.text import last_boxed

# The data set's own pattern, on one line; with any number of blanks, and a digit at least.
_AFTER_HASHES = re.compile(r"####[ \t]*(-?[.,]*[0-9][0-9.,]*)")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_SIGNS = re.compile(r"^\\?\$|\\?[$%]$")  # dollars and percent around a number
_NO_NUMBERS = {"nan", "inf", "infinity"}
_TAIL = 500
_TOLERANCE = Decimal("1e-5")


class GSM8KAccuracyReward(Reward):
    r"""1 if the final number is right, otherwise 0.

    The answer is what stands in the last `\boxed{…}`, or else after the last `####`, in the last
    500 characters. Numbers are compared to within 1e-5, without rounding them, whatever commas,
    blanks, dollar and percent signs stand in a box; what is no number is compared as text.

    References:
        Training Verifiers to Solve Math Word Problems, https://arxiv.org/abs/2110.14168

    Example:
        >>> completion = {"role": "assistant", "content": "So #### 1,234"}
        >>> GSM8KAccuracyReward()([{"messages": [completion]}], ["1234"])
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
    r"""1 if there is an answer in `\boxed{…}` or a number after `####`, otherwise 0.

    Example:
        >>> completion = {"role": "assistant", "content": "It is 7."}
        >>> GSM8KFormatReward()([{"messages": [completion]}])
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
    numbers = _AFTER_HASHES.findall(tail)
    return _bare(numbers[-1]) if numbers else ""


def _bare(answer: str) -> str:
    return _SIGNS.sub("", answer.replace(",", "").replace(" ", "").strip())


def _same(answer: str, truth: str) -> bool:
    if not answer or answer.lstrip("+-").casefold() in _NO_NUMBERS:
        return False
    if not (_NUMBER.fullmatch(answer) and _NUMBER.fullmatch(truth)):
        return answer == truth
    return abs(Decimal(answer) - Decimal(truth)) < _TOLERANCE
