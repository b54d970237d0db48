"""Loading and saving checkpoints, with one tensor in host memory at a time.

Loading checks everything first, then places tensor by tensor. transformers and vLLM load what is
saved.
"""

import json
import math
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Array

from twinkle_jax.data.tokenizer import NAMED_TEMPLATES
from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.families import FAMILIES
from twinkle_jax.model.decoder.forward import Decoder
from twinkle_jax.model.decoder.lora import walk
from twinkle_jax.model.decoder.parameters import (
    EXPERTS,
    Parameter,
    Params,
    check_shapes,
    nest,
    parameter_table,
    stacked_shape,
    type_in,
)
from twinkle_jax.model.huggingface.checkpoint_files import (
    ADAPTER_CONFIG,
    CONFIG,
    DTYPES,
    EMBEDDING,
    HEADS,
    INDEX,
    PREFIX,
    SCORE,
    SINGLE,
    TOKENIZER_FILES,
    StoredTensor,
    carried_tensors,
    first_layers,
    import_safetensors,
    inside,
    is_transposed,
    layer_number,
    locate,
    match_tensors,
    names_by_expert,
    read_dtype,
    read_json,
    read_part,
    stored_names,
    stored_outputs,
    stored_prefix,
    stored_shape,
    stored_tensors,
    stored_together,
    to_stored,
)
from twinkle_jax.model.huggingface.config_json import export_config, parse_config
from twinkle_jax.model.huggingface.quantized import fp8_block, open_files, scaled, unpacked
from twinkle_jax.model.huggingface.saving import (
    Gather,
    check_target,
    gather,
    one_outcome,
    replace_directory,
    write_once,
)

Partition = Callable[[str, tuple[int, ...]], PartitionSpec]
Slices = tuple[slice, ...]
MAX_SHARD_SIZE = 5_000_000_000  # bytes
ON_THE_HOST = 16 * 2**20  # bytes of the largest leaf whose layers are stacked on the host


def load_pretrained(
    path_or_id: str | Path,
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    partition: Partition | None = None,
    config: DecoderConfig | None = None,
    argument: str = "path_or_id",
) -> Decoder:
    """Read a Hugging Face checkpoint.

    Families are Llama, SmolLM3, OLMo 2 and 3, OLMoE, Granite 3, Phi-3 and 4, Mistral, Ministral 3,
    Seed-OSS, EXAONE 4, ERNIE 4.5 (dense), GLM-4 to GLM-4.7, Solar Open, DeepSeek-V3, Youtu-LLM,
    Qwen2 to Qwen3.6, Gemma 2, the text models of Gemma 3, Gemma 4 and Mistral Small 3, and GPT-OSS.

    Mixtures of experts are read in both forms, stacked or a tensor for each expert, and saved in
    the second, as transformers does. Experts of GPT-OSS in MXFP4, and weights in FP8 with a scale
    for each block, output or tensor, are converted to bfloat16, or `dtype`.

    The names, shapes and types of all tensors are checked before anything is allocated. Then they
    are read and placed on their devices one at a time, so the host holds one tensor at a time. Only
    safetensors are read; no code of a checkpoint ever runs.

    If the mesh spans several processes, all of them must call this. Each reads only the parts of
    tensors that its own devices hold.

    Args:
        path_or_id: a directory with `config.json` and `model.safetensors`, in one file or with an
            index; or a hub id, which needs huggingface_hub.
        dtype: type of the parameters; by default as stored, and bfloat16 for MXFP4 and FP8.
        mesh: devices to place parameters on; by default the first device.
        partition: from a parameter's name (`"layers/0/mlp/up_proj/kernel"`) and shape, stacked
            axis first, to its `PartitionSpec` on the mesh; by default, replicated.
        config: instead of the checkpoint's; with fewer layers, the first ones are read.
        argument: the user's name for `path_or_id` in errors.

    Returns:
        The decoder; its `source` is the directory, from which exports copy the tokenizer.

    Raises:
        ValueError: for an unknown `model_type`, missing, extra or misshapen tensors, files that
            are truncated, pickled or outside the directory, a `dtype` that is not a floating-point
            type, values that are NaN or infinite, or become so in `dtype`, and other quantised
            weights.
        RuntimeError: if the mesh spans several processes, and another one raised an error.
        ImportError: if safetensors is not installed.
    """
    together = mesh is not None and mesh.is_multi_process
    with one_outcome(f"load_pretrained({str(path_or_id)!r})", together=together):
        directory = locate(path_or_id, argument=argument)
        stored = stored_tensors(directory)
        if config is None:
            config = read_config(directory)
            stored = converted(stored, config, directory)
        else:
            stored = first_layers(converted(stored, config, directory), config.layers)
        params = read_params(config, stored, dtype=dtype, mesh=mesh, partition=partition)
    return Decoder(config, params, source=directory.absolute())


