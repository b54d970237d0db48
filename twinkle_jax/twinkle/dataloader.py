"""Twinkle's `DataLoader`: batches in order, once, with a position that a checkpoint keeps."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from twinkle_jax.twinkle.dataset import IterableDataset
from twinkle_jax.twinkle.infra import DeviceMesh, note_group, settings
from twinkle_jax.twinkle.names import construct, refuse


class DataLoader:
    """Yields lists of rows: each iteration takes all rows once, in order.

    A batch is that of all devices; the model spreads its rows. Rows that are None or raise are left
    out, and replaced at random at the end, as Twinkle's loader does. The order of `shuffle` depends
    on the seed of `initialize` and the number of the epoch.

    Args:
        dataset: a data set, or anything with a length and rows by number, or an iterable; or a
            function that makes one.
        batch_size: rows a batch; the last one may have fewer.
        min_batch_size: a last batch with fewer rows is left out; by default the devices over which
            rows are spread, with a `device_mesh`.
        device_mesh: whose devices the batch size must be a multiple of.
        shuffle: whether to shuffle rows, anew in each epoch.
        drop_last: whether to leave out a last batch that is not full.
        sampler: numbers of rows, in the order to take them.
        collate_fn: what makes of a list of rows what one gets.
        max_retries: unused: a row that fails is not tried again.
        remote_group: unused, and said once.
        options: those of PyTorch's loader about workers have no effect.

    Raises:
        ValueError: if a batch size does not fit the mesh.
        TypeError: for an unknown option.
        RuntimeError: while iterating, if no rows are left to replace those that failed.

    Example:
        >>> loader = DataLoader([{"n": n} for n in range(5)], batch_size=2)
        >>> [[row["n"] for row in batch] for batch in loader]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        min_batch_size: int | None = None,
        device_mesh: DeviceMesh | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        sampler: Iterable[int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        max_retries: int = 20,
        remote_group: str | None = None,
        **options: Any,
    ) -> None:
        refuse("DataLoader", options)
        note_group(remote_group)
        self.dataset = dataset() if callable(dataset) else dataset
        devices = 1 if device_mesh is None else device_mesh.data_world_size
        if batch_size < 1 or batch_size % devices:
            raise ValueError(
                f"batch_size must be a positive multiple of {devices}, over which device_mesh "
                f"spreads rows, got {batch_size}"
            )
        self.batch_size, self.shuffle, self.sampler = batch_size, shuffle, sampler
        least = devices if min_batch_size is None else min_batch_size
        self.min_batch_size = batch_size if drop_last else least
        self.processor = collate_fn
        self._epoch, self._consumed, self._skip = 0, 0, 0

    def set_processor(self, processor_cls: Any, **options: Any) -> None:
        """Choose what makes of a list of rows what one gets: a class, its name or an object."""
        self.processor = construct(processor_cls, "processor", **options)

    def __len__(self) -> int:
        """Count the batches of an epoch; a last one that is too small counts too."""
        return -(-len(self.sampler or self.dataset) // self.batch_size)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        start, self._skip = self._skip, 0
        rows = self._stream() if self._streams() else self._numbered(start)
        batch: list[Any] = []
        for row in rows:
            batch.append(row)
            if len(batch) == self.batch_size:
                yield self._collate(batch)
                batch = []
        if batch and len(batch) >= self.min_batch_size:
            yield self._collate(batch)

    def get_state(self) -> dict[str, int]:
        """Return the number of rows so far, for `save(consumed_train_samples=…)`."""
        return {"consumed_train_samples": self._consumed}

    def resume_from_checkpoint(self, consumed_train_samples: int, **options: Any) -> None:
        """Go on after so many rows, in the epoch where they end."""
        refuse("resume_from_checkpoint", options)
        self.skip_consumed_samples(consumed_train_samples)

    def skip_consumed_samples(self, consumed_train_samples: int | None) -> None:
        """As `resume_from_checkpoint`; a stream starts anew, with a warning."""
        if self._streams() or not consumed_train_samples or consumed_train_samples < 0:
            warnings.warn(
                "a stream does not support consumed-data skipping: it starts from the beginning",
                UserWarning,
                stacklevel=2,
            )
            return
        # The last batch of an epoch counts in full, so an epoch is a whole number of batches.
        epoch_samples = len(self) * self.batch_size
        self._epoch, self._skip = divmod(int(consumed_train_samples), epoch_samples)
        self._consumed = int(consumed_train_samples)

    def _streams(self) -> bool:
        return isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__len__")

    def _stream(self) -> Iterator[Any]:
        return (row for row in self.dataset if row is not None)

    def _numbered(self, start: int) -> Iterator[Any]:
        """Yield the rows of an epoch from a position on; random ones replace those that fail."""
        rng = np.random.default_rng((settings.seed, self._epoch))
        self._epoch += 1
        count = len(self.dataset)
        order = rng.permutation(count).tolist() if self.shuffle else range(count)
        numbers = list(order if self.sampler is None else self.sampler)
        failed = 0
        for number in numbers[start:]:
            row = self._row(number)
            failed += not row
            if row:
                yield row
        for number in rng.permutation(count).tolist():
            if not failed:
                return
            if row := self._row(number):
                failed -= 1
                yield row
        if failed:
            raise RuntimeError(f"dataset must have rows to replace {failed} that failed, got none")

    def _row(self, number: int) -> Any:
        try:
            return self.dataset[number]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            warnings.warn(f"row {number} is left out: {error}", UserWarning, stacklevel=2)
            return None

    def _collate(self, batch: list[Any]) -> Any:
        self._consumed += self.batch_size
        if self.processor is None:
            return [dict(row) if isinstance(row, Mapping) else row for row in batch]
        return self.processor(batch)
