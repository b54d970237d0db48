"""Data sets in memory and as streams, over [`Rows`][twinkle_jax.data.Rows]."""

import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twinkle_jax.data import Rows, RowStream, Template, mix, read_rows, write_rows
from twinkle_jax.data.prompt_files import download_split
from twinkle_jax.data.rows import Row, Table, to_rows
from twinkle_jax.twinkle.names import construct, local_id, refuse

_TEMPLATES, _PREPROCESSORS = "twinkle_jax.twinkle.template", "twinkle_jax.twinkle.preprocessor"
_WORK = (
    "num_proc",
    "load_from_cache_file",
    "batched",
    "desc",
    "keep_in_memory",
    "writer_batch_size",
)
_SUFFIXES = {".csv": "csv", ".parquet": "parquet", ".pq": "parquet"}


@dataclass
class DatasetMeta:
    """Where the rows of a data set are.

    Attributes:
        dataset_id: a file or a directory, as [`read_rows`][twinkle_jax.data.read_rows] takes them,
            or an id on the Hugging Face hub, with `hf://` or without.
        subset_name: of a data set on the hub.
        split: likewise.
        data_slice: numbers of the rows to take, in this order; beyond the end they start again.
        data: instead of an id, rows, columns, a function that makes rows, or a data set of Hugging
            Face's `datasets`.

    Raises:
        ValueError: if there is neither an id nor data, or the slice is not iterable.
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
        """Give the key under which `Dataset.datasets` has it."""
        name = self.dataset_id.replace(os.sep, "_").replace(".", "_")
        name = name if self.data is None else f"__memory_{self._uid}__"
        return f"{name}:{self.subset_name}:{self.split}"

    def load(self, *, stream: bool) -> Table:
        """Read the rows."""
        rows = self._rows(stream)
        if self.data_slice is not None and isinstance(rows, Rows):
            return Rows(rows[index % len(rows)] for index in self.data_slice)
        return rows

    def _rows(self, stream: bool) -> Table:
        data = self.data
        if data is None:
            place = local_id(self.dataset_id, "dataset_id")
            if Path(place).exists():
                return read_rows(place, stream=stream)
            folder = "data" if self.subset_name == "default" else self.subset_name
            files = download_split(place, self.split, subset=folder)
            tables = [read_rows(file, stream=stream) for file in files]
            return mix(tables, interleave=False)
        if isinstance(data, dict):
            return Rows(to_rows(data))
        if callable(data):
            return RowStream(data) if stream else Rows(data())
        if isinstance(data, Iterable):
            return Rows(data) if hasattr(data, "__len__") else RowStream(lambda: data)
        raise ValueError(f"data must be rows, columns or a function, got {type(data).__name__}")


class Dataset:
    """Rows that are mapped, filtered, mixed and encoded in place.

    `datasets` has the rows of each source by `DatasetMeta.get_id()`, and `dataset` those that one
    gets: of the first source, or the mixed ones.

    Args:
        dataset_meta: the first source; None to add sources later.
        options: `streaming=True` reads when rows are asked for. `num_proc` changes nothing.

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
        self._mixed, self._writer = False, None
        if dataset_meta is not None:
            self.add_dataset(dataset_meta, **options)

    def add_dataset(self, dataset_meta: DatasetMeta, **options: Any) -> None:
        """Add a source."""
        stream = bool(options.pop("streaming", self.streams))
        refuse("add_dataset", result_options(options))
        self.datasets[dataset_meta.get_id()] = dataset_meta.load(stream=stream)
        self._show_single()

    def set_template(self, template_func: Any, **options: Any) -> None:
        """Choose what encodes: a name, `"Qwen3_5Template"`, with its arguments; or an object."""
        self.template = construct(template_func, _TEMPLATES, **options)

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
            dataset_meta: of which source; needed while there are several that are not mixed.
            init_args: arguments of the class.
            options: `remove_columns` and `batch_size`; those of `datasets.map` that change only
                how it is computed have no effect.
        """
        function = construct(preprocess_func, _PREPROCESSORS, **(init_args or {}))
        chosen: dict[str, Any] = {
            key: options.pop(key) for key in ("remove_columns", "batch_size") if key in options
        }
        refuse("map", result_options(options))
        self._map(function, dataset_meta, chosen)

    def filter(
        self,
        filter_func: Any,
        dataset_meta: DatasetMeta | None = None,
        init_args: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Keep the rows for which a function, or a `DataFilter`, returns something true."""
        function = construct(filter_func, _PREPROCESSORS, **(init_args or {}))
        refuse("filter", result_options(options))
        self._change(dataset_meta, lambda rows: rows.filter(function))

    def mix_dataset(self, interleave: bool = True) -> None:
        """Mix the sources: one row of each in turn until the first ends, or one after the other."""
        if len(self.datasets) > 1:
            self.dataset = mix(list(self.datasets.values()), interleave=interleave)
            self._mixed = True

    def encode(self, add_generation_prompt: bool = False, **options: Any) -> None:
        """Encode conversations: `messages`, or those in columns such as `positive` and `negative`.

        Args:
            add_generation_prompt: whether the assistant speaks next, as for sampling.
            options: as for `map`.

        Raises:
            ValueError: if there is no template yet, or a conversation is too long for it.
        """
        removed = options.pop("remove_columns", None) or ()
        size = options.pop("batch_size", 1000)
        refuse("encode", result_options(options))
        template = self.needed_template()

        def encode(rows: list[Row]) -> list[Row]:
            kept = [{key: x for key, x in row.items() if key not in removed} for row in rows]
            return encode_rows(template, kept, add_generation_prompt)

        self.dataset = self.dataset.map_rows(encode, size)

    def check(self, **options: Any) -> None:
        """Drop the rows that the template cannot encode."""
        refuse("check", result_options(options))
        template = self.needed_template()
        self.dataset = self.dataset.filter(lambda row: encodes(template, row))

    def save_as(self, output_path: str | Path, format: str | None = None, **options: Any) -> None:
        """Write the rows to a file, as its suffix or `format` says: jsonl, csv or parquet."""
        mode = options.pop("mode", "immediate")
        options.pop("batch_size", None)
        refuse("save_as", options | ({} if mode == "immediate" else {"mode": mode}))
        if self.dataset is None or (len(self.datasets) > 1 and not self._mixed):
            raise ValueError("dataset must have rows, of one source or mixed by mix_dataset")
        kind = format or _SUFFIXES.get(Path(output_path).suffix.lower(), "jsonl")
        write_rows(self, output_path, "jsonl" if kind == "json" else kind)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Row:
        row: Row = self.dataset[index]
        return row

    def __iter__(self) -> Iterator[Row]:
        return iter(self.dataset)

    def _map(self, function: Any, meta: DatasetMeta | None, options: dict[str, Any]) -> None:
        self._change(meta, lambda rows: rows.map(function, **options))

    def _change(self, meta: DatasetMeta | None, change: Callable[[Any], Table]) -> None:
        if self._mixed:
            self.dataset = change(self.dataset)
            return
        key = self._key(meta)
        self.datasets[key] = change(self.datasets[key])
        self._show_single()

    def _key(self, meta: DatasetMeta | None) -> str:
        if meta is not None:
            return meta.get_id()
        if len(self.datasets) != 1:
            raise ValueError(
                f"dataset_meta must name one of {len(self.datasets)} sources, got None: or call "
                "mix_dataset first"
            )
        return next(iter(self.datasets))

    def _show_single(self) -> None:
        if len(self.datasets) == 1:
            (self.dataset,) = self.datasets.values()

    def needed_template(self) -> Template:
        """Give the template, which must have been set."""
        assert self.template is not None, "set_template must be called first"
        template: Template = self.template
        return template


