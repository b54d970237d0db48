"""The built-in task: arithmetic with integers, without end, without files."""

import random
from collections.abc import Callable, Sequence
from typing import Literal, overload

from twinkle_jax.data.held_out import is_held_out
from twinkle_jax.data.trajectory import Message, Trajectory


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


class ArithmeticTask(Sequence[Trajectory]):
    """Problems such as `3+4=`, whose answers are integers.

    Each problem belongs to training or to evaluation by what it says, whatever the seed: none that
    is trained on is evaluated. Problems of a split come from a seed of their own, too.

    Args:
        level: 1 sums of digits, 2 sums of numbers below 50, 3 sums and differences of two digits,
            4 products, 5 three terms, 6 brackets.
        split: `'train'` or `'eval'`; one problem in five is for evaluation.
        size: how many problems.
        seed: which.
        prompt: what the user says; `{problem}` stands for the problem.

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
        if split not in ("train", "eval"):
            raise ValueError(f"split must be 'train' or 'eval', got {split!r}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"size must be a positive int, got {size!r}")
        if "{problem}" not in prompt:
            raise ValueError(f"prompt must hold {{problem}}, got {prompt!r}")
        self.level, self.split, self.size, self.seed = level, split, size, seed
        self.prompt = prompt

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...
    @overload
    def __getitem__(self, index: slice) -> list[Trajectory]: ...
    def __getitem__(self, index: int | slice) -> Trajectory | list[Trajectory]:
        """Make the problem of this index, the same one whenever it is asked for."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.size))]
        problem, answer = self.problem(range(self.size)[index])
        said = Message(role="user", content=self.prompt.replace("{problem}", problem))
        return Trajectory(messages=[said], user_data=[("ground_truth", str(answer))])

    def problem(self, index: int) -> tuple[str, int]:
        """Draw a problem and its answer, until one of this split comes up."""
        draw = random.Random(f"{self.split} {self.level} {self.seed} {index}")  # noqa: S311
        while True:
            problem, answer = _LEVELS[self.level](draw)
            if is_held_out(problem) == (self.split == "eval"):
                return problem, answer

    @property
    def fingerprint(self) -> str:
        """What tells this task from others."""
        return f"arithmetic {self.level} {self.split} {self.size} {self.seed} {self.prompt!r}"
