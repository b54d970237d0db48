"""How a checkpoint stores each parameter: the name, shape and orientation of its tensor.

Parameters here are [in, out], and a convolution's kernel is [time, channels]. Checkpoints store
[out, in] and [channels, 1, time]. Nothing outside this file knows.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from twinkle_jax.model.decoder.config import FAMILIES, DecoderConfig
from twinkle_jax.model.decoder.parameters import Parameter, parameter_table
from twinkle_jax.model.huggingface.checkpoint_files import DTYPES, StoredTensor

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
PREFIX = "model."
NESTED_PREFIXES = ("model.language_model.", "language_model.model.")
LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}  # others keep their name
_TRANSPOSED = ("kernel", "lora_A", "lora_B")


def layer_number(config: DecoderConfig, path: tuple[str, ...], repeat: int) -> int:
    """Return which layer of the checkpoint a repetition of a member of the block is."""
    return repeat * len(config.block) + int(path[1])


def stored_name(path: tuple[str, ...]) -> str:
    """Return a tensor's name without the prefix of the model or the layer."""
    *module, leaf = path
    return ".".join([*module, LEAVES.get(leaf, leaf)])


def stored_names(
    config: DecoderConfig, path: tuple[str, ...], parameter: Parameter, prefix: str
) -> list[str]:
    """Return the names of one leaf's tensors: one, or one per repetition of the block."""
    name = stored_name(parameter.path)
    if path[0] == "layers":
        numbers = (layer_number(config, path, r) for r in range(config.repeats))
        return [f"{prefix}layers.{number}.{name}" for number in numbers]
    return [HEAD if path[0] == "lm_head" else prefix + name]


def stored_prefix(stored: Collection[str]) -> str:
    """Return the prefix of the text model's tensors, which may be part of a larger model."""
    return next((p for p in NESTED_PREFIXES if p + EMBEDDING in stored), PREFIX)


def carried_tensors(config: DecoderConfig, stored: Iterable[str]) -> list[str]:
    """List the tensors of an enclosing model's checkpoint that the text model does not read."""
    carried = FAMILIES[config.model_type].carried
    return sorted(name for name in stored if name.startswith(carried))


def match_tensors(
    config: DecoderConfig, stored: Mapping[str, StoredTensor]
) -> dict[tuple[str, ...], list[str]]:
    """Pair every parameter with its tensors; refuse missing, extra and misshapen ones."""
    prefix = stored_prefix(stored)
    table = parameter_table(config)
    names = {path: stored_names(config, path, p, prefix) for path, p in table.items()}
    wanted = {name: stored_shape(table[path]) for path, group in names.items() for name in group}
    ignored = set(carried_tensors(config, stored))
    if config.tie_embeddings:
        ignored.add(HEAD)
    _refuse("hold all tensors of the model, got none named", wanted.keys() - stored.keys())
    _refuse("hold no tensors but the model's, got", stored.keys() - wanted.keys() - ignored)
    for name, shape in wanted.items():
        if stored[name].shape != shape:
            raise ValueError(f"{name} must have the shape {shape}, got {stored[name].shape}")
        if stored[name].dtype not in DTYPES:
            raise ValueError(
                f"{name} must have a type of {', '.join(DTYPES)}, got {stored[name].dtype}"
            )
    return names


def _refuse(requirement: str, names: Iterable[str]) -> None:
    listed = sorted(names)
    if listed:
        rest = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
        raise ValueError(f"the checkpoint must {requirement} {', '.join(listed[:3])}{rest}")


def stored_shape(parameter: Parameter) -> tuple[int, ...]:
    """Return the shape of a parameter's tensor (of one layer)."""
    return to_stored(parameter.path, np.broadcast_to(np.False_, parameter.shape)).shape


def to_stored(path: tuple[str, ...], values: np.ndarray) -> np.ndarray:
    """Turn a parameter of one layer into the orientation of checkpoints; a view if possible."""
    if "conv1d" in path:
        return values.T[:, None]
    return values.T if path[-1] in _TRANSPOSED else values


def read_part(path: tuple[str, ...], stored: Any, part: tuple[slice, ...]) -> np.ndarray:
    """Read a part of a parameter from its tensor, and no more than that part of the file."""
    if "conv1d" in path:
        return stored[part[1], :, part[0]][:, 0].T
    return stored[part[::-1]].T if path[-1] in _TRANSPOSED else stored[part]
