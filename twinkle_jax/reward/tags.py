"""Rewards for the form of a completion: parts between tags, as `<think>…</think>`."""

from collections.abc import Sequence
from typing import Any

from twinkle_jax.data.trajectory import Trajectory
from twinkle_jax.reward.reward import GroundTruths, Reward, completions_of


class FormatReward(Reward):
    """1 if a completion has the parts that are asked for, otherwise 0.

    The time it takes grows with the text and no faster, whatever stands in it.

    Args:
        tags: names of the parts, `<think>…</think>` and `<answer>…</answer>` by default.
        strict: True asks for each part once, in this order, with nothing but blanks around them;
            False for each part somewhere.

    Raises:
        ValueError: if there are no tags, or one is empty.

    Example:
        >>> text = "<think>2 and 2</think> <answer>4</answer>"
        >>> FormatReward()([{"messages": [{"role": "assistant", "content": text}]}])
        [1.0]
    """

    def __init__(self, tags: Sequence[str] = ("think", "answer"), *, strict: bool = False) -> None:
        if isinstance(tags, str) or not tags or not all(tags):
            raise ValueError(f"tags must be a list of names that are not empty, got {tags!r}")
        self.tags, self.strict = tuple(tags), strict

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None, **kwargs: Any
    ) -> list[float]:
        """Look for the parts in each completion; ground truths are not needed."""
        fits = self._strictly if self.strict else self._somewhere
        return [float(fits(text)) for text in completions_of(trajectories)]

    def _somewhere(self, text: str) -> bool:
        for tag in self.tags:
            start = text.find(f"<{tag}>")
            if start < 0 or text.find(f"</{tag}>", start) < 0:
                return False
        return True

    def _strictly(self, text: str) -> bool:
        at = 0
        for tag in self.tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            if text.count(opening) != 1 or text.count(closing) != 1:
                return False
            start, end = text.find(opening), text.find(closing)
            if start < at or end < start or text[at:start].strip():
                return False
            at = end + len(closing)
        return not text[at:].strip()
