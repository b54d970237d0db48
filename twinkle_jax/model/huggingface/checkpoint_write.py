"""Writing checkpoints that transformers and vLLM load, one shard in memory at a time."""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from twinkle_jax.model.decoder.module import Decoder
from twinkle_jax.model.decoder.parameters import parameter_table
from twinkle_jax.model.huggingface.atomic_directory import check_target, replace_directory
from twinkle_jax.model.huggingface.checkpoint_files import (
    CONFIG,
    DTYPES,
    INDEX,
    SINGLE,
    TOKENIZER_FILES,
    StoredTensor,
    import_safetensors,
    inside,
    open_files,
    stored_tensors,
)
from twinkle_jax.model.huggingface.checkpoint_names import (
    carried_tensors,
    layer_number,
    stored_names,
    stored_prefix,
    to_stored,
)
from twinkle_jax.model.huggingface.checkpoint_read import all_finite
from twinkle_jax.model.huggingface.config_json import export_config


class ExportTensor(NamedTuple):
    """A tensor to write: its size, and a function that fetches it."""

    name: str
    nbytes: int
    fetch: Callable[[], np.ndarray]


def save_pretrained(
    decoder: Decoder,
    directory: str | Path,
    *,
    dtype: DTypeLike | None = None,
    max_shard_size: int = 5_000_000_000,
) -> None:
    """Write a checkpoint that `transformers`, vLLM and `load_pretrained` read.

    Everything is written beside the directory, read back and compared, and only then put in its
    place in one step, so that an interrupted export leaves an older one whole. Files of an older
    export that are not its weights or configuration stay. The tokenizer's files come along from
    where the decoder was read. A vision-language checkpoint of Qwen3.5 or Gemma 3 keeps its form,
    with the vision and multi-token-prediction tensors copied as they were; without the directory it
    came from, it becomes a checkpoint of the text model.

    Args:
        decoder: what to write. All of its parameters must be addressable from this process.
        directory: where to; replaced if it holds an earlier export.
        dtype: type to write; by default that of each parameter.
        max_shard_size: bytes of tensors per file; several files get an index.

    Raises:
        ValueError: if a parameter is NaN or infinite, or becomes so in `dtype`; if `dtype` is none
            that `load_pretrained` reads; if the target is a file, a mount point or the current
            directory, or holds what is no file; or if `max_shard_size` is not positive. What stood
            in the target is then as it was.
        ImportError: if safetensors is not installed.
    """
    import_safetensors()
    target = Path(directory).expanduser()
    if max_shard_size < 1:
        raise ValueError(f"max_shard_size must be at least 1 byte, got {max_shard_size}")
    others = _other_files(target)
    with ExitStack() as stack:
        carried = carried_from_source(decoder, stack)
        nested = bool(carried)
        stored = stored_tensors(decoder.source) if decoder.source and nested else ()
        tensors = list_tensors(decoder, stored_prefix(stored), dtype) + carried
        with replace_directory(target) as fresh:
            _write_tensors(fresh, tensors, max_shard_size)
            main = decoder.params["embed_tokens"]["embedding"].dtype if dtype is None else dtype
            config = export_config(decoder.config, nested=nested, dtype=jnp.dtype(main).name)
            _write_json(fresh / CONFIG, config)
            _keep_files(decoder.source, fresh, TOKENIZER_FILES)
            _keep_files(target, fresh, others)


def _write_tensors(directory: Path, tensors: list[ExportTensor], max_shard_size: int) -> None:
    """Write one file, or as many as the size asks for and their index."""
    shards = _plan(tensors, max_shard_size)
    if len(shards) == 1:
        return _write_shard(directory / SINGLE, shards[0])
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(directory / name, shard)
        weight_map |= {tensor.name: name for tensor in shard}
    size = sum(tensor.nbytes for tensor in tensors)
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    return _write_json(directory / INDEX, index)


def _plan(tensors: list[ExportTensor], max_shard_size: int) -> list[list[ExportTensor]]:
    """Fill shards in order; a tensor that is larger than a shard gets its own."""
    shards: list[list[ExportTensor]] = [[]]
    room = max_shard_size
    for tensor in tensors:
        if tensor.nbytes > room and shards[-1]:
            shards.append([])
            room = max_shard_size
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return shards