def read_params(
    config: DecoderConfig,
    stored: Mapping[str, StoredTensor],
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    partition: Partition | None = None,
) -> Params:
    """Read a decoder's parameters from what `converted` lists, see `load_pretrained`."""
    names, table = match_tensors(config, stored), parameter_table(config)
    with ExitStack() as stack:
        files = open_files(stack, stored)
        _check_tied_head(config, files, stored, mesh is not None and mesh.is_multi_process)
        leaves = [
            StoredLeaf(
                path=path,
                shape=stacked_shape(config, path, p),
                dtype=type_in(path, _leaf_dtype(names[path], stored, dtype)),
                names=names[path],
                slices=[[files[name].get_slice(name) for name in group] for group in names[path]],
                first=stored_outputs(config, path, table)[0],
                transposed=p.transposed,
            )
            for path, p in table.items()
        ]
        return nest({leaf.path: place(leaf, _sharding(mesh, partition, leaf)) for leaf in leaves})


def read_config(directory: Path) -> DecoderConfig:
    """Read the `config.json` of a checkpoint; errors name the file."""
    content = read_json(directory, CONFIG)
    try:
        return parse_config(content)
    except ValueError as error:
        raise ValueError(f"{directory / CONFIG}: {error}") from None


def converted(
    stored: Mapping[str, StoredTensor], config: DecoderConfig, directory: Path
) -> dict[str, StoredTensor]:
    """List what the tensors of a checkpoint are converted to: those in MXFP4 and FP8 are."""
    if FAMILIES[config.model_type].clamped_experts:
        return unpacked(stored)
    content = read_json(directory, CONFIG) if inside(directory, CONFIG).exists() else {}
    try:
        block = fp8_block(content)
    except ValueError as error:
        raise ValueError(f"{directory / CONFIG}: {error}") from None
    return scaled(stored, block)


def _check_tied_head(
    config: DecoderConfig,
    files: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    together: bool,
) -> None:
    """Accept a stored copy of a tied head, and refuse a head that differs from the embedding."""
    head = next((name for name in HEADS if name in stored), None)
    if head is None or not config.tie_embeddings:
        return
    embedding = stored_prefix(stored) + EMBEDDING
    a, b = (files[name].get_slice(name) for name in (head, embedding))
    size = config.vocab_size
    parts = [slice(i, min(i + 4096, size)) for i in range(0, size, 4096)]
    if together:  # each process compares its share of the rows
        parts = parts[jax.process_index() :: jax.process_count()]
    same = stored[head][1:3] == stored[embedding][1:3]  # shape and type
    same = same and all(np.array_equal(a[part], b[part]) for part in parts)
    if not same:
        raise ValueError(f"tie_word_embeddings is true, but {head} differs from {embedding}")


def _leaf_dtype(
    names: list[tuple[str, ...]], stored: Mapping[str, StoredTensor], dtype: DTypeLike | None
) -> np.dtype[Any]:
    """Return the requested type, or else the stored one, which all layers must share."""
    types = sorted({DTYPES[stored[name].dtype] for group in names for name in group})
    if dtype is None and len(types) > 1:
        raise ValueError(
            f"dtype must be given where layers differ, as those of {names[0][0]} do: "
            f"{types}, got None"
        )
    wanted = read_dtype(types[0] if dtype is None else dtype)
    return np.dtype(jax.dtypes.canonicalize_dtype(wanted))  # float64 only if JAX has it enabled


