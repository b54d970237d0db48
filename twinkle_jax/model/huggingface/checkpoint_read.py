"""Reading checkpoints: everything is checked first, then placed tensor by tensor."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.module import Decoder
from twinkle_jax.model.decoder.parameters import Parameter, nest, parameter_table, stacked_shape
from twinkle_jax.model.huggingface.checkpoint_files import (
    CONFIG,
    StoredTensor,
    import_safetensors,
    locate,
    read_json,
    stored_tensors,
)
from twinkle_jax.model.huggingface.checkpoint_names import DTYPES, EMBEDDING, HEAD, match_tensors
from twinkle_jax.model.huggingface.parse_config import parse_config

Partition = Callable[[str, tuple[int, ...]], PartitionSpec]


def load_pretrained(
    path_or_id: str | Path,
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    partition: Partition | None = None,
) -> Decoder:
    """Read a Hugging Face checkpoint of Qwen2, Qwen2.5, Qwen3 or Qwen3.5 (its text model).

    The names, shapes and types of all tensors are checked before anything is allocated. Then each
    shard of each parameter is read and placed on its device, so that the host holds one shard and
    one tensor at a time. Only safetensors are read; no code of a checkpoint ever runs.

    Args:
        path_or_id: a directory with `config.json` and `model.safetensors`, in one file or with an
            index; or a hub id, which needs huggingface_hub.
        dtype: type of the parameters; by default as stored.
        mesh: devices to place parameters on; by default the first device.
        partition: from a parameter's name (`"layers/0/mlp/up_proj/kernel"`) and shape, stacked
            axis first, to its `PartitionSpec` on the mesh; by default, replicated.

    Returns:
        The decoder; it remembers the directory, so that a later export finds the tokenizer.

    Raises:
        ValueError: for an unknown `model_type`, missing, extra or misshapen tensors, files that
            are truncated, pickled or outside the directory, and values that are NaN or infinite.
        ImportError: if safetensors is not installed.
    """
    directory = locate(path_or_id)
    config = parse_config(read_json(directory, CONFIG))
    stored = stored_tensors(directory)
    names = match_tensors(config, stored)
    with ExitStack() as stack:
        files = open_files(stack, stored)
        _check_tied_head(config, files, stored)
        leaves = {
            path: _Leaf(
                parameter=p,
                names=names[path],
                slices=[files[name].get_slice(name) for name in names[path]],
                stacked=path[0] == "layers",
                shape=stacked_shape(config, path, p),
                dtype=_read_type(names[path], stored, dtype),
            )
            for path, p in parameter_table(config).items()
        }
        arrays = {}
        for path, leaf in leaves.items():
            sharding = _sharding(mesh, partition, "/".join(path), leaf.shape)
            arrays[path] = _place(leaf.shape, sharding, leaf.read)
    return Decoder(config, nest(arrays), source=directory)


def open_files(stack: ExitStack, stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Open each file once; give the open file of each tensor."""
    safetensors = import_safetensors()
    handles = {
        file: stack.enter_context(safetensors.safe_open(file, framework="np"))
        for file in {tensor.file for tensor in stored.values()}
    }
    return {name: handles[tensor.file] for name, tensor in stored.items()}


@dataclass(frozen=True)
class _Leaf:
    """One leaf of the tree, to be read from its tensors in parts."""

    parameter: Parameter
    names: list[str]
    slices: list[Any]
    stacked: bool
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Read the part of the leaf that one device holds."""
        bounds = [range(*s.indices(n)) for s, n in zip(index, self.shape, strict=True)]
        out = np.empty([len(b) for b in bounds], self.dtype)
        if not self.stacked:
            out[...] = self._read(0, bounds)
            return out
        for row, repeat in enumerate(bounds[0]):
            out[row] = self._read(repeat, bounds[1:])
        return out

    def _read(self, which: int, bounds: list[range]) -> np.ndarray:
        part = [slice(b.start, b.stop) for b in bounds]
        stored = self.slices[which]
        if "conv1d" in self.parameter.path:
            values = stored[part[1], :, part[0]][:, 0].T
        elif self.parameter.path[-1] == "kernel":
            values = stored[part[1], part[0]].T
        else:
            values = stored[tuple(part)]
        if not _finite(values):
            raise ValueError(f"{self.names[which]} holds NaN or infinity")
        return np.asarray(values)


def _read_type(
    names: list[str], stored: Mapping[str, StoredTensor], dtype: DTypeLike | None
) -> np.dtype[Any]:
    """Choose the type of a leaf: as asked, or as stored, where all layers agree."""
    types = sorted({DTYPES[stored[name].dtype] for name in names})
    if dtype is None and len(types) > 1:
        raise ValueError(f"{names[0]} is stored as {types} in different layers; give dtype=")
    return np.dtype(jnp.dtype(types[0] if dtype is None else dtype))


def _finite(values: np.ndarray) -> bool:
    if values.dtype == jnp.bfloat16:  # its exponent, because NumPy's isfinite is slow there
        return not bool(np.any((values.view(np.uint16) & 0x7F80) == 0x7F80))
    return bool(np.isfinite(values).all())


def _place(
    shape: tuple[int, ...],
    sharding: Sharding,
    read: Callable[[tuple[slice, ...]], np.ndarray],
) -> jax.Array:
    """Read and place one device's part after the other; copies are made between devices."""
    placed: dict[str, jax.Array] = {}
    parts = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        key = str(index)
        values = placed[key] if key in placed else read(index or ())
        parts.append(jax.device_put(values, device))
        placed[key] = parts[-1].block_until_ready()
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _sharding(
    mesh: Mesh | None,
    partition: Partition | None,
    name: str,
    shape: tuple[int, ...],
) -> Sharding:
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    return NamedSharding(mesh, PartitionSpec() if partition is None else partition(name, shape))


def _check_tied_head(
    config: DecoderConfig, files: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> None:
    """Accept a stored copy of a tied head, and refuse a head that differs from the embedding."""
    if not (config.tie_embeddings and HEAD in stored):
        return
    embedding = next(name for name in stored if name.endswith(EMBEDDING))
    a, b = (files[name].get_slice(name) for name in (HEAD, embedding))
    size = config.vocab_size
    parts = [slice(i, min(i + 4096, size)) for i in range(0, size, 4096)]
    same = stored[HEAD][1:] == stored[embedding][1:]  # shape and type
    same = same and all(np.array_equal(a[part], b[part]) for part in parts)
    if not same:
        raise ValueError(f"tie_word_embeddings is true, but {HEAD} differs from {embedding}")
