"""Prompts in batches, in an order that a checkpoint can continue."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from twinkle_jax.data.missing_extra import require
from twinkle_jax.data.trajectory import Trajectory, copy_trajectory, user_data_get


class PromptBatch(list[Trajectory]):
    """Copies of prompts and their ground truths; changing them does not change the data set."""

    def __init__(self, trajectories: Iterable[Trajectory] = ()) -> None:
        super().__init__(copy_trajectory(trajectory) for trajectory in trajectories)

    @property
    def ground_truths(self) -> list[Any]:
        """`'ground_truth'` of each prompt's `user_data`, None where there is none."""
        return [user_data_get(prompt.get("user_data"), "ground_truth") for prompt in self]


class PromptLoader:
    """Iterates over prompts in shuffled batches, endlessly by default; batches hold copies.

    Pass `shuffle=False, epochs=1` for what Twinkle's `DataLoader` does: in order, once.

    Each epoch has another order, which depends on the seed alone, and each prompt once. Batches may
    span two epochs; only the last one may be smaller. A checkpoint stores `get_state()`, and
    `set_state` continues from it.

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
