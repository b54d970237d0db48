"""Data sets whose rows hold several sequences, one after the other."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from twinkle_jax.data.rows import Row
from twinkle_jax.training.packing import assign_lines
from twinkle_jax.twinkle.dataset.base import Dataset, DatasetMeta, IterableDataset, encode_rows


class PackingDataset(Dataset):
    """A data set whose encoded rows are packed: several, one after the other, make one of its rows.

    `position_ids` start again at 0 with each of them, so the model computes each as it is alone.
    Rows of a policy's update are packed without this, too.

    Args:
        dataset_meta: as for `Dataset`.
        packing_num_proc: unused: no packing takes long enough for it.
        options: as for `Dataset`.

    Example:
        >>> dataset = PackingDataset(DatasetMeta(data=[{"input_ids": [5, 6]}, {"input_ids": [7]}]))
        >>> dataset.set_template(lambda trajectory: trajectory)
        >>> dataset.pack_dataset()
        >>> len(dataset), dataset[0]["input_ids"], dataset[0]["position_ids"]
        (1, [5, 6, 7], [0, 1, 0])
    """

    def __init__(
        self, dataset_meta: DatasetMeta | None = None, packing_num_proc: int = 1, **options: Any
    ) -> None:
        self._lines: list[list[int]] | None = None
        super().__init__(dataset_meta, **options)

    def pack_dataset(self) -> None:
        """Pack what was encoded: into rows of the template's `max_length`, or of 2048 tokens.

        A row that is longer is one by itself.
        """
        assert "input_ids" in self.dataset[0], "encode must be called first"
        self._lines = _lines_of(self.dataset, self.needed_template())

    def __len__(self) -> int:
        return len(self._packed())

    def __getitem__(self, index: int) -> Row:
        return _joined([self.dataset[i] for i in self._packed()[index]])

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def _packed(self) -> list[list[int]]:
        assert self._lines is not None, "pack_dataset must be called first"
        return self._lines


class IterablePackingDataset(IterableDataset):
    """A stream whose rows are encoded, so many at a time, and packed.

    Args:
        dataset_meta: as for `IterableDataset`.
        packing_interval: how many rows are packed together.
        packing_num_proc: unused.
        cyclic: whether the stream starts again when it ends.
        options: as for `IterableDataset`.
    """

    def __init__(
        self,
        dataset_meta: DatasetMeta | None = None,
        packing_interval: int = 128,
        packing_num_proc: int = 1,
        cyclic: bool = False,
        **options: Any,
    ) -> None:
        self.packing_interval, self.cyclic, self._started = packing_interval, cyclic, False
        super().__init__(dataset_meta, **options)

    def pack_dataset(self) -> None:
        """Pack from now on."""
        strategy = self.needed_template().truncation_strategy
        assert strategy != "split", (
            "truncation_strategy must not be 'split', for a stream is packed"
        )
        self._started = True

    def __iter__(self) -> Iterator[Row]:
        assert self._started, "pack_dataset must be called first"
        template = self.needed_template()
        remaining: list[Row] = []  # of the last line, which may have room for more
        rows = self._rows()
        while batch := list(itertools.islice(rows, self.packing_interval)):
            encoded = [row for row in batch if "input_ids" in row]
            encoded += encode_rows(template, [x for x in batch if "input_ids" not in x], False)
            remaining += encoded
            lines = _lines_of(remaining, template)
            yield from (_joined([remaining[i] for i in line]) for line in lines[:-1])
            remaining = [remaining[i] for i in lines[-1]] if lines else []
        if remaining:
            yield _joined(remaining)

    def _rows(self) -> Iterator[Row]:
        while True:
            row = None
            for row in self.dataset:
                yield row
            if row is None or not self.cyclic:
                return


def _lines_of(rows: Any, template: Any) -> list[list[int]]:
    """Say which rows, by their numbers, stand in each packed row."""
    lengths = np.asarray([len(row["input_ids"]) for row in rows], np.int32)
    width = getattr(template, "max_length", None) or 2048
    return assign_lines(np.minimum(lengths, width), width)  # a longer row fills a line by itself


def _joined(rows: list[Row]) -> Row:
    """Join rows: lists of numbers one after the other; other columns become lists of values."""
    line: Row = {}
    for key, first in rows[0].items():
        values = [row[key] for row in rows]
        numbers = isinstance(first, list) and first and isinstance(first[0], int | float)
        line[key] = list(itertools.chain.from_iterable(values)) if numbers else values
    steps = (range(len(row["input_ids"])) for row in rows)
    return line | {"position_ids": list(itertools.chain.from_iterable(steps))}