@dataclass(frozen=True)
class StoredLeaf:
    """One leaf of the tree of parameters, read from its tensors in parts.

    Attributes:
        path: keys from the root.
        shape: shape here, the axis of stacked layers included.
        dtype: type here.
        names: names of the tensors, once or for each stacked layer: one, or those of all experts.
        slices: the same tensors, open for reading.
        first: the leaf's first output in tensors that hold other leaves, too.
        transposed: whether the tensors have a matrix the other way round.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    names: list[tuple[str, ...]]
    slices: list[list[Any]]
    first: int = 0
    transposed: bool = True

    @property
    def stacked(self) -> bool:
        """Whether the first axis counts layers, each of which has a tensor of its own."""
        return self.path[0] == "layers"

    @property
    def by_expert(self) -> bool:
        """Whether it holds the matrices of each layer's experts, which may be large."""
        return EXPERTS in self.path and len(self.shape) == 4

    def read(self, index: Slices) -> Iterator[np.ndarray]:
        """Read the part that one device holds: as one array, or by layer, matrices by expert."""
        part = tuple(slice(*s.indices(n)) for s, n in zip(index, self.shape, strict=True))
        if not self.stacked:
            yield self._read(0, part)
            return
        for layer in range(part[0].start, part[0].stop):
            if not self.by_expert:
                yield self._read(layer, part[1:])
                continue
            for expert in range(part[1].start, part[1].stop):
                yield self._read(layer, (slice(expert, expert + 1), *part[2:]))[0]

    def _read(self, layer: int, part: Slices) -> np.ndarray:
        stored = read_part(
            self.path, self.slices[layer], part, self.shape[-1], self.first, self.transposed
        )
        if not all_finite(stored):
            name = self._name_of_bad(layer, part, stored)
            raise ValueError(f"{name} must be finite, got NaN or infinity")
        with np.errstate(over="ignore"):
            values = np.asarray(stored, self.dtype)
        if not all_finite(values):
            name = self._name_of_bad(layer, part, values)
            raise ValueError(f"{name} must fit {self.dtype}, got larger values of {stored.dtype}")
        return values

    def _name_of_bad(self, layer: int, part: Slices, values: np.ndarray) -> str:
        """Return the tensor of the first value that is not finite."""
        names = self.names[layer]
        if len(names) == 1:
            return names[0]
        at = np.argwhere(~np.isfinite(values))[0]
        expert, column = part[0].start + at[0], part[-1].start + at[-1]
        each = len(names) // self.shape[1]  # gate and up lie side by side
        return names[expert * each + column * each // self.shape[-1]]


def all_finite(values: np.ndarray) -> bool:
    """Return whether there is no NaN and no infinity."""
    if values.dtype == jnp.bfloat16:  # its exponent bits: NumPy's isfinite is slow for this type
        return not bool(np.any((values.view(np.uint16) & 0x7F80) == 0x7F80))
    return bool(np.isfinite(values).all())


def _sharding(mesh: Mesh | None, partition: Partition | None, leaf: StoredLeaf) -> Sharding:
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    if partition is None:
        return NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, partition("/".join(leaf.path), leaf.shape))


def place(leaf: StoredLeaf, sharding: Sharding) -> jax.Array:
    """Read each part that this process's devices hold once, one after the other."""
    placed: dict[str, jax.Array] = {}
    parts = []
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        key = str(index)
        if key in placed:  # another device has this part already: copy it from there
            parts.append(jax.device_put(placed[key], device))
        else:
            parts.append(_fill(leaf, index or (), device))
            placed[key] = parts[-1]
        # Without waiting, host copies of many parts would be alive at once.
        parts[-1].block_until_ready()
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)


def _fill(leaf: StoredLeaf, index: Slices, device: jax.Device) -> jax.Array:
    """Read one device's part; large stacks are filled on the device, piece by piece."""
    pieces = leaf.read(index)
    if not leaf.stacked:
        return jax.device_put(next(pieces), device)
    shape = tuple(len(range(*s.indices(n))) for s, n in zip(index, leaf.shape, strict=True))
    if np.prod(shape) * leaf.dtype.itemsize <= ON_THE_HOST:
        return jax.device_put(np.stack(list(pieces)).reshape(shape), device)
    stack = jnp.zeros(shape, leaf.dtype, device=device)
    for at in np.ndindex(shape[: 2 if leaf.by_expert else 1]):
        piece = jax.device_put(next(pieces), device)
        stack = _write_piece(stack, piece, np.asarray(at, np.int32)).block_until_ready()
    return stack


