"""The tensors of an export: what each is called, how large it is, and how to fetch it."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, reduce
from operator import getitem
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from twinkle_jax.model.decoder.module import Decoder
from twinkle_jax.model.decoder.parameters import parameter_table
from twinkle_jax.model.huggingface.checkpoint_files import (
    DTYPES,
    StoredTensor,
    open_files,
    stored_tensors,
)
from twinkle_jax.model.huggingface.checkpoint_names import (
    carried_tensors,
    layer_number,
    stored_names,
)
from twinkle_jax.model.huggingface.place_leaf import all_finite
from twinkle_jax.model.huggingface.stored_form import to_stored


class ExportTensor(NamedTuple):
    """A tensor to write: its size, and a function that fetches it."""

    name: str
    nbytes: int
    fetch: Callable[[], np.ndarray]


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
