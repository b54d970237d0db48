"""Data sets that work on a row when it is asked for."""

from collections.abc import Callable, Iterator
from typing import Any

from twinkle_jax.data.rows import Row, column_function
from twinkle_jax.twinkle.dataset.base import (
    Dataset,
    DatasetMeta,
    encode_rows,
    encodes,
    result_options,
)
from twinkle_jax.twinkle.names import refuse
from twinkle_jax.twinkle.preprocessor import Preprocessor


class LazyDataset(Dataset):
    """A data set that maps and encodes a row when it is asked for.

    As with Twinkle's, a mixed one takes its sources in turn until the longest ends, the others
    starting again, and a mapped row has only the columns that the last function gave.
    """

    def __init__(self, dataset_meta: DatasetMeta | None = None, **options: Any) -> None:
        self.do_encode, self.do_check, self.add_generation_prompt = False, False, False
        self._functions: list[tuple[str | None, Callable[[list[Row]], list[Row]]]] = []
        self._interleave: bool | None = None
        super().__init__(dataset_meta, **options)

    def mix_dataset(self, interleave: bool = True) -> None:
        """Mix the sources, without copying them."""
        if len(self.datasets) > 1:
            self._interleave = interleave

    def encode(self, add_generation_prompt: bool = False, **options: Any) -> None:
        """Encode rows when they are asked for."""
        refuse("encode", result_options(options))
        strategy = self.needed_template().truncation_strategy
        assert strategy != "split", (
            "Lazy tokenize does not support truncation_strategy==`split`, which makes several rows"
        )
        self.do_encode, self.add_generation_prompt = True, add_generation_prompt

    def check(self, **options: Any) -> None:
        """Give None for a row that the template cannot encode."""
        refuse("check", result_options(options))
        self.needed_template()
        self.do_check = True

    def __len__(self) -> int:
        lengths = [len(rows) for rows in self.datasets.values()]  # type: ignore[arg-type]
        if self._interleave is None:
            return lengths[0]
        return len(lengths) * max(lengths) if self._interleave else sum(lengths)

    def __getitem__(self, index: int) -> Any:
        key, row = self._locate(range(len(self))[index])
        for source, function in self._functions:
            if source in (None, key):
                (row,) = function([row])
        if self.do_encode:
            rows = encode_rows(self.needed_template(), [row], self.add_generation_prompt)
            return rows[0] if rows else None
        if self.do_check and not encodes(self.needed_template(), row):
            return None
        return row

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def _locate(self, index: int) -> tuple[str, Row]:
        sources: list[tuple[str, Any]] = list(self.datasets.items())
        if self._interleave:
            key, rows = sources[index % len(sources)]
            return key, rows[index // len(sources) % len(rows)]
        for key, rows in sources:
            if index < len(rows):
                return key, rows[index]
            index -= len(rows)
        raise IndexError(index)

    def _map(self, function: Any, meta: DatasetMeta | None, options: dict[str, Any]) -> None:
        key = None if meta is None else meta.get_id()
        if key is None and len(self.datasets) == 1 and not self._interleave:
            key = self._key(None)
        self._functions.append((key, _replacing(function, options.get("remove_columns", ()))))


def _replacing(function: Any, removed: Any) -> Callable[[list[Row]], list[Row]]:
    if isinstance(function, Preprocessor) and type(function).__call__ is Preprocessor.__call__:
        return lambda rows: [dict(function.preprocess(row)) for row in rows]
    return column_function(lambda columns: function(columns), removed)
