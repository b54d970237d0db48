"""Problems of reasoning-gym, those of its tasks that are safe to train on."""

import warnings
from collections.abc import Sequence
from typing import Any, Literal, overload

from twinkle_jax.data.held_out import is_held_out
from twinkle_jax.data.missing_extra import require
from twinkle_jax.data.trajectory import Message, Trajectory

# Tasks with one right answer each, written as text. The others are scored by the task's own code,
# which for some runs what the model wrote as Python.
ALLOWED = (
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
_TRIES = 64


class ReasoningGymTask(Sequence[Trajectory]):
    """A task of reasoning-gym; only its questions and answers are used, never its scores.

    Score it by `ExactMatchReward`, `GSM8KAccuracyReward` or `MathReward`. A question belongs to
    training or to evaluation by what it says, so none is in both.

    Args:
        name: which task, of `ReasoningGymTask.allowed`.
        split: `'train'` or `'eval'`.
        size: how many problems.
        seed: which.
        instruction: what follows each question.
        options: what the task itself takes.

    Raises:
        ValueError: for a task that is not allowed, another split, or a size below 1.
        ImportError: if reasoning-gym is not installed, which is in no extra but its own.
    """

    allowed = ALLOWED

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
        if name not in ALLOWED:
            raise ValueError(f"name must be one of {', '.join(ALLOWED)}, got {name!r}")
        if split not in ("train", "eval"):
            raise ValueError(f"split must be 'train' or 'eval', got {split!r}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"size must be a positive int, got {size!r}")
        require("reasoning_gym", "reasoning-gym")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns while it is imported
            import reasoning_gym

        self._problems = reasoning_gym.create_dataset(
            name, seed=seed, size=size * _TRIES, **options
        )
        self.split, self.size, self.instruction = split, size, instruction
        given = sorted(options.items())
        self.fingerprint = f"reasoning-gym {name} {split} {size} {seed} {instruction!r} {given}"

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
        start = range(self.size)[index] * _TRIES
        for i in range(start, start + _TRIES):
            problem = self._problems[i]
            if is_held_out(problem["question"]) == (self.split == "eval"):
                said = Message(role="user", content=problem["question"] + self.instruction)
                return Trajectory(
                    messages=[said], user_data=[("ground_truth", str(problem["answer"]))]
                )
        raise ValueError(f"the task must have questions for {self.split!r}, got none at {index}")