@partial(jax.jit, donate_argnums=0)
def _write_piece(stack: Array, piece: Array, at: Array) -> Array:
    piece = piece.reshape((1,) * len(at) + piece.shape)
    at = jnp.pad(at, (0, stack.ndim - len(at)))  # 0, and of one type: Python's may have 64 bits
    return jax.lax.dynamic_update_slice(stack, piece, list(at))


_STORED_DTYPES = {name: stored for stored, name in DTYPES.items()}
_WIDE = ("bfloat16", "float32")  # types with the range of float32


def save_pretrained(
    decoder: Decoder,
    directory: str | Path,
    *,
    dtype: DTypeLike | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> None:
    """Write a checkpoint that `transformers`, vLLM and `load_pretrained` read.

    The files are written beside the directory, read back and compared, and then moved into place in
    one step: an interrupted export leaves an older one intact. The tokenizer's files are copied
    from the directory that the decoder was read from, and replace those of an older export. Of its
    other files, all but weights and configuration are kept. Tensors that the decoder does not use
    are copied from there, too: the vision tower of Qwen3.5 or Gemma, and heads that predict several
    tokens. They are unchanged, but those in FP8 become bfloat16. If that directory is gone, a
    warning says that only the text model is written.

    If the parameters are spread over several processes, all of them must call this. They gather one
    tensor at a time, process 0 writes it, and all return when the checkpoint is complete.

    Args:
        decoder: the decoder to write.
        directory: where to write; an earlier export there is replaced.
        dtype: type to write; by default that of each parameter.
        max_shard_size: bytes of tensors per file; several files get an index.

    Raises:
        ValueError: if a parameter is NaN or infinite, or becomes so in `dtype`; if `dtype` is not
            one that `load_pretrained` reads; if the target is a file, a mount point or the current
            directory, or holds a directory or an adapter; if the decoder has an adapter that is
            not merged, or other parameters than its `config` has; or if `max_shard_size` is not
            positive. The target is then unchanged.
        RuntimeError: on other processes, for an error of process 0.
        ImportError: if safetensors is not installed.
    """
    save_checkpoint(decoder, directory, dtype=dtype, max_shard_size=max_shard_size)


class ScoreHead(NamedTuple):
    """What the checkpoint of a reward model has beside its decoder.

    Attributes:
        weights: $w$, one number for each feature of the last hidden state.
        entries: of `config.json`, in place of the decoder's.
        write_tokenizer: writes the files of the tokenizer into a directory.
    """

    weights: jax.Array
    entries: dict[str, Any]
    write_tokenizer: Callable[[Path], None]


def _check_decoder(decoder: Any) -> None:
    if not isinstance(decoder, Decoder):
        kind = type(decoder).__name__
        raise TypeError(f"decoder must be a Decoder(config, params), got {kind}")


def save_checkpoint(
    decoder: Decoder,
    directory: str | Path,
    *,
    dtype: DTypeLike | None,
    max_shard_size: int = MAX_SHARD_SIZE,
    head: ScoreHead | None = None,
    for_server: bool = False,
) -> None:
    """Write a decoder, or a reward model: see `save_pretrained`.

    Args:
        decoder: likewise.
        directory: likewise.
        dtype: likewise.
        max_shard_size: likewise.
        head: of a reward model.
        for_server: True neither reads the files back nor waits for the disk: they need not outlast
            a lost machine. The embedding is written as the head, too, where it serves as one.
    """
    import_safetensors()
    _check_decoder(decoder)
    if max_shard_size < 1:
        raise ValueError(f"max_shard_size must be at least 1 byte, got {max_shard_size}")
    if adapted := [path for path, _ in walk(decoder.params) if path[-1] == "lora_A"]:
        raise ValueError(
            "decoder must have no adapter, which would be lost: add it to the kernels with "
            f"merge_adapter, or write it with save_adapter, got {'/'.join(adapted[0])}"
        )
    _check_params(decoder, head)
    gathers = [tensor.gather for tensor in _with_head(decoder, PREFIX, dtype, head, for_server)]
    target = Path(directory).expanduser()
    write = partial(_write_checkpoint, decoder, head, target, dtype, max_shard_size, for_server)
    arrays = decoder.params, None if head is None else head.weights
    write_once(f"save_pretrained to {directory}", arrays, gathers, write)


def _check_params(decoder: Decoder, head: ScoreHead | None) -> None:
    """Refuse parameters that are not those of the configuration: they would be lost."""
    config = decoder.config
    table = parameter_table(config)
    expected = {path: stacked_shape(config, path, p) for path, p in table.items()}
    shapes = {
        path: tuple(x.shape) for path, x in walk(decoder.params) if not path[-1].startswith("lora_")
    }
    if head is not None:  # the head for tokens is not written
        shapes.pop(("lm_head", "kernel"), None)
    check_shapes("decoder", expected, shapes, by="its config")


class ExportTensor(NamedTuple):
    """A tensor to write, known by its header until it is fetched.

    Attributes:
        name: name in the checkpoint.
        dtype: type, as safetensors calls it.
        shape: shape in the checkpoint.
        gather: copies the values to the host.
        prepare: turns them into what is stored.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    gather: Gather
    prepare: Callable[[np.ndarray], np.ndarray] = np.ascontiguousarray

    @property
    def itemsize(self) -> int:
        """Bytes of an entry."""
        bits = re.findall(r"\d+", self.dtype)  # F32, BF16, F8_E4M3, BOOL
        return max(int(bits[0]) // 8, 1) if bits else 1

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.itemsize

    def fetch(self) -> np.ndarray:
        """Copy the tensor to the host in the form that is stored."""
        return self.prepare(self.gather())


def list_tensors(decoder: Decoder, prefix: str, dtype: DTypeLike | None) -> list[ExportTensor]:
    """List the decoder's tensors under their stored names: those outside the layers come first.

    Raises:
        ValueError: for types that `load_pretrained` does not read; `fetch` raises it for values
            that are not finite, or do not fit in `dtype`.
    """
    config = decoder.config
    params: Any = decoder.params
    rows, table = [], parameter_table(config)
    for path, p in table.items():
        together = stored_together(config, path)
        if path != together[0]:  # in the tensor of the first
            continue
        leaves: list[Any] = [reduce(getitem, other, params) for other in together]
        leaf = leaves[0]
        p = p._replace(shape=(*p.shape[:-1], stored_outputs(config, path, table)[1]))
        to = type_in(path, _written_dtype(leaf, dtype))
        for repeat, name in enumerate(stored_names(config, path, p, prefix)):
            stacked = path[0] == "layers"
            layer = layer_number(config, path, repeat) if stacked else -1
            for piece in _pieces(name, p, (repeat,) if stacked else ()):
                # What devices can do takes a host with few cores long.
                whole = len(leaves) == 1 and piece.columns == slice(None)
                on_device = whole and p.transposed and is_transposed(path)
                tensor = ExportTensor(
                    piece.name,
                    _STORED_DTYPES[to.name],
                    stored_shape(p._replace(shape=piece.shape)),
                    partial(
                        _gather_joined,
                        leaves,
                        piece.place,
                        dtype=to if to.name in _WIDE else None,
                        transposed=on_device,
                    ),
                    partial(
                        host_tensor,
                        piece.name,
                        path,
                        dtype=to,
                        columns=piece.columns,
                        transposed=p.transposed and not on_device,
                    ),
                )
                rows.append((layer, tensor))
    return [tensor for _, tensor in sorted(rows, key=lambda row: row[0])]


def _written_dtype(array: jax.Array, dtype: DTypeLike | None) -> np.dtype[Any]:
    return read_dtype(array.dtype if dtype is None else dtype)


def _with_head(
    decoder: Decoder, prefix: str, dtype: DTypeLike | None, head: ScoreHead | None, for_server: bool
) -> list[ExportTensor]:
    """List the decoder's tensors, and then that of the head."""
    tensors = list_tensors(decoder, prefix, dtype)
    if for_server and decoder.config.tie_embeddings:
        config, path = replace(decoder.config, tie_embeddings=False), ("lm_head", "kernel")
        [name] = stored_names(config, path, parameter_table(config)[path], prefix)
        embedding = next(tensor for tensor in tensors if tensor.name.endswith(EMBEDDING))
        tensors.append(embedding._replace(name=name))
    if head is None:
        return tensors
    to = _written_dtype(head.weights, dtype)

    def as_row(weights: np.ndarray) -> np.ndarray:
        return host_tensor(SCORE, (SCORE,), weights[None], dtype=to)

    shape, copy = (1, *head.weights.shape), partial(gather, head.weights)
    return [*tensors, ExportTensor(SCORE, _STORED_DTYPES[to.name], shape, copy, as_row)]


def _gather_joined(
    leaves: Sequence[jax.Array], place: tuple[int, ...], **options: Any
) -> np.ndarray:
    """Copy parameters of one tensor to the host, side by side; options are those of `gather`."""
    arrays = [gather(leaf, place, **options) for leaf in leaves]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-1)


