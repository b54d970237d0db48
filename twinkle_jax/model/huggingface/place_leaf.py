"""From tensors of a checkpoint to an array on devices, one tensor in memory at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike
from jaxtyping import Array

from twinkle_jax.model.huggingface.checkpoint_files import DTYPES, StoredTensor
from twinkle_jax.model.huggingface.stored_form import read_part

Index = tuple[slice, ...]
ON_THE_HOST = 16 * 2**20  # bytes of a leaf that are gathered there, which needs no program


@dataclass(frozen=True)
class StoredLeaf:
    """One leaf of the tree, to be read from its tensors in parts.

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

    def read(self, index: Index) -> Iterator[np.ndarray]:
        """Read the part of the leaf that one device holds: whole, or layer by layer."""
        part = tuple(slice(*s.indices(n)) for s, n in zip(index, self.shape, strict=True))
        if self.path[0] != "layers":
            yield self._read(0, part)
            return
        for layer in range(part[0].start, part[0].stop):
            yield self._read(layer, part[1:])

    def _read(self, which: int, part: Index) -> np.ndarray:
        name = self.names[which]
        stored = read_part(self.path, self.slices[which], part)
        if not all_finite(stored):
            raise ValueError(f"{name} must be finite, got NaN or infinity")
        with np.errstate(over="ignore"):
            values = np.asarray(stored, self.dtype)
        if not all_finite(values):
            raise ValueError(f"{name} must fit {self.dtype}, got larger values of {stored.dtype}")
        return values


def read_type(
    names: list[str], stored: Mapping[str, StoredTensor], dtype: DTypeLike | None
) -> np.dtype[Any]:
    """Choose the type of a leaf: as asked, or as stored, where all layers agree."""
    types = sorted({DTYPES[stored[name].dtype] for name in names})
    if dtype is None and len(types) > 1:
        raise ValueError(
            f"dtype must be given where layers differ, as those of {names[0]} do: {types}, got None"
        )
    wanted = jnp.dtype(types[0] if dtype is None else dtype)
    if wanted.name not in DTYPES.values():
        raise ValueError(f"dtype must be one of {', '.join(DTYPES.values())}, got {wanted}")
    return np.dtype(jax.dtypes.canonicalize_dtype(wanted))  # float64 only where JAX has it


def all_finite(values: np.ndarray) -> bool:
    """Say whether there is no NaN and no infinity."""
    if values.dtype == jnp.bfloat16:  # its exponent, because NumPy's isfinite is slow there
        return not bool(np.any((values.view(np.uint16) & 0x7F80) == 0x7F80))
    return bool(np.isfinite(values).all())


def place(leaf: StoredLeaf, sharding: Sharding) -> jax.Array:
    """Read and place one device's part after the other; copies are made between devices."""
    placed: dict[str, jax.Array] = {}
    parts = []
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        key = str(index)
        if key in placed:
            parts.append(jax.device_put(placed[key], device))
        else:
            placed[key] = _fill(leaf, index or (), device)
            parts.append(placed[key])
        parts[-1].block_until_ready()
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)


def _fill(leaf: StoredLeaf, index: Index, device: jax.Device) -> jax.Array:
    rows = leaf.read(index)
    if leaf.path[0] != "layers":
        return jax.device_put(next(rows), device)
    shape = tuple(len(range(*s.indices(n))) for s, n in zip(index, leaf.shape, strict=True))
    if np.prod(shape) * leaf.dtype.itemsize <= ON_THE_HOST:
        return jax.device_put(np.stack(list(rows)), device)
    whole = jnp.zeros(shape, leaf.dtype, device=device)
    for at, row in enumerate(rows):
        whole = _write(whole, jax.device_put(row, device), np.int32(at)).block_until_ready()
    return whole


@partial(jax.jit, donate_argnums=0)
def _write(whole: Array, row: Array, at: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(whole, row, at, 0)
