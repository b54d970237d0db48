"""Problems generated on demand: arithmetic, and tasks of reasoning-gym.

The text of a problem decides whether it is for training or evaluation, whatever the seed.
"""

import abc
import hashlib
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

from twinkle_jax.data.missing_extra import require
from twinkle_jax.data.trajectory import Message, Trajectory

_FOR_EVALUATION = 5  # one problem in so many
_TRIES = 64  # problems of reasoning-gym, one of which is of the split

# Tasks of reasoning-gym with one right answer each, written as text. The others are scored by the
# task's own code, which for some runs what the model wrote as Python.
_ALLOWED = (
    "base_conversion",
    "basic_arithmetic",
    "calendar_arithmetic",
    "chain_sum",
    "decimal_arithmetic",
    "gcd",
    "gsm_symbolic",
    "lcm",
    "leg_counting",
    "letter_counting",
    "number_format",
    "products",
    "simple_equations",
    "spell_backward",
    "time_intervals",
    "word_sorting",
)


def _is_for_evaluation(problem: str) -> bool:
    digest = hashlib.sha256(problem.encode()).digest()
    return int.from_bytes(digest[:8], "big") % _FOR_EVALUATION == 0


def _check(split: str, size: int) -> None:
    if split not in ("train", "eval"):
        raise ValueError(f"split must be 'train' or 'eval', got {split!r}")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"size must be a positive int, got {size!r}")


def _sum_of_digits(draw: random.Random) -> tuple[str, int]:
    a, b = draw.randint(0, 9), draw.randint(0, 9)
    return f"{a}+{b}", a + b


def _sum(draw: random.Random) -> tuple[str, int]:
    a, b = draw.randint(0, 49), draw.randint(0, 49)
    return f"{a}+{b}", a + b


def _sum_or_difference(draw: random.Random) -> tuple[str, int]:
    a, b = draw.randint(10, 99), draw.randint(10, 99)
    return (f"{a}+{b}", a + b) if draw.random() < 0.5 else (f"{a}-{b}", a - b)


def _product(draw: random.Random) -> tuple[str, int]:
    a, b = draw.randint(2, 9), draw.randint(10, 99)
    return f"{a}*{b}", a * b


def _three_terms(draw: random.Random) -> tuple[str, int]:
    a, b, c = draw.randint(10, 99), draw.randint(2, 9), draw.randint(2, 9)
    return (f"{a}+{b}*{c}", a + b * c) if draw.random() < 0.5 else (f"{a}-{b}*{c}", a - b * c)


def _brackets(draw: random.Random) -> tuple[str, int]:
    a, b, c, d = (draw.randint(1, 19) for _ in range(4))
    return f"({a}+{b})*({c}-{d})", (a + b) * (c - d)


_LEVELS: dict[int, Callable[[random.Random], tuple[str, int]]] = {
    1: _sum_of_digits,
    2: _sum,
    3: _sum_or_difference,
    4: _product,
    5: _three_terms,
    6: _brackets,
}


class GeneratedPrompts(Sequence[Trajectory]):
    """Prompts that are made when they are read."""

    size: int

    @abc.abstractmethod
    def make(self, index: int) -> Trajectory:
        """Make the prompt of an index from 0, always the same one."""

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...
    @overload
    def __getitem__(self, index: slice) -> list[Trajectory]: ...
    def __getitem__(self, index: int | slice) -> Trajectory | list[Trajectory]:
        """Return one prompt, or several."""
        if isinstance(index, slice):
            return [self.make(i) for i in range(self.size)[index]]
        return self.make(range(self.size)[index])