class _Piece(NamedTuple):
    """What a tensor holds of a parameter: its place in the stacks, and its columns there."""

    name: str
    place: tuple[int, ...]
    columns: slice
    shape: tuple[int, ...]


def _pieces(name: str, parameter: Parameter, index: tuple[int, ...]) -> Iterator[_Piece]:
    """List the tensors of a parameter of one layer: one, or those of each expert."""
    # Experts of Gemma 4 and GPT-OSS stay stacked: no model of theirs has a tensor for each.
    stays_stacked = parameter.path[0] == EXPERTS or not parameter.transposed
    if EXPERTS not in parameter.path or stays_stacked:
        yield _Piece(name, index, slice(None), parameter.shape)
        return
    experts, rows, columns = parameter.shape
    for expert, names in enumerate(names_by_expert(name, experts)):
        width = columns // len(names)
        for i, stored in enumerate(names):
            part = slice(i * width, (i + 1) * width)
            yield _Piece(stored, (*index, expert), part, (rows, width))


def host_tensor(
    name: str,
    path: tuple[str, ...],
    values: np.ndarray,
    *,
    dtype: np.dtype[Any],
    columns: slice = slice(None),
    transposed: bool = True,
) -> np.ndarray:
    """Convert columns of values to the form that is stored; refuse values that are not finite."""
    values = values[..., columns]
    if not all_finite(values):
        raise ValueError(f"{name} must be finite to be saved, got NaN or infinity")
    with np.errstate(over="ignore"):
        array = values.astype(dtype, copy=False)
    if array.dtype != values.dtype and not all_finite(array):
        raise ValueError(f"{name} must fit {dtype.name}, got larger values of {values.dtype.name}")
    return np.ascontiguousarray(to_stored(path, array, transposed=transposed))


