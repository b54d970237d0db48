"""Compare mathematical answers with ground truths, by math-verify."""

import json
import os
import re
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinkle_jax._package import require
from twinkle_jax.data import Trajectory
from twinkle_jax.data.worker_process import WorkerProcess
from twinkle_jax.reward.reward import GroundTruths, Reward, completions_of, find_ground_truths
from twinkle_jax.reward.text import last_boxed

_SCRIPT = Path(__file__).with_name("math_worker.py")
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\{([^{}]*)\}")
# Without backtracking: an answer of blanks or dollars could hold up the run otherwise.
_DOLLARS = re.compile(r"(?:\$++|\\[(\[])(.*?)(?:(?<!\$)\$++|\\[)\]])", re.DOTALL)
_INTEGER = re.compile(r"-?[0-9]{1,1000}")
# Letters alone, two of them or more in a row: a word, and not a product of letters.
_WORDS = re.compile(r"(?=.*[^\W\d_]{2})[^\W\d_]+(?:[ ,-]+[^\W\d_]+)*")
# 3e2 and 1e-05, as computers print numbers, alone or as an entry of a tuple or set, or on the right
# of an equation; 2e-3 stays 2e − 3, with Euler's number.
_SCIENTIFIC = re.compile(
    r"(^|[,;(\[{=]\s*)([+-]?[0-9]+(?:\.[0-9]+)?)[eE]([0-9]{1,6}|[+-][0-9]{2,6})"
    r"(?=\s*(?:[,;)\]}]|\\right|\\}|$))"
)
# A space of LaTeX between thousands, as in 1\,000 and 1~000.
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\\[,:; ]|~)(?=[0-9]{3}(?![0-9]))")
# A plain space, as in 12 345, but not in 2 125/1000, \frac12 100 or 2^3 100.
_SPACED = re.compile(
    r"(?<![\w.}^/\\])(?<!\w )[0-9]{1,3}(?:[ \xa0\u2009\u202f][0-9]{3})+(?! ?[0-9/^])"
)
_CHOICE = re.compile(r"(?<!\w)\(([a-z])\)(?!\w)")  # of several, as (e)
_BASE = re.compile(r"-?[0-9][0-9A-Fa-f]*_(?:\{([0-9]+)\}|([0-9]+))")


class MathReward(Reward, name="math"):
    r"""1 if the answer in the last box equals the ground truth, otherwise 0.

    `\boxed{\frac12}` equals 0.5, and `\boxed{x^2+2x+1}` equals (x+1)². Answers are compared by
    math-verify in separate processes, which never evaluate them as Python, write no files, and
    are killed when they take too long: an answer that cannot be compared in time is wrong. Ground
    truths of letters alone are compared as words.

    Args:
        require_box: False: in completions without a box, the last line is the answer.
        timeout: seconds for one answer.
        batch_timeout: seconds for all answers of a call. Answers not compared by then are wrong; a
            warning says how many.
        workers: number of processes; None: one for each processor, at most 8.
        max_length: longer answers, in characters, are wrong.
        max_nesting: answers with brackets nested deeper are wrong.

    Attributes:
        timeouts: number of answers so far that could not be compared in time.

    Raises:
        ImportError: if math-verify or pebble is not installed.
        ValueError: if a number is not positive; when called, if a ground truth cannot be read.
        TypeError: if an argument is not a number, or `workers` not an int.

    Example:
        >>> reward = MathReward(workers=1)
        >>> completion = r"One half is \boxed{\frac{1}{2}}."
        >>> reward([{"messages": [{"role": "assistant", "content": completion}]}], ["0.5"])
        [1.0]
    """

    needs_ground_truth = True

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
        require("pebble", "reward")
        workers = min(os.cpu_count() or 1, 8) if workers is None else workers
        numbers = {
            "timeout": timeout,
            "batch_timeout": batch_timeout,
            "workers": workers,
            "max_length": max_length,
            "max_nesting": max_nesting,
        }
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, got {value!r}")
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value!r}")
        if not isinstance(workers, int):
            raise TypeError(f"workers must be an int, got {workers!r}")
        self.require_box, self.batch_timeout = require_box, batch_timeout
        self.max_length, self.max_nesting = max_length, max_nesting
        self.timeouts = 0
        self._counting = threading.Lock()
        self._process = _MathProcess(workers, timeout)

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None, **kwargs: Any
    ) -> list[float]:
        """Compare each completion's answer with its ground truth; equal pairs are compared once."""
        texts = completions_of(trajectories)
        truths = [_unboxed(truth) for truth in find_ground_truths(trajectories, ground_truths)]
        pairs = [(self._answer(text), truth) for text, truth in zip(texts, truths, strict=True)]
        verdicts: dict[tuple[str, str], str | None] = {
            x: self._without_math_verify(*x) for x in pairs
        }
        undecided = [pair for pair, verdict in verdicts.items() if verdict is None]
        verdicts.update(
            zip(undecided, self._process.compare(undecided, self.batch_timeout), strict=True)
        )
        self._count(sum(verdicts[pair] is None for pair in undecided))
        for i, pair in enumerate(pairs):
            if verdicts[pair] == "unreadable":
                raise ValueError(
                    f"ground_truths[{i}] must be an answer that math-verify can read, "
                    f"got {pair[1]!r:.80}"
                )
        return [float(verdicts[pair] == "equal") for pair in pairs]

    def can_read(self, answer: str) -> bool:
        """Check whether a ground truth can be read, before training starts.

        Args:
            answer: a ground truth; `read_jsonl(path, check_answer=reward.can_read)` asks for each.

        Returns:
            False if a call with this ground truth would raise.
        """
        truth = _unboxed(answer)
        verdict = self._without_math_verify(truth, truth)
        if verdict is None:
            (verdict,) = self._process.compare([(truth, truth)], self.batch_timeout)
            return verdict is not None and verdict != "unreadable"
        return verdict == "equal"

    def _answer(self, completion: str) -> str:
        boxed = last_boxed(completion)
        if boxed is None and not self.require_box and "\\boxed" not in completion:
            boxed = (completion.strip().splitlines() or [""])[-1].strip().rstrip(".")
        return _cleaned(boxed or "")

    def _without_math_verify(self, answer: str, truth: str) -> str | None:
        """Decide without math-verify where possible; otherwise None."""
        too_long = len(answer) > self.max_length or _nesting(answer) > self.max_nesting
        if not answer or too_long or _in_other_bases(answer, truth):
            return "different"
        if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(truth):
            return "equal" if int(answer) == int(truth) else "different"
        if _WORDS.fullmatch(_plain(truth)) or _WRAPPED.fullmatch(truth):
            return "equal" if _word_list(answer) == _word_list(truth) else "different"
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


