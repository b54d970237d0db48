"""Reading checkpoints: everything is checked first, then placed tensor by tensor."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Array

from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.forward import Decoder
from twinkle_jax.model.decoder.parameters import nest, parameter_table, stacked_shape
from twinkle_jax.model.huggingface.checkpoint_files import (
    CONFIG,
    DTYPES,
    StoredTensor,
    locate,
    open_files,
    read_json,
    stored_tensors,
)
from twinkle_jax.model.huggingface.checkpoint_names import (
    EMBEDDING,
    HEAD,
    match_tensors,
    read_part,
)
from twinkle_jax.model.huggingface.config_json import parse_config
from twinkle_jax.model.huggingface.processes import one_outcome

Partition = Callable[[str, tuple[int, ...]], PartitionSpec]
Index = tuple[slice, ...]
ON_THE_HOST = 16 * 2**20  # bytes of a leaf up to which its layers are stacked there


def load_pretrained(
    path_or_id: str | Path,
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    partition: Partition | None = None,
) -> Decoder:
    """Read a Hugging Face checkpoint of Llama, Qwen2 to Qwen3.6 or Gemma 3 (the text model).

    The names, shapes and types of all tensors are checked before anything is allocated. Then one
    tensor after the other is read and written to its place on its devices, so that the host holds
    one tensor at a time besides. Only safetensors are read; no code of a checkpoint ever runs.

    If the mesh spans several processes, all of them must call this. Each reads only the parts of
    tensors that its own devices hold.

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
            are truncated, pickled or outside the directory, a `dtype` that is not a floating-point
            type, and values that are NaN or infinite, or become so in `dtype`.
        RuntimeError: if the mesh spans several processes, and another one raised an error.
        ImportError: if safetensors is not installed.
    """
    together = mesh is not None and mesh.is_multi_process
    with one_outcome(f"load_pretrained({str(path_or_id)!r})", together=together):
        directory = locate(path_or_id)
        config = read_config(directory)
        stored = stored_tensors(directory)
        names = match_tensors(config, stored)
        with ExitStack() as stack:
            files = open_files(stack, stored)
            _check_tied_head(config, files, stored, together)
            leaves = [
                StoredLeaf(
                    path=path,
                    shape=stacked_shape(config, path, p),
                    dtype=_leaf_dtype(names[path], stored, dtype),
                    names=names[path],
                    slices=[files[name].get_slice(name) for name in names[path]],
                )
                for path, p in parameter_table(config).items()
            ]
            arrays = {leaf.path: place(leaf, _sharding(mesh, partition, leaf)) for leaf in leaves}
    return Decoder(config, nest(arrays), source=directory)


def read_config(directory: Path) -> DecoderConfig:
    """Read the `config.json` of a checkpoint; errors name the file."""
    content = read_json(directory, CONFIG)
    try:
        return parse_config(content)
    except ValueError as error:
        raise ValueError(f"{directory / CONFIG}: {error}") from None


def _check_tied_head(
    config: DecoderConfig,
    files: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    together: bool,
) -> None:
    """Accept a stored copy of a tied head, and refuse a head that differs from the embedding."""
    if not (config.tie_embeddings and HEAD in stored):
        return
    embedding = next(name for name in stored if name.endswith(EMBEDDING))
    a, b = (files[name].get_slice(name) for name in (HEAD, embedding))
    size = config.vocab_size
    parts = [slice(i, min(i + 4096, size)) for i in range(0, size, 4096)]
    if together:  # each process compares its share of the rows
        parts = parts[jax.process_index() :: jax.process_count()]
    same = stored[HEAD][1:] == stored[embedding][1:]  # shape and type
    same = same and all(np.array_equal(a[part], b[part]) for part in parts)
    if not same:
        raise ValueError(f"tie_word_embeddings is true, but {HEAD} differs from {embedding}")


def _leaf_dtype(
    names: list[str], stored: Mapping[str, StoredTensor], dtype: DTypeLike | None
) -> np.dtype[Any]:
    """Return the requested type, or else the stored one, which all layers must share."""
    types = sorted({DTYPES[stored[name].dtype] for name in names})
    if dtype is None and len(types) > 1:
        raise ValueError(
            f"dtype must be given where layers differ, as those of {names[0]} do: {types}, got None"
        )
    wanted = jnp.dtype(types[0] if dtype is None else dtype)
    if wanted.name not in DTYPES.values():
        raise ValueError(f"dtype must be one of {', '.join(DTYPES.values())}, got {wanted}")
    return np.dtype(jax.dtypes.canonicalize_dtype(wanted))  # float64 only if JAX has it enabled


@dataclass(frozen=True)
class StoredLeaf:
    """One leaf of the tree of parameters, to be read from its tensors in parts.

    Attributes:
        path: keys from the root.
        shape: shape here, the axis of stacked layers included.
        dtype: type here.
        names: names of the tensors: one, or one for each stacked layer.
        slices: the same tensors, open for reading.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    names: list[str]
    slices: list[Any]

    @property
    def stacked(self) -> bool:
        """Whether the first axis counts layers, each of which has a tensor of its own."""
        return self.path[0] == "layers"

    def read(self, index: Index) -> Iterator[np.ndarray]:
        """Read the part that one device holds: as one array, or layer by layer."""
        part = tuple(slice(*s.indices(n)) for s, n in zip(index, self.shape, strict=True))
        if not self.stacked:
            yield self._read(0, part)
            return
        for layer in range(part[0].start, part[0].stop):
            yield self._read(layer, part[1:])

    def _read(self, layer: int, part: Index) -> np.ndarray:
        name = self.names[layer]
        stored = read_part(self.path, self.slices[layer], part)
        if not all_finite(stored):
            raise ValueError(f"{name} must be finite, got NaN or infinity")
        with np.errstate(over="ignore"):
            values = np.asarray(stored, self.dtype)
        if not all_finite(values):
            raise ValueError(f"{name} must fit {self.dtype}, got larger values of {stored.dtype}")
        return values


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


def _fill(leaf: StoredLeaf, index: Index, device: jax.Device) -> jax.Array:
    """Read one device's part; stacks that are large grow on the device, layer by layer."""
    rows = leaf.read(index)
    if not leaf.stacked:
        return jax.device_put(next(rows), device)
    shape = tuple(len(range(*s.indices(n))) for s, n in zip(index, leaf.shape, strict=True))
    if np.prod(shape) * leaf.dtype.itemsize <= ON_THE_HOST:
        return jax.device_put(np.stack(list(rows)), device)
    stack = jnp.zeros(shape, leaf.dtype, device=device)
    for layer, row in enumerate(rows):
        row_on_device = jax.device_put(row, device)
        stack = _write_layer(stack, row_on_device, np.int32(layer)).block_until_ready()
    return stack


@partial(jax.jit, donate_argnums=0)
def _write_layer(stack: Array, row: Array, layer: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(stack, row, layer, 0)