def _write_checkpoint(
    decoder: Decoder,
    head: ScoreHead | None,
    target: Path,
    dtype: DTypeLike | None,
    max_shard_size: int,
    for_server: bool,
    gathers: Sequence[Gather],
) -> None:
    """Write everything; `gathers` belong to the tensors that `_with_head` lists."""
    others = _other_files(target)
    with ExitStack() as stack:
        carried = _carried_from_source(decoder, stack)
        stored = stored_tensors(decoder.source) if decoder.source and carried else ()
        tensors = [
            tensor._replace(gather=gather_values)
            for tensor, gather_values in zip(
                _with_head(decoder, stored_prefix(stored), dtype, head, for_server),
                gathers,
                strict=True,
            )
        ]
        with replace_directory(target, durable=not for_server) as fresh:
            _write_shards(fresh, tensors + carried, max_shard_size, not for_server)
            main = decoder.params["embed_tokens"]["embedding"].dtype if dtype is None else dtype
            config = export_config(
                replace(decoder.config, tie_embeddings=False) if for_server else decoder.config,
                nested=bool(carried),
                dtype=jnp.dtype(main).name,
            )
            _write_json(fresh / CONFIG, config if head is None else config | head.entries)
            if head is not None:
                head.write_tokenizer(fresh)
            keep_files(decoder.source, fresh, TOKENIZER_FILES)
            replaced = TOKENIZER_FILES if (fresh / "tokenizer.json").exists() else ()
            keep_files(target, fresh, [name for name in others if name not in replaced])