class _MathProcess:
    """The process of `math_worker.py`, started on first use and restarted after it ended."""

    def __init__(self, workers: int, timeout: float) -> None:
        self.worker = WorkerProcess(_SCRIPT, str(workers), str(timeout))
        self._lock = threading.Lock()

    def compare(self, pairs: Sequence[tuple[str, str]], budget: float) -> list[str | None]:
        """Compare pairs of answer and truth within a time budget; None for those not in time."""
        if not pairs:
            return []
        with self._lock:
            for _ in range(2):  # retry once, in case an idle worker was killed since the last call
                if self.worker.process is None:
                    self.worker.start()
                reply = self.worker.ask(json.dumps([pairs, budget]))
                if reply:
                    return list(json.loads(reply))
                errors = self.worker.end()
        raise RuntimeError(f"math-verify must start and answer, its process ended: {errors}")


def _unboxed(truth: str) -> str:
    """Take a ground truth out of its box, if it has one."""
    boxed = last_boxed(truth)
    return _cleaned(truth if boxed is None else boxed)


def _cleaned(answer: str) -> str:
    """Drop dollar signs around an answer and a full stop after it; write numbers as LaTeX."""
    match = _DOLLARS.fullmatch(answer.strip())
    answer = (match.group(1) if match else answer).strip().removesuffix(".")
    answer = _SPACED.sub(lambda match: "".join(match.group().split()), _THOUSANDS.sub("", answer))
    return _SCIENTIFIC.sub(lambda m: f"{m[1]}{m[2]} \\cdot 10^{{{int(m[3])}}}", answer)


def _plain(text: str) -> str:
    plain = " ".join(_WRAPPED.sub(r"\1", text).split()).strip(" .").casefold()
    return _CHOICE.sub(r"\1", plain)


def _word_list(text: str) -> list[str]:
    """Split into words or comma-separated parts, sorted: their order does not matter."""
    return sorted(part.strip() for part in _plain(text).split(","))


def _in_other_bases(answer: str, truth: str) -> bool:
    """Whether two numbers have different bases as subscripts, which math-verify ignores."""
    bases = [_BASE.fullmatch(x.replace(" ", "")) for x in (answer, truth)]
    one, other = [base and (base.group(1) or base.group(2)) for base in bases]
    return bool(one and other and one != other)


def _nesting(text: str) -> int:
    """Count how deep brackets of any kind are nested."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest
