"""Rows of a data set, in memory or as a stream: read from files, mapped, filtered and mixed."""

import abc
import csv
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TextIO

import numpy as np

from twinkle_jax._package import require
from twinkle_jax.data.strict_json import open_text, parse_json
from twinkle_jax.data.trajectory import copy_nested

Row = dict[str, Any]
"""A row of a data set: a value for each column."""
Columns = dict[str, list[Any]]
"""Rows as columns: a list of values for each name."""
_CELL_TYPES: tuple[tuple[re.Pattern[str], Callable[[str], Any]], ...] = (
    # Leading zeros belong to identifiers, postal codes and answers such as 007, not to numbers.
    (re.compile(r"[+-]?(0|[1-9][0-9]{0,399})"), int),
    (re.compile(r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?"), float),
    (re.compile("true|false", re.IGNORECASE), lambda cell: cell.lower() == "true"),
)
_KINDS = {".csv": "csv", ".parquet": "parquet", ".pq": "parquet"}
_CONVERSATIONS = ("messages", "prompt", "completion", "chosen", "rejected")  # columns
_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")


class Table(Iterable[Row]):
    """Rows in memory, or a stream of rows; `map` and `filter` return a table of the same kind.

    Rows that are read are copies at every depth: a function may change them.
    """

    @abc.abstractmethod
    def _from_source(self, source: Callable[[], Iterable[Mapping[str, Any]]]) -> Self: ...

    def map_rows(self, function: Callable[[list[Row]], list[Row]], batch_size: int = 1000) -> Self:
        """Replace each batch of rows by any number of others."""
        if not isinstance(batch_size, int | np.integer) or batch_size < 1:
            raise ValueError(f"batch_size must be a positive int, got {batch_size!r}")
        return self._from_source(lambda: _mapped(self, function, batch_size))

    def map(
        self,
        function: Callable[[Columns], Mapping[str, Sequence[Any]]],
        *,
        batch_size: int = 1000,
        remove_columns: str | Sequence[str] = (),
    ) -> Self:
        """Add or replace columns.

        Args:
            function: from columns, of at most `batch_size` rows, to the columns to set.
            batch_size: rows a call.
            remove_columns: columns to drop, unless the function returns them.

        Raises:
            ValueError: if the function returns columns of another length than those that stay, or
                `batch_size` is not positive.
        """
        return self.map_rows(column_function(function, remove_columns), batch_size)

    def filter(self, function: Callable[[Row], Any]) -> Self:
        """Keep the rows for which a function returns a true value."""
        return self._from_source(lambda: (row for row in self if function(row)))


class Rows(Table, Sequence[Row]):
    """A `Table` of rows in memory.

    Args:
        rows: dictionaries.

    Example:
        >>> rows = Rows([{"n": 1}, {"n": 2}, {"n": 3}])
        >>> odd = rows.filter(lambda row: row["n"] % 2)
        >>> odd.map(lambda columns: {"square": [n * n for n in columns["n"]]})[1]
        {'n': 3, 'square': 9}
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._rows = [dict(row) for row in rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Rows(self._rows[index])
        return copy_nested(self._rows[index])

    @property
    def column_names(self) -> list[str]:
        """The columns of all rows, in the order in which they first occur."""
        return list(dict.fromkeys(name for row in self._rows for name in row))

    def select(self, indices: Iterable[int]) -> "Rows":
        """Take the rows of these numbers, in this order."""
        return Rows(self._rows[i] for i in indices)

    def shuffle(self, seed: int) -> "Rows":
        """Shuffle the rows, in the order in which Hugging Face's `datasets` does for this seed."""
        return self.select(np.random.default_rng(seed).permutation(len(self)))

    def _from_source(self, source: Callable[[], Iterable[Mapping[str, Any]]]) -> Self:
        return type(self)(source())


class RowStream(Table):
    """A `Table` that is read again in each iteration; `map` and `filter` are lazy too.

    Args:
        source: makes an iterator over dictionaries.
    """

    def __init__(self, source: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Row]:
        return (copy_nested(dict(row)) for row in self._source())

    def _from_source(self, source: Callable[[], Iterable[Mapping[str, Any]]]) -> Self:
        return type(self)(source)


def mix(tables: Sequence[Table], *, interleave: bool) -> Table:
    """Mix data sets, all in memory or all streams.

    Args:
        tables: the data sets. In memory, a row has the columns of all, None where its data set has
            none; rows of streams stay as they are.
        interleave: whether to take one row of each in turn, until one is exhausted; otherwise they
            are concatenated.

    Raises:
        ValueError: if there are no tables, some are streams and some are not, or one in memory that
            is to be interleaved has no rows.

    Example:
        >>> mixed = mix([Rows([{"a": 1}, {"a": 2}]), Rows([{"a": 3}])], interleave=True)
        >>> [row["a"] for row in mixed]
        [1, 3]
    """
    streamed = {isinstance(table, RowStream) for table in tables}
    if len(streamed) != 1:
        got = "some of both" if streamed else "none"
        raise ValueError(f"tables must be all streams or all in memory, got {got}")

    def rows() -> Iterator[Row]:
        return itertools.chain.from_iterable(zip(*tables, strict=False) if interleave else tables)

    if streamed == {True}:  # the columns of a stream are not known before its end
        return RowStream(rows)
    check_interleaved(tables, interleave)
    names = dict.fromkeys(name for table in tables for row in table for name in row)
    return Rows({name: row.get(name) for name in names} for row in rows())


def check_interleaved(tables: Iterable[Any], interleave: bool) -> None:
    """Refuse to take turns with data sets in memory of which one has no rows."""
    lengths = [len(table) for table in tables]
    if interleave and 0 in lengths:
        raise ValueError(f"tables must have rows to be interleaved, got {lengths} rows")


def read_rows(path: str | Path, *, stream: bool = False) -> Table:
    r"""Read a data set from a file, or all files of a directory in the order of their names.

    Args:
        path: `.jsonl`, `.json` (a list of objects, or an object a line), `.csv` (a column is of
            integers, numbers or booleans if all its cells are; `007` is text; cells that a short
            row lacks are None), `.parquet`, or `.txt` (a line is a row with `text`).
        stream: whether to read rows when they are needed, lines of `.jsonl`, `.json` and `.txt` one
            by one.

    Raises:
        ValueError: for another kind of file, no files, or a malformed one.
        ImportError: for a `.parquet` file, if pyarrow is not installed.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp(), "sums.csv")
        >>> _ = path.write_text("question,level\n1+1=,1\n")
        >>> read_rows(path)[0]
        {'question': '1+1=', 'level': 1}
    """
    place = Path(path)
    files = sorted(x for x in place.iterdir() if x.is_file()) if place.is_dir() else [place]
    if not files:
        raise ValueError(f"{place} must hold at least one file, got none")
    for file in files:
        if file.suffix not in _SUFFIXES:
            raise ValueError(f"{file} must end in one of {', '.join(_SUFFIXES)}")

    def rows() -> Iterator[Row]:
        return itertools.chain.from_iterable(_read(file) for file in files)

    return RowStream(rows) if stream else Rows(rows())


def write_rows(
    rows: Iterable[Mapping[str, Any]], path: str | Path, kind: str | None = None
) -> None:
    """Write rows to a file.

    Args:
        rows: dictionaries; for `csv` the first has the columns of all, and lists and dictionaries
            in them are written as JSON.
        path: the file; its directory is made.
        kind: `jsonl` (or `json`), `csv` or `parquet`; None: as the suffix says, otherwise `jsonl`.

    Raises:
        ValueError: for another kind; for NaN and the like, which JSON does not have, in `jsonl`;
            for a column that the first row lacks, in `csv`.
        TypeError: for values that are not of JSON, such as dates, in `jsonl`.
        ImportError: for `parquet`, if pyarrow is not installed.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp(), "sums.jsonl")
        >>> write_rows([{"question": "1+1=", "level": 1}], path)
        >>> list(read_rows(path))
        [{'question': '1+1=', 'level': 1}]
    """
    place = Path(path)
    kind = _KINDS.get(place.suffix.lower(), "jsonl") if kind is None else kind
    kind = "jsonl" if kind == "json" else kind
    place.parent.mkdir(parents=True, exist_ok=True)
    if kind == "parquet":
        require("pyarrow", "hub")
        from pyarrow import Table as ArrowTable
        from pyarrow import parquet

        # Of rows, pyarrow would keep only the columns of the first.
        columns = to_columns([to_lists(row) for row in rows])
        parquet.write_table(ArrowTable.from_pydict(columns), place)
        return
    if kind not in ("jsonl", "csv"):
        raise ValueError(f"kind must be jsonl, csv or parquet, got {kind!r}")
    # The rows may be a stream that reads the file which they replace.
    partial = place.with_name(f".{place.name}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline="") as file:
            (_write_jsonl if kind == "jsonl" else _write_csv)(file, rows)
        partial.replace(place)
    finally:
        partial.unlink(missing_ok=True)


def _write_jsonl(file: TextIO, rows: Iterable[Mapping[str, Any]]) -> None:
    for number, row in enumerate(rows, 1):
        try:
            line = json.dumps(to_lists(row), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            message = f"rows must be JSON values, got {dict(row)!r:.80} as number {number}: {error}"
            raise type(error)(message) from None
        file.write(line + "\n")


def _write_csv(file: TextIO, rows: Iterable[Mapping[str, Any]]) -> None:
    writer = None
    for row in rows:
        if writer is None:
            writer = csv.DictWriter(file, list(row))
            writer.writeheader()
        writer.writerow({name: _cell(to_lists(value)) for name, value in row.items()})


def _cell(value: Any) -> Any:
    is_nested = isinstance(value, Mapping | list | tuple)
    return json.dumps(value, ensure_ascii=False) if is_nested else value


def column_function(
    function: Callable[[Columns], Mapping[str, Sequence[Any]]],
    remove_columns: str | Sequence[str],
) -> Callable[[list[Row]], list[Row]]:
    """Turn a function of columns into one of rows, which adds or replaces columns."""
    removed = {remove_columns} if isinstance(remove_columns, str) else set(remove_columns or ())

    def apply(rows: list[Row]) -> list[Row]:
        columns = to_columns(rows)
        new = dict(function(columns) or {})
        kept = {k: v for k, v in columns.items() if k not in removed and k not in new}
        merged = kept | new
        lengths = {name: len(values) for name, values in merged.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"columns must have one length, got {lengths}: list those to drop in remove_columns"
            )
        return to_rows(merged)

    return apply


def to_columns(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Turn rows into columns; None where a row lacks one."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def to_rows(columns: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Turn columns into rows."""
    names = list(columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _mapped(
    rows: Iterable[Row], function: Callable[[list[Row]], list[Row]], batch_size: int
) -> Iterator[Row]:
    remaining = iter(rows)
    while batch := list(itertools.islice(remaining, batch_size)):
        yield from function(batch)


def _read(path: Path) -> Iterator[Row]:
    if path.suffix == ".parquet":
        require("pyarrow", "hub")
        from pyarrow import parquet

        yield from map(parquet_row, parquet.read_table(path).to_pylist())
        return
    with open_text(path) as file:
        if path.suffix == ".csv":
            # Otherwise all lines behind a quote that is never closed would be one cell.
            reader = csv.DictReader(file, strict=True)
            try:
                yield from _csv(path, reader)
            except csv.Error as error:
                place = f"{path}, line {reader.line_num}"
                raise ValueError(f"{place} must be CSV: {error}") from None
        elif path.suffix == ".txt":
            yield from ({"text": line.rstrip("\r\n")} for line in file)
        elif path.suffix == ".json" and file.read(1024).lstrip().startswith("["):
            file.seek(0)
            yield from (_object(path, i, x) for i, x in enumerate(_json(path, 1, file.read()), 1))
        else:
            file.seek(0)
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _object(path, number, _json(path, number, line))


def parquet_row(row: Row) -> Row:
    """Drop the keys that are None from the tools and tool calls of a row of a Parquet file.

    In such a file all dictionaries of a column have the same keys, and None for those that they
    lack: each tool would have the parameters of all others, and each call their arguments.
    """
    tidied = dict(row)
    for name, value in row.items():
        if name == "tools":
            tidied[name] = _without_none(value)
        elif name in _CONVERSATIONS and isinstance(value, list):
            tidied[name] = [
                {key: _without_none(x) for key, x in message.items()}
                if isinstance(message, dict)
                else message
                for message in value
            ]
        elif isinstance(value, dict) and "messages" in value:
            tidied[name] = parquet_row(value)
    return tidied


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(x) for key, x in value.items() if x is not None}
    return [_without_none(x) for x in value] if isinstance(value, list) else value


def _json(path: Path, number: int, text: str) -> Any:
    try:
        return parse_json(text.strip().removeprefix("\ufeff"))
    except ValueError as error:
        raise ValueError(f"{path}, line {number} must be JSON: {error}") from None


def _object(path: Path, number: int, value: Any) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"{path}, record {number} must be a JSON object, got {value!r:.60}")
    return value


def _csv(path: Path, reader: "csv.DictReader[Any]") -> list[Row]:
    """Read a CSV file; a column becomes numbers or booleans where every cell is one."""
    names = list(reader.fieldnames or ())
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{path} must name each column once, got {name!r:.80} twice")
    rows = []
    for row in reader:
        if None in row:
            raise ValueError(
                f"{path}, line {reader.line_num} must have at most {len(names)} cells, one for "
                f"each column, got {len(names) + len(row[None])}"
            )
        rows.append(row)
    columns = to_columns(rows)
    for name, column in columns.items():
        cells = [cell for cell in column if cell is not None]  # a short row has no cell there
        for pattern, convert in _CELL_TYPES:
            if cells and all(pattern.fullmatch(cell) for cell in cells):
                values = [convert(cell) for cell in cells]
                if all(map(_is_held, cells, values)):
                    columns[name] = [None if cell is None else convert(cell) for cell in column]
                break
    return to_rows(columns)


def _is_held(cell: str, value: float) -> bool:
    """Whether a value is what its cell says: float64 neither overflowed nor rounded an integer."""
    integer, _ = _CELL_TYPES[0]
    return abs(value) < math.inf and (not integer.fullmatch(cell) or int(cell) == value)


def to_lists(value: Any) -> Any:
    """Turn arrays and their numbers, at any depth of a row, into lists and numbers of Python."""
    if isinstance(value, Mapping):
        return {key: to_lists(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        plain = [to_lists(x) for x in value]
        return plain if isinstance(value, list) else tuple(plain)
    return value.tolist() if hasattr(value, "tolist") else value