def _other_files(target: Path) -> list[str]:
    """List the files in the target that no export writes; refuse to replace anything else."""
    check_target(target)
    if not target.exists():
        return []
    for path in sorted(target.iterdir()):
        if not path.is_file() and path.name != NAMED_TEMPLATES:
            raise ValueError(
                f"directory must hold files only, got {path.name!r} in {target}: it would be lost"
            )
        if path.name == ADAPTER_CONFIG:
            raise ValueError(
                f"directory must not hold an adapter, which transformers would load, got {target}"
            )
    weights = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
    return sorted(p.name for p in target.iterdir() if not weights.fullmatch(p.name))


def _carried_from_source(decoder: Decoder, stack: ExitStack) -> list[ExportTensor]:
    """List the tensors of the enclosing model, to be copied from where the decoder was read."""
    source = decoder.source
    if source is None or not FAMILIES[decoder.config.model_type].carried:
        return []
    if not source.is_dir():
        if "text_config" in decoder.config.original:
            warnings.warn(
                f"only the text model is written: {source}, which it was read from and which has "
                "the other tensors, is gone",
                stacklevel=2,
            )
        return []
    stored = converted(stored_tensors(source), decoder.config, source)
    wanted = {name: stored[name] for name in carried_tensors(decoder.config, stored)}
    files = open_files(stack, wanted)
    tensors = []
    for name, x in wanted.items():
        tensor = ExportTensor(name, x.dtype, x.shape, partial(files[name].get_tensor, name))
        if x.scales is not None:  # in FP8 they would need a quantization_config
            to = read_dtype(DTYPES[x.dtype])
            prepare = partial(host_tensor, name, (), dtype=to, transposed=False)
            tensor = tensor._replace(prepare=prepare)
        tensors.append(tensor)
    return tensors


def _write_shards(
    directory: Path, tensors: list[ExportTensor], max_shard_size: int, compared: bool
) -> None:
    """Write one file, or several and their index."""
    shards = _plan(tensors, max_shard_size)
    if len(shards) == 1:
        write_safetensors(directory / SINGLE, shards[0], compared)
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(directory / name, shard, compared)
        weight_map |= {tensor.name: name for tensor in shard}
    size = sum(tensor.nbytes for tensor in tensors)
    _write_json(directory / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})


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


def write_safetensors(path: Path, tensors: Iterable[ExportTensor], compared: bool) -> None:
    """Write a file tensor by tensor, while the next one is copied to the host.

    The library's own writer needs all tensors in memory. The file is an 8-byte length, a JSON
    header and the bytes of the tensors.

    Args:
        path: of the file.
        tensors: what to write.
        compared: whether to compare what safetensors reads with what was written.
    """
    # Wide types first: PyTorch refuses tensors whose offset is not a multiple of their item size.
    tensors = sorted(tensors, key=lambda tensor: -tensor.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for t in tensors:
        offsets = [end, end := end + t.nbytes]
        header[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8, too
    checksums = {}
    with path.open("wb") as file, ThreadPoolExecutor(1) as thread:

        def write(name: str, values: np.ndarray) -> None:
            file.write(values.data)
            if compared:
                checksums[name] = zlib.crc32(values.data)

        file.write(len(text).to_bytes(8, "little") + text)
        last: Future[None] | None = None
        for tensor in tensors:
            values = _bytes_of(tensor.fetch())
            if last is not None:
                last.result()
            last = thread.submit(write, tensor.name, values)
        if last is not None:
            last.result()
    if not compared:
        return
    with import_safetensors().safe_open(path, framework="np") as stored:
        for name, checksum in checksums.items():
            if zlib.crc32(_bytes_of(stored.get_tensor(name)).data) != checksum:
                raise OSError(f"{name} reads back from {path} with different values")


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def keep_files(source: Path | None, directory: Path, names: Iterable[str]) -> None:
    """Copy files that the new export does not have yet."""
    for name in names:
        if source is None or (directory / name).exists():
            continue
        if (source / name).is_file():
            shutil.copy2(inside(source, name), directory / name)
        elif name == NAMED_TEMPLATES and (source / name).is_dir():
            (directory / name).mkdir()
            for template in (source / name).glob("*.jinja"):
                shutil.copy2(
                    inside(source, template.name, folder=name), directory / name / template.name
                )
