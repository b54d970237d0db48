"""Whether a mathematical answer is right, however it is written, as math-verify judges it."""

import os
import re
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinkle_jax.data.missing_extra import require
from twinkle_jax.data.trajectory import Trajectory
from twinkle_jax.reward.boxed import last_boxed, nesting
from twinkle_jax.reward.reward import (
    GroundTruths,
    Reward,
    completions_of,
    find_ground_truths,
)
from twinkle_jax.reward.worker_pool import WorkerPool

_SCRIPT = Path(__file__).with_name("math_worker.py")
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\{([^{}]*)\}")
_DOLLARS = re.compile(r"^(?:\$+|\\\(|\\\[)\s*(.*?)\s*(?:\$+|\\\)|\\\])$", re.DOTALL)
_WORDS = re.compile(r"[^\W\d_]{3,}(?:[ -][^\W\d_]+)*")


class MathReward(Reward):
    r"""1 if the answer in the last box equals the ground truth, otherwise 0.

    `\boxed{\frac12}` equals 0.5, and `\boxed{x^2+2x+1}` equals (x+1)². Answers are compared by
    math-verify in processes of their own, which never evaluate them as Python, see no files, and
    are killed when they take too long: an answer that cannot be compared in time is wrong. Words
    are compared as words.

    Args:
        require_box: False takes the last line of a completion without a box for its answer.
        timeout: seconds for one answer.
        batch_timeout: seconds for all answers of a call. Those that are not reached are wrong, and
            a warning says how many.
        workers: how many processes; None: one a processor, at most 8.
        max_length: longer answers, in characters, are wrong.
        max_nesting: and so are those with brackets nested deeper.

    Attributes:
        timeouts: how many answers could not be compared in time so far.

    Raises:
        ImportError: if math-verify is not installed.
        ValueError: if a number is not positive.

    Example:
        >>> reward = MathReward(workers=1)
        >>> said = r"One half is \boxed{\frac{1}{2}}."
        >>> reward([{"messages": [{"role": "assistant", "content": said}]}], ["0.5"])
        [1.0]
    """

    def __init__(
        self,
        *,
        require_box: bool = True,
        timeout: float = 5.0,
        batch_timeout: float = 60.0,
        workers: int | None = None,
        max_length: int = 1000,
        max_nesting: int = 10,
    ) -> None:
        require("math_verify", "reward")
        workers = min(os.cpu_count() or 1, 8) if workers is None else workers
        given = {
            "timeout": timeout,
            "batch_timeout": batch_timeout,
            "workers": workers,
            "max_length": max_length,
            "max_nesting": max_nesting,
        }
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, got {value!r}")
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value!r}")
        self.require_box, self.batch_timeout = require_box, batch_timeout
        self.max_length, self.max_nesting = max_length, max_nesting
        self.timeouts = 0
        self._counting = threading.Lock()
        self._pool = WorkerPool(_SCRIPT, workers, timeout)

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None, **kwargs: Any
    ) -> list[float]:
        """Compare each completion's answer with its ground truth; equal pairs are compared once."""
        texts = completions_of(trajectories)
        truths = [_inner(truth) for truth in find_ground_truths(trajectories, ground_truths)]
        pairs = [(self._answer(text), truth) for text, truth in zip(texts, truths, strict=True)]
        known = {pair: self._at_once(*pair) for pair in pairs}
        open_pairs = [pair for pair, verdict in known.items() if verdict is None]
        answers = self._pool.map(open_pairs, self.batch_timeout) if open_pairs else []
        for pair, answer in zip(open_pairs, answers, strict=True):
            known[pair] = False if answer is None else answer["verdict"]
        self._count(sum(answer is None for answer in answers))
        for i, pair in enumerate(pairs):
            if known[pair] is None:
                raise ValueError(
                    f"ground_truths[{i}] must be an answer that math-verify can read, "
                    f"got {pair[1]!r:.80}"
                )
        return [float(bool(known[pair])) for pair in pairs]

    def can_read(self, answer: str) -> bool:
        """Say whether a ground truth can be compared with, before anything is trained on it.

        Args:
            answer: a ground truth; `read_jsonl(path, check_answer=reward.can_read)` asks for each.

        Returns:
            False for what would be an error in a call.
        """
        truth = _inner(answer)
        known = self._at_once(truth, truth)
        if known is not None:
            return known
        (verdict,) = self._pool.map([(truth, truth)], self.batch_timeout)
        return verdict is not None and verdict["verdict"] is not None

    def _answer(self, completion: str) -> str:
        boxed = last_boxed(completion)
        if boxed is None and not self.require_box and "\\boxed" not in completion:
            lines = completion.strip().splitlines() or [""]
            boxed = lines[-1].strip().rstrip(".")
        return _undressed(boxed or "")

    def _at_once(self, answer: str, truth: str) -> bool | None:
        """Decide what needs no mathematics; None for what does."""
        if not answer or len(answer) > self.max_length or nesting(answer) > self.max_nesting:
            return False
        if _words(truth) is not None or _WRAPPED.fullmatch(truth):
            return _plain(answer) == _plain(truth)
        return None

    def _count(self, missing: int) -> None:
        with self._counting:
            self.timeouts += missing
        if missing:
            warnings.warn(
                f"{missing} answers could not be compared in time and count as wrong",
                RuntimeWarning,
                stacklevel=3,
            )


def _inner(truth: str) -> str:
    """Take a ground truth out of its box, if it has one."""
    boxed = last_boxed(truth)
    return _undressed(truth if boxed is None else boxed)


def _undressed(answer: str) -> str:
    found = _DOLLARS.match(answer.strip())
    return found.group(1) if found else answer.strip()


def _plain(text: str) -> str:
    return " ".join(_WRAPPED.sub(r"\1", text).split()).strip(" .").casefold()


def _words(text: str) -> str | None:
    """Read a text that is words, as `Tuesday`, which would be a product of letters otherwise."""
    plain = _plain(text)
    return plain if _WORDS.fullmatch(plain) else None
