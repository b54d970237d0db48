"""Reading checkpoints: everything is checked first, then placed tensor by tensor."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.module import Decoder
from twinkle_jax.model.decoder.parameters import nest, parameter_table, stacked_shape
from twinkle_jax.model.huggingface.checkpoint_files import (
    CONFIG,
    StoredTensor,
    locate,
    open_files,
    read_json,
    stored_tensors,
)
from twinkle_jax.model.huggingface.checkpoint_names import EMBEDDING, HEAD, match_tensors
from twinkle_jax.model.huggingface.parse_config import parse_config
from twinkle_jax.model.huggingface.place_leaf import StoredLeaf, place, read_type

Partition = Callable[[str, tuple[int, ...]], PartitionSpec]


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
            are truncated, pickled or outside the directory, a `dtype` that is no floating-point
            type, and values that are NaN or infinite, or become so in `dtype`.
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
            path: StoredLeaf(
                path=path,
                shape=stacked_shape(config, path, p),
                dtype=read_type(names[path], stored, dtype),
                names=names[path],
                slices=[files[name].get_slice(name) for name in names[path]],
            )
            for path, p in parameter_table(config).items()
        }
        arrays = {}
        for path, leaf in leaves.items():
            sharding = _sharding(mesh, partition, "/".join(path), leaf.shape)
            arrays[path] = place(leaf, sharding)
    return Decoder(config, nest(arrays), source=directory)


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
