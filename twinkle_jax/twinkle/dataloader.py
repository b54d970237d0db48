"""Twinkle's `DataLoader`: batches in order, once, with a position that a checkpoint keeps."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from twinkle_jax.data.trajectory import copy_nested
from twinkle_jax.twinkle.dataset import IterableDataset
from twinkle_jax.twinkle.infra import DeviceMesh, note_group, settings
from twinkle_jax.twinkle.names import construct, refuse


class DataLoader:
    """Yields the batches of all devices: each iteration takes every row once, in order.

    Rows that are None, empty or cannot be read (ValueError, KeyError, IndexError or TypeError) are
    left out, and random rows (of `sampler`, if there is one) replace them at the end. Twinkle's
    loader reads them `max_retries` times, then raises. The order of `shuffle` depends on the seed
    of `initialize` and the number of the epoch.

    Args:
        dataset: a sequence or an iterable of rows, or a function that makes one.
        batch_size: rows a batch, a multiple of the devices of the mesh that they are sharded over.
        min_batch_size: a smaller last batch is left out; by default that number of devices, or
            `batch_size` after `initialize(mode="ray")`, as in Twinkle.
        device_mesh: the mesh; None for that of `initialize`, except with `mode="ray"`.
        shuffle: whether to shuffle rows, differently in each epoch.
        drop_last: whether to leave out a last batch that is not full.
        sampler: indices of rows, in the order to take them; not with `shuffle`.
        collate_fn: applied to each list of rows.
        max_retries: unused: what fails once is not read again.
        remote_group: unused, with a warning.
        options: options of PyTorch's loader for workers, which change nothing.

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
        in_ray = settings.mode == "ray"
        if device_mesh is None and not in_ray:
            device_mesh = settings.device_mesh
        devices = 1 if device_mesh is None else device_mesh.data_world_size
        if batch_size < 1 or batch_size % devices:
            raise ValueError(
                f"batch_size must be a positive multiple of {devices}, the number of devices that "
                f"device_mesh shards rows over, got {batch_size}"
            )
        if shuffle and sampler is not None:
            raise ValueError("shuffle must be False with a sampler, which is the order, got True")
        self.batch_size, self.shuffle = batch_size, shuffle
        # An iterator would have no rows for the second epoch.
        self.sampler = list(sampler) if isinstance(sampler, Iterator) else sampler
        default = batch_size if in_ray else devices
        least = default if min_batch_size is None else min_batch_size
        self.min_batch_size = batch_size if drop_last else least
        self.processor = collate_fn
        self._epoch, self._consumed, self._skip = 0, 0, 0

    def set_processor(self, processor_cls: Any, **options: Any) -> None:
        """Choose what is applied to each list of rows: a class, its name, or any callable."""
        self.processor = construct(processor_cls, "processor", **options)

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        rows: Any = self.dataset if self.sampler is None else self.sampler
        full, rest = divmod(len(rows), self.batch_size)
        return full + (rest >= max(self.min_batch_size, 1))

    def __iter__(self) -> Iterator[Any]:
        start, self._skip = self._skip, 0
        if self._streams():
            rows: Iterator[Any] = (row for row in self.dataset if row is not None)
        else:  # skipped rows are read too: only then is it known which of them fail
            rows = islice(self._indexed(), start, None)
        while batch := list(islice(rows, self.batch_size)):
            if len(batch) >= min(self.min_batch_size, self.batch_size):
                yield self._collate(batch)

    def get_state(self) -> dict[str, int]:
        """Return the number of rows so far, for `save(consumed_train_samples=…)`."""
        return {"consumed_train_samples": self._consumed}

    def resume_from_checkpoint(self, consumed_train_samples: int, **options: Any) -> None:
        """Continue after this number of rows, in the epoch where they end."""
        refuse("resume_from_checkpoint", options)
        self.skip_consumed_samples(consumed_train_samples)

    def skip_consumed_samples(self, consumed_train_samples: int | None) -> None:
        """Do as `resume_from_checkpoint`; streams restart, with a warning."""
        consumed = int(consumed_train_samples or 0)
        if consumed < 0:
            raise ValueError(f"consumed_train_samples must be at least 0, got {consumed}")
        if self._streams():
            warnings.warn(
                "a stream does not support consumed-data skipping: it starts from the beginning",
                UserWarning,
                stacklevel=2,
            )
            return
        # The last batch of an epoch counts in full, so an epoch is a whole number of batches.
        self._epoch, self._skip = divmod(consumed, max(len(self), 1) * self.batch_size)
        self._consumed = consumed

    def _streams(self) -> bool:
        return isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__len__")

    def _indexed(self) -> Iterator[Any]:
        """Yield the rows of an epoch; random ones replace those that fail."""
        rng = np.random.default_rng((settings.seed, self._epoch))
        self._epoch += 1
        rows = list(range(len(self.dataset)) if self.sampler is None else self.sampler)
        failed = 0
        for index in rng.permutation(rows).tolist() if self.shuffle else rows:
            if row := self._row(index):
                yield row
            else:
                failed += 1
        for index in rng.permutation(rows).tolist():
            if not failed:
                return
            if row := self._row(index):
                failed -= 1
                yield row
        if failed:
            raise RuntimeError(f"dataset must have rows to replace {failed} that failed, got none")

    def _row(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            warnings.warn(f"row {index} is left out: {error}", UserWarning, stacklevel=2)
            return None

    def _collate(self, batch: list[Any]) -> Any:
        self._consumed += self.batch_size
        # A script may add completions to its rows: the next epoch begins without them.
        rows = [copy_nested(dict(x) if isinstance(x, Mapping) else x) for x in batch]
        return rows if self.processor is None else self.processor(rows)