class ArithmeticTask(GeneratedPrompts):
    """Problems such as `3+4=`, whose answers are integers.

    A problem belongs to training or to evaluation by its text, whatever the seed, so that none is
    in both splits. The splits draw from different seeds, too.

    Args:
        level: 1 sums of digits, 2 sums of numbers below 50, 3 sums and differences of two digits,
            4 products, 5 three terms, 6 brackets.
        split: `'train'` or `'eval'`; one problem in five is for evaluation.
        size: how many problems.
        seed: of the problems.
        prompt: the user's message; `{problem}` stands for the problem.

    Raises:
        ValueError: for another level or split, a size below 1, or a prompt without the problem.

    Example:
        >>> task = ArithmeticTask(3, size=100)
        >>> task[0]["messages"], task[0]["user_data"]
        ([{'role': 'user', 'content': '79-69='}], [('ground_truth', '10')])
    """

    def __init__(
        self,
        level: int = 1,
        *,
        split: Literal["train", "eval"] = "train",
        size: int = 10_000,
        seed: int = 0,
        prompt: str = "{problem}=",
    ) -> None:
        if level not in _LEVELS:
            raise ValueError(f"level must be one of {list(_LEVELS)}, got {level!r}")
        _check(split, size)
        if "{problem}" not in prompt:
            raise ValueError(f"prompt must hold {{problem}}, got {prompt!r}")
        self.level, self.split, self.size, self.seed = level, split, size, seed
        self.prompt = prompt

    def make(self, index: int) -> Trajectory:
        """Make the problem of an index, always the same one."""
        problem, answer = self.problem(index)
        message = Message(role="user", content=self.prompt.replace("{problem}", problem))
        return Trajectory(messages=[message], user_data=[("ground_truth", str(answer))])

    def problem(self, index: int) -> tuple[str, int]:
        """Draw a problem and its answer, until one of this split comes up."""
        draw = random.Random(f"{self.split} {self.level} {self.seed} {index}")  # noqa: S311
        while True:
            problem, answer = _LEVELS[self.level](draw)
            if _is_for_evaluation(problem) == (self.split == "eval"):
                return problem, answer

    @property
    def fingerprint(self) -> str:
        """Identifies the problems, for checkpoints."""
        return f"arithmetic {self.level} {self.split} {self.size} {self.seed} {self.prompt!r}"


class ReasoningGymTask(GeneratedPrompts):
    """A task of reasoning-gym; only its questions and answers are used, never its scores.

    Score it by `ExactMatchReward`, `GSM8KAccuracyReward` or `MathReward`. A question belongs to
    training or to evaluation by its text, so that none is in both splits.

    Args:
        name: of the task, one of `ReasoningGymTask.allowed`.
        split: `'train'` or `'eval'`.
        size: how many problems.
        seed: of the problems.
        instruction: what follows each question.
        options: arguments of the task.

    Raises:
        ValueError: for a task that is not allowed, another split, or a size below 1.
        ImportError: if reasoning-gym is not installed, the extra `reasoning-gym`.
    """

    allowed = _ALLOWED

    def __init__(
        self,
        name: str,
        *,
        split: Literal["train", "eval"] = "train",
        size: int = 10_000,
        seed: int = 0,
        instruction: str = "",
        **options: Any,
    ) -> None:
        if name not in _ALLOWED:
            raise ValueError(f"name must be one of {', '.join(_ALLOWED)}, got {name!r}")
        _check(split, size)
        require("reasoning_gym", "reasoning-gym")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns while it is imported
            import reasoning_gym

        self._problems = reasoning_gym.create_dataset(
            name, seed=seed, size=size * _TRIES, **options
        )
        self.split, self.size, self.instruction = split, size, instruction
        others = sorted(options.items())
        self.fingerprint = f"reasoning-gym {name} {split} {size} {seed} {instruction!r} {others}"

    def make(self, index: int) -> Trajectory:
        """Make the problem of an index, always the same one."""
        start = index * _TRIES
        for i in range(start, start + _TRIES):
            problem = self._problems[i]
            if _is_for_evaluation(problem["question"]) == (self.split == "eval"):
                message = Message(role="user", content=problem["question"] + self.instruction)
                truth = [("ground_truth", str(problem["answer"]))]
                return Trajectory(messages=[message], user_data=truth)
        raise ValueError(f"the task must have questions for {self.split!r}, got none at {index}")