def _write_shard(path: Path, shard: list[ExportTensor]) -> None:
    """Write a file, and compare what can be read from it with what was meant."""
    safetensors = import_safetensors()
    arrays = {tensor.name: tensor.fetch() for tensor in shard}
    safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
    with safetensors.safe_open(path, framework="np") as file:
        for name, array in arrays.items():
            if not np.array_equal(_bytes_of(file.get_tensor(name)), _bytes_of(array)):
                raise OSError(f"{name} reads back from {path} with other values")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _keep_files(place: Path | None, directory: Path, names: Iterable[str]) -> None:
    """Copy files that the new export does not have yet."""
    for name in names:
        if place is not None and (place / name).is_file() and not (directory / name).exists():
            shutil.copy2(inside(place, name), directory / name)


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _other_files(target: Path) -> list[str]:
    """List what stands in the target besides an earlier export; refuse to replace the rest."""
    check_target(target)
    if not target.exists():
        return []
    for path in sorted(target.iterdir()):
        if not path.is_file():
            raise ValueError(
                f"directory must hold files only, got {path.name!r} in {target}: it would be lost"
            )
    weights = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
    return sorted(p.name for p in target.iterdir() if not weights.fullmatch(p.name))


def list_tensors(decoder: Decoder, prefix: str, dtype: DTypeLike | None) -> list[ExportTensor]:
    """List the decoder's tensors under their stored names: outside the layers, then by layer.

    Raises:
        ValueError: for types that a checkpoint here does not have; `fetch` raises it for values
            that are not finite, or not in `dtype`.
    """
    config = decoder.config
    params: Any = decoder.params
    rows = []
    for path, p in parameter_table(config).items():
        leaf: Any = reduce(getitem, path, params)
        to = jnp.dtype(leaf.dtype if dtype is None else dtype)
        if to.name not in DTYPES.values():
            raise ValueError(f"dtype must be one of {', '.join(DTYPES.values())}, got {to.name}")
        nbytes = math.prod(p.shape) * to.itemsize
        for repeat, name in enumerate(stored_names(config, path, p, prefix)):
            layer = layer_number(config, path, repeat) if path[0] == "layers" else -1
            fetch = partial(_fetch, name, path, leaf, None if layer < 0 else repeat, to)
            rows.append((layer, ExportTensor(name, nbytes, fetch)))
    return [tensor for _, tensor in sorted(rows, key=lambda row: row[0])]


def _fetch(
    name: str, path: tuple[str, ...], leaf: jax.Array, repeat: int | None, dtype: jnp.dtype
) -> np.ndarray:
    """Bring one tensor to the host in the form that is stored."""
    values = leaf if repeat is None else jax.lax.dynamic_index_in_dim(leaf, repeat, 0, False)
    return host_tensor(name, path, np.asarray(values), dtype)


def host_tensor(
    name: str, path: tuple[str, ...], values: np.ndarray, dtype: jnp.dtype
) -> np.ndarray:
    """Turn values into what a checkpoint holds; refuse what no loader should read."""
    if not all_finite(values):
        raise ValueError(f"{name} must be finite to be saved, got NaN or infinity")
    with np.errstate(over="ignore"):
        array = values.astype(dtype)
    if not all_finite(array):
        raise ValueError(f"{name} must fit {dtype.name}, got larger values of {values.dtype.name}")
    # safetensors 0.8 writes the wrong bytes of arrays that are not contiguous.
    return np.ascontiguousarray(to_stored(path, array))


def carried_from_source(decoder: Decoder, stack: ExitStack) -> list[ExportTensor]:
    """List the vision and multi-token-prediction tensors to copy from where the decoder was."""
    source = decoder.source
    if source is None or not source.is_dir() or "text_config" not in decoder.config.original:
        return []
    stored = stored_tensors(source)
    wanted = {name: stored[name] for name in carried_tensors(decoder.config, stored)}
    files = open_files(stack, wanted)
    return [
        ExportTensor(name, _nbytes(stored[name]), partial(files[name].get_tensor, name))
        for name in wanted
    ]


def _nbytes(tensor: StoredTensor) -> int:
    bits = "".join(c for c in tensor.dtype if c.isdigit())[:2]  # F32, BF16, F8_E4M3
    return math.prod(tensor.shape) * max(int(bits or 8) // 8, 1)
