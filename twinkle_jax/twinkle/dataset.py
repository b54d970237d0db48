"""Twinkle's `dataset`: data sets in memory, lazy, as streams, and packed, over `Rows`."""

import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from twinkle_jax.data import Row, Rows, RowStream, Table, Template, mix, read_rows, write_rows
from twinkle_jax.data.prompt_files import download_split
from twinkle_jax.data.rows import check_interleaved, column_function, to_rows
from twinkle_jax.training import pack_features
from twinkle_jax.twinkle.names import PAGE, add_submodules, construct, local_id, refuse
from twinkle_jax.twinkle.preprocessor import Preprocessor

RowFunction = Callable[[list[Row]], list[Row]]


@dataclass
class DatasetMeta:
    """Where the rows of a data set are.

    Attributes:
        dataset_id: a file or a directory, as [`read_rows`][twinkle_jax.data.read_rows] takes them,
            or an id on the Hugging Face hub.
        subset_name: subset on the hub.
        split: split on the hub.
        data_slice: numbers of the rows to take, in this order; modulo the number of rows. Not of a
            stream.
        data: instead of an id, rows, columns, a function that makes rows, or a data set of Hugging
            Face's `datasets`. A stream is read more than once, so an iterator is none.
    """

    dataset_id: str = ""
    subset_name: str = "default"
    split: str = "train"
    data_slice: Iterable[int] | None = None
    data: Any = None
    _uid: str = field(default_factory=lambda: uuid.uuid4().hex[:8], repr=False)

    def __post_init__(self) -> None:
        if self.data_slice is not None and not isinstance(self.data_slice, Iterable):
            raise ValueError(f"data_slice must be an iterable, got {self.data_slice!r}")
        if not self.dataset_id and self.data is None:
            raise ValueError("either dataset_id or data must be given, got neither")

    def get_id(self) -> str:
        """Return the key under which `Dataset.datasets` has it."""
        name = self.dataset_id.replace(os.sep, "_").replace(".", "_")
        name = name if self.data is None else f"__memory_{self._uid}__"
        return f"{name}:{self.subset_name}:{self.split}"

    def load(self, *, stream: bool) -> Table:
        """Read the rows."""
        rows = self._rows(stream)
        if self.data_slice is None:
            return rows
        if not isinstance(rows, Rows):
            raise ValueError("data_slice must be None for a stream, whose rows have no numbers")
        numbers = list(self.data_slice)
        if numbers and not len(rows):
            raise ValueError("data_slice must be of a data set with rows, got one without any")
        return Rows(rows[number % len(rows)] for number in numbers)

    def _rows(self, stream: bool) -> Table:
        data = self.data
        if data is None:
            path = local_id(self.dataset_id, "dataset_id")
            if Path(path).exists():
                return read_rows(path, stream=stream)
            folder = "data" if self.subset_name == "default" else self.subset_name
            files = download_split(path, self.split, subset=folder)
            tables = [read_rows(file, stream=stream) for file in files]
            return mix(tables, interleave=False)
        if isinstance(data, dict):
            return Rows(to_rows(data))
        if callable(data):
            return RowStream(data) if stream else Rows(data())
        if isinstance(data, Iterator):
            if stream:
                raise ValueError(
                    "data must be a function that makes rows for a stream, which is read more than "
                    f"once, got {type(data).__name__}"
                )
            return Rows(data)
        if isinstance(data, Iterable):
            return Rows(data) if hasattr(data, "__len__") else RowStream(lambda: data)
        raise ValueError(f"data must be rows, columns or a function, got {type(data).__name__}")