class IterableDataset(Dataset):
    """A data set that is read while one goes over it; it has no length and no numbers."""

    streams = True

    def __len__(self) -> int:
        raise NotImplementedError("a stream has no length")

    def __getitem__(self, index: int) -> Row:
        raise NotImplementedError("the rows of a stream have no numbers")


def encode_rows(template: Template, rows: list[Row], prompt: bool) -> list[Row]:
    """Encode `messages`, or each column of conversations; columns that there are stay."""
    if not rows:
        return []
    nested = [k for k, x in rows[0].items() if isinstance(x, dict) and "messages" in x]
    if not nested:
        kept, features = template.encode_all(rows, prompt)
        return [rows[i] | _lists(feature) for i, feature in zip(kept, features, strict=True)]
    columns = {}
    for key in nested:
        kept, features = template.encode_all([row[key] for row in rows], prompt)
        columns[key] = dict(zip(kept, features, strict=True))
    complete = [i for i in range(len(rows)) if all(i in column for column in columns.values())]
    return [rows[i] | {key: _lists(columns[key][i]) for key in nested} for i in complete]


def _lists(feature: Any) -> Row:
    return {k: x.tolist() if hasattr(x, "tolist") else x for k, x in feature.items()}


def encodes(template: Template, row: Row) -> bool:
    """Whether the template can encode a row."""
    try:
        return bool(encode_rows(template, [row], False))
    except ValueError:
        return False


def result_options(options: dict[str, Any]) -> dict[str, Any]:
    """Give the options that would change the result, without those about how it is computed."""
    return {key: value for key, value in options.items() if key not in _WORK}
