"""Prompts that are generated on demand, and the order of prompts in a run."""

import abc
import hashlib
import json
import random
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Self, overload

from twinkle_jax._package import require
from twinkle_jax.data.trajectory import Message, PromptBatch, Trajectory, make_trajectory

_FOR_EVALUATION = 5  # one problem in five
_TRIES = 64  # problems of reasoning-gym to look through for one of the right split

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


def _sum(draw: random.Random, largest: int) -> tuple[str, int]:
    a, b = draw.randint(0, largest), draw.randint(0, largest)
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
    1: partial(_sum, largest=9),
    2: partial(_sum, largest=49),
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

    The text of a problem decides whether it is for training or evaluation, whatever the seed, so
    no problem is in both splits. The splits draw from different seeds, too.

    Args:
        level: 1 sums of digits, 2 sums of numbers below 50, 3 sums and differences of two digits,
            4 products, 5 three terms, 6 brackets.
        split: `'train'` or `'eval'`; one problem in five is for evaluation.
        size: how many problems.
        seed: of the problems.
        prompt: the user's message; `{problem}` stands for the problem.
        system: a system message at the beginning of each conversation; None adds none.

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
        system: str | None = None,
    ) -> None:
        if level not in _LEVELS:
            raise ValueError(f"level must be one of {list(_LEVELS)}, got {level!r}")
        _check(split, size)
        if "{problem}" not in prompt:
            raise ValueError(f"prompt must hold {{problem}}, got {prompt!r}")
        self.level, self.split, self.size, self.seed = level, split, size, seed
        self.prompt, self.system = prompt, system

    def make(self, index: int) -> Trajectory:
        """Make the problem of an index, always the same one."""
        problem, answer = self.problem(index)
        message = Message(role="user", content=self.prompt.replace("{problem}", problem))
        return make_trajectory([message], str(answer), [], self.system)

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
        name = f"arithmetic {self.level} {self.split} {self.size} {self.seed} {self.prompt!r}"
        return name if self.system is None else f"{name} {self.system!r}"


class ReasoningGymTask(GeneratedPrompts):
    """A task of reasoning-gym; only its questions and answers are used, never its scores.

    Score it by `ExactMatchReward`, `GSM8KAccuracyReward` or `MathReward`. The text of a question
    decides whether it is for training or evaluation, so no question is in both splits.

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
                return make_trajectory([message], str(problem["answer"]), [], None)
        raise ValueError(f"the task must have questions for {self.split!r}, got none at {index}")


class PromptLoader:
    """Iterates over prompts in shuffled batches, endlessly by default; batches hold copies.

    Pass `shuffle=False, epochs=1` for what Twinkle's `DataLoader` does: in order, once.

    Each epoch has each prompt once, in an order that depends on the seed and the epoch alone.
    Batches may span two epochs; only the last one may be smaller. A checkpoint stores
    `get_state()`, and `set_state` continues from it.

    Args:
        prompts: trajectories: a list, or a sequence that computes them, such as
            [`ArithmeticTask`][twinkle_jax.data.ArithmeticTask].
        batch_size: prompts a batch.
        seed: of the order.
        shuffle: False keeps the order of the prompts.
        epochs: number of passes; None: endless.

    Raises:
        ValueError: if there are no prompts, or a number is not positive.
        ImportError: if grain is not installed.

    Example:
        >>> from twinkle_jax.data import ArithmeticTask
        >>> loader = PromptLoader(ArithmeticTask(1, size=10), 4, epochs=2)
        >>> [len(batch.ground_truths) for batch in loader]
        [4, 4, 4, 4, 4]
    """

    def __init__(
        self,
        prompts: Sequence[Trajectory],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
    ) -> None:
        require("grain", "data")
        from grain import MapDataset

        for name, value in (
            ("batch_size", batch_size),
            ("epochs", 1 if epochs is None else epochs),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive int, got {value!r}")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
            raise ValueError(f"seed must be an int in [0, 2**32), got {seed!r}")
        if not len(prompts):
            raise ValueError("prompts must not be empty, got none")
        self.prompts, self.batch_size, self.epochs = prompts, batch_size, epochs
        order = MapDataset.range(len(prompts))
        order = order.shuffle(seed=seed) if shuffle else order
        self._order = order.repeat(epochs)
        self._total = None if epochs is None else epochs * len(prompts)
        self._position = 0
        first = [int(self._order[i]) for i in range(min(len(prompts), 8))]
        self._fingerprint = {
            "batch_size": batch_size,
            "seed": seed,
            "shuffle": shuffle,
            "prompts": len(prompts),
            "data": prompts_fingerprint(prompts),
            "order": _digest([first]),
        }

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return self._position // len(self.prompts)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PromptBatch:
        end = self._position + self.batch_size
        end = end if self._total is None else min(end, self._total)
        if end <= self._position:
            raise StopIteration
        batch = [self.prompts[int(self._order[i])] for i in range(self._position, end)]
        self._position = end
        return PromptBatch(batch)

    def get_state(self) -> dict[str, Any]:
        """Return the position, and a fingerprint of prompts and order, as JSON values."""
        return {"position": self._position, "fingerprint": dict(self._fingerprint)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where a loader of the same prompts, batch size and seed was.

        Args:
            state: what `get_state` returned.

        Raises:
            ValueError: if prompts, batch size, seed or order differ.
        """
        position, fingerprint = state.get("position"), state.get("fingerprint")
        if not isinstance(position, int) or position < 0 or not isinstance(fingerprint, Mapping):
            raise ValueError(f"state must be what get_state returns, got {dict(state)!r:.80}")
        for name, value in self._fingerprint.items():
            if fingerprint.get(name) != value:
                raise ValueError(
                    f"{name} must be {fingerprint.get(name)!r}, as it was when the state was "
                    f"saved, got {value!r}"
                )
        self._position = position


def prompts_fingerprint(prompts: Sequence[Trajectory]) -> str:
    """Hash prompts, in their order."""
    fingerprint = getattr(prompts, "fingerprint", None)
    return fingerprint if isinstance(fingerprint, str) else _digest(prompts)


def _digest(records: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps(record, sort_keys=True, default=repr).encode() + b"\n")
    return digest.hexdigest()[:16]
