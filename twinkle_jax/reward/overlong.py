"""A penalty for completions that come near the limit of their length."""

from collections.abc import Sequence
from typing import Any

from twinkle_jax.data.trajectory import Trajectory
from twinkle_jax.reward.reward import GroundTruths, Reward, completions_of


class OverlongPenalty(Reward):
    r"""DAPO's soft punishment of long completions.

    $$R(y) = 0 \text{ if } |y| \le L - C,\quad \frac{(L - C) - |y|}{C} \text{ if } |y| \le L,
    \quad -1 \text{ otherwise}$$

    Args:
        max_length: $L$, tokens.
        buffer: $C$, over how many tokens before the limit the penalty grows.
        tokenizer: counts the tokens of trajectories without a `completion_length`, which those of
            samplers have.

    Raises:
        ValueError: if `buffer` is not in [1, max_length].

    References:
        [DAPO](https://arxiv.org/abs/2503.14476), section 3.4

    Example:
        >>> lengths = [{"completion_length": n, "messages": []} for n in (96, 104, 112, 113)]
        >>> OverlongPenalty(112, 16)(lengths)
        [0.0, -0.5, -1.0, -1.0]
    """

    def __init__(self, max_length: int, buffer: int, *, tokenizer: Any = None) -> None:
        for name, value in (("max_length", max_length), ("buffer", buffer)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r}")
        if not 1 <= buffer <= max_length:
            raise ValueError(f"buffer must be in [1, max_length={max_length}], got {buffer}")
        self.max_length, self.buffer, self.tokenizer = max_length, buffer, tokenizer

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None, **kwargs: Any
    ) -> list[float]:
        """Penalise each completion by its length; ground truths are not needed."""
        penalties = []
        for i, text in enumerate(completions_of(trajectories)):
            length = trajectories[i].get("completion_length")
            if length is None:
                if self.tokenizer is None:
                    raise ValueError(
                        f"trajectories[{i}] must have a completion_length, or this reward a "
                        f"tokenizer, got {sorted(trajectories[i])}"
                    )
                length = len(self.tokenizer.encode(text))
            over = (self.max_length - self.buffer - length) / self.buffer
            penalties.append(max(min(over, 0.0), -1.0) + 0.0)  # + 0.0: no −0.0
        return penalties