class Dataset:
    """Rows that are mapped, filtered, mixed and encoded in place.

    `datasets` has the rows of each source by `DatasetMeta.get_id()`; `dataset` those of the only
    source, or the mixed ones. `streaming=True` reads rows when they are needed.

    Example:
        >>> dataset = Dataset(DatasetMeta(data=[{"question": "1+1=", "answer": "#### 2"}]))
        >>> dataset.map("GSM8KProcessor", init_args={"system": "Be brief."})
        >>> dataset[0]["user_data"]
        [('ground_truth', '2')]
    """

    streams = False

    def __init__(self, dataset_meta: DatasetMeta | None = None, **options: Any) -> None:
        self.datasets: dict[str, Table] = {}
        self.dataset: Any = None
        self.template: Any = None
        self._mixed = False
        if dataset_meta is not None:
            self.add_dataset(dataset_meta, **options)

    def add_dataset(self, dataset_meta: DatasetMeta, **options: Any) -> None:
        """Add a source."""
        stream = bool(options.pop("streaming", self.streams))
        cast = _caster(options.pop("features", None))
        refuse("Dataset.add_dataset", options)
        key = dataset_meta.get_id()
        if key in self.datasets:
            raise ValueError(f"dataset_meta must name another source than those added, got {key}")
        if self._mixed:
            raise ValueError("add_dataset must be called before mix_dataset, got it after")
        rows = dataset_meta.load(stream=stream)
        self.datasets[key] = rows if cast is None else rows.map_rows(cast)
        self._show_single()

    def set_template(self, template_func: Any, **options: Any) -> None:
        """Choose a template: a name such as `"Qwen3_5Template"` with arguments, or an object."""
        self.template = construct(template_func, "template", **options)

    def map(
        self,
        preprocess_func: Any,
        dataset_meta: DatasetMeta | None = None,
        init_args: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Replace columns of the rows.

        Args:
            preprocess_func: a function from columns to columns, or a `Preprocessor`, its class or
                its name.
            dataset_meta: the source to map; needed while several are not mixed.
            init_args: arguments of the class.
            options: `remove_columns`, `batch_size`, and `features`, the types of the new rows, as
                of Hugging Face's `datasets`: text, numbers, booleans, lists and dictionaries.
        """
        function = construct(preprocess_func, "preprocessor", **(init_args or {}))
        used = {x: options.pop(x) for x in ["remove_columns", "batch_size"] if x in options}
        cast = _caster(options.pop("features", None))
        refuse("Dataset.map", options)
        self._map(function, dataset_meta, used)
        if cast is not None:
            self._map_rows(cast, dataset_meta)

    def filter(
        self,
        filter_func: Any,
        dataset_meta: DatasetMeta | None = None,
        init_args: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Keep the rows for which a function, or a `DataFilter`, returns something true."""
        function = construct(filter_func, "preprocessor", **(init_args or {}))
        refuse("Dataset.filter", options)
        self._filter(function, dataset_meta)

    def mix_dataset(self, interleave: bool = True) -> None:
        """Mix the sources: one row of each in turn until the first ends, or one after the other."""
        if len(self.datasets) > 1:
            self.dataset = mix(list(self.datasets.values()), interleave=interleave)
            self._mixed = True

    def encode(self, add_generation_prompt: bool = False, **options: Any) -> None:
        """Encode conversations: `messages`, or those in columns such as `positive` and `negative`.

        `add_generation_prompt` ends them with the start of an assistant turn, to sample from. The
        options are `remove_columns`, which the encoded rows do not have, and `batch_size`.
        """
        removed = options.pop("remove_columns", None) or ()
        removed = {removed} if isinstance(removed, str) else set(removed)
        size = options.pop("batch_size", 1000)
        refuse("Dataset.encode", options)
        template = self._needed_template()

        def encode(rows: list[Row]) -> list[Row]:
            encoded = template.encode_rows(rows, add_generation_prompt)
            return [{key: x for key, x in row.items() if key not in removed} for row in encoded]

        self._change(None, lambda rows: rows.map_rows(encode, size))

    def check(self, **options: Any) -> None:
        """Drop the rows that the template cannot encode."""
        refuse("Dataset.check", options)
        self._change(None, lambda rows: rows.filter(self._needed_template().accepts))

    def cast_column(self, column: str, decode: bool = True) -> None:
        """Refuse to read images."""
        raise ValueError(
            f"cast_column must not be called: images are not read, got {column!r}; see {PAGE}"
        )

    def save_as(self, output_path: str | Path, format: str | None = None, **options: Any) -> None:
        """Write the rows to a file, as its suffix or `format` says: jsonl, csv or parquet."""
        mode = options.pop("mode", "immediate")
        options.pop("batch_size", None)
        refuse("save_as", options | ({} if mode == "immediate" else {"mode": mode}))
        write_rows(self, output_path, format)

    def __len__(self) -> int:
        return len(self._readable())

    def __getitem__(self, index: int) -> Row:
        return self._readable()[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._readable())

    def _readable(self) -> Any:
        """Return the rows, of the only source or mixed ones: others would be left out."""
        if not self.datasets or (len(self.datasets) > 1 and not self._mixed):
            raise ValueError(
                "dataset must have rows, of one source or mixed by mix_dataset, got "
                f"{len(self.datasets)} sources"
            )
        return self.dataset

    def _map(self, function: Any, meta: DatasetMeta | None, options: dict[str, Any]) -> None:
        self._change(meta, lambda rows: rows.map(function, **options))

    def _map_rows(self, function: RowFunction, meta: DatasetMeta | None) -> None:
        self._change(meta, lambda rows: rows.map_rows(function))

    def _filter(self, function: Any, meta: DatasetMeta | None) -> None:
        self._change(meta, lambda rows: rows.filter(function))

    def _change(self, meta: DatasetMeta | None, change: Callable[[Any], Table]) -> None:
        if self._mixed:
            self.dataset = change(self.dataset)
            return
        key = self._key(meta)
        self.datasets[key] = change(self.datasets[key])
        self._show_single()

    def _key(self, meta: DatasetMeta | None) -> str:
        if meta is not None:
            key = meta.get_id()
            if key not in self.datasets:
                raise ValueError(
                    f"dataset_meta must name one of {', '.join(self.datasets)}, got {key}"
                )
            return key
        if len(self.datasets) != 1:
            raise ValueError(
                f"dataset_meta must name one of {len(self.datasets)} sources, got None: or call "
                "mix_dataset first"
            )
        return next(iter(self.datasets))

    def _show_single(self) -> None:
        if len(self.datasets) == 1:
            (self.dataset,) = self.datasets.values()

    def _needed_template(self) -> Template:
        """Return the template, which must have been set."""
        assert self.template is not None, "set_template must be called first"
        return self.template


class IterableDataset(Dataset):
    """A data set that is read while it is iterated over, without length and indices."""

    streams = True

    def __len__(self) -> int:
        raise NotImplementedError("a stream has no length")

    def __getitem__(self, index: int) -> Row:
        raise NotImplementedError("the rows of a stream have no indices")


class LazyDataset(Dataset):
    """A data set that maps and encodes each row when it is read.

    As Twinkle's, a mixed one takes its sources in turn until the longest ends, and repeats the
    others; a row mapped by a `Preprocessor` has only the columns that it returned.
    """

    def __init__(self, dataset_meta: DatasetMeta | None = None, **options: Any) -> None:
        self.do_encode, self.do_check, self.add_generation_prompt = False, False, False
        self._functions: list[tuple[str | None, RowFunction]] = []
        self._interleave: bool | None = None
        super().__init__(dataset_meta, **options)

    def mix_dataset(self, interleave: bool = True) -> None:
        """Mix the sources, without copying them."""
        if len(self.datasets) > 1:
            check_interleaved(self.datasets.values(), interleave)
            self._interleave, self._mixed = interleave, True

    def encode(self, add_generation_prompt: bool = False, **options: Any) -> None:
        """Encode each row when it is read."""
        refuse("Dataset.encode", options)
        strategy = self._needed_template().truncation_strategy
        assert strategy != "split", (
            "Lazy tokenize does not support truncation_strategy==`split`, which makes several rows"
        )
        self.do_encode, self.add_generation_prompt = True, add_generation_prompt

    def check(self, **options: Any) -> None:
        """Return None for rows that the template cannot encode."""
        refuse("Dataset.check", options)
        self._needed_template()
        self.do_check = True

    def __len__(self) -> int:
        self._readable()
        lengths = [len(rows) for rows in self.datasets.values()]  # type: ignore[arg-type]
        if self._interleave is None:
            return lengths[0]
        return len(lengths) * max(lengths) if self._interleave else sum(lengths)

    def __getitem__(self, index: int) -> Any:
        row = self._map_row(*self._locate(range(len(self))[index]))
        if self.do_encode:
            rows = self._needed_template().encode_rows([row], self.add_generation_prompt)
            return rows[0] if rows else None
        if self.do_check and not self._needed_template().accepts(row):
            return None
        return row

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def _map_row(self, key: str, row: Row) -> Row:
        for source, function in self._functions:
            if source in (None, key):
                (row,) = function([row])
        return row

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
        self._map_rows(_replacing(function, options.get("remove_columns", ())), meta)

    def _map_rows(self, function: RowFunction, meta: DatasetMeta | None) -> None:
        everywhere = meta is None and len(self.datasets) != 1
        self._functions.append((None if everywhere else self._key(meta), function))

    def _filter(self, function: Any, meta: DatasetMeta | None) -> None:
        """Filter at once: the function sees mapped rows, which are mapped again when read."""
        key = self._key(meta)
        rows = self.datasets[key].filter(lambda row: function(self._map_row(key, row)))
        check_interleaved([rows], self._interleave is True)
        self.datasets[key] = rows
        self._show_single()


class PackingDataset(Dataset):
    """A data set whose encoded rows are joined to rows of at most `max_length` tokens.

    `position_ids` start again at 0 with each of them, so the model computes each as it is alone.
    Rows of a policy's update are packed without this, too. `packing_num_proc` changes nothing.

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
        self._packed: list[Row] | None = None
        super().__init__(dataset_meta, **options)

    def pack_dataset(self) -> None:
        """Pack into rows of the template's `max_length`, or of 2048 tokens; longer rows stay."""
        rows = super()._readable()
        assert "input_ids" in rows[0], "encode must be called first"
        self._packed = list(pack_features(rows, _width(self._needed_template())))

    def _readable(self) -> list[Row]:
        assert self._packed is not None, "pack_dataset must be called first"
        return self._packed


class IterablePackingDataset(IterableDataset):
    """A stream that encodes and packs `packing_interval` rows at a time, endlessly if `cyclic`."""

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
        strategy = self._needed_template().truncation_strategy
        assert strategy != "split", (
            "truncation_strategy must not be 'split', for a stream is packed"
        )
        self._started = True

    def __iter__(self) -> Iterator[Row]:
        assert self._started, "pack_dataset must be called first"
        template = self._needed_template()

        def encode(rows: list[Row]) -> list[Row]:
            return rows if "input_ids" in rows[0] else template.encode_rows(rows)

        encoded = RowStream(self._rows).map_rows(encode, self.packing_interval)
        return pack_features(encoded, _width(template), buffer=self.packing_interval)

    def _rows(self) -> Iterator[Row]:
        while True:
            row = None
            for row in self._readable():
                yield row
            if row is None or not self.cyclic:
                return


def _caster(features: Any) -> RowFunction | None:
    """Return a function that gives rows the types of `features`; None without features."""
    if features is None:
        return None
    return lambda rows: [_cast("row", row, dict(features)) for row in rows]


def _cast(name: str, value: Any, feature: Any) -> Any:
    """Give a value the type of a feature of Hugging Face's `datasets`; None stays."""
    if value is None:
        return None
    if isinstance(feature, Mapping):
        if not isinstance(value, Mapping) or not value.keys() <= feature.keys():
            raise ValueError(f"{name} must have the keys {list(feature)}, got {value!r:.80}")
        return {k: _cast(f"{name}[{k!r}]", value.get(k), x) for k, x in feature.items()}
    items = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    if items is not None:
        return [_cast(f"{name}[{i}]", x, items) for i, x in enumerate(value)]
    kind = str(getattr(feature, "dtype", feature))
    if kind in ("string", "large_string") and isinstance(value, str | int | float):
        return str(value).lower() if isinstance(value, bool) else str(value)
    if kind == "bool" and value in (0, 1):
        return bool(value)
    if re.fullmatch(r"u?int(8|16|32|64)|float(16|32|64)", kind):
        with suppress(ValueError, TypeError, OverflowError):
            number = np.dtype(kind).type(value).item()
            exact = int(value) if isinstance(value, int | str) else float(value)
            if isinstance(number, float) or number == exact:
                return number
    raise ValueError(
        f"{name} must be of the type {kind} in features, got {value!r:.80}; see {PAGE}"
    )


def _replacing(function: Any, removed: Any) -> RowFunction:
    if isinstance(function, Preprocessor) and type(function).__call__ is Preprocessor.__call__:
        return lambda rows: [dict(function.preprocess(row)) for row in rows]
    return column_function(function, removed)


def _width(template: Any) -> int:
    return getattr(template, "max_length", None) or 2048


add_submodules(__name__, "base", "iterable_dataset", "iterable_packing_dataset")
add_submodules(__name__, "lazy_dataset", "packing_dataset")
