"""How a parameter stands in a checkpoint: the name of its tensor, its shape, its orientation.

Here matrices are [in, out], there [out, in]; here the kernel of a convolution is [time, channels],
there [channels, 1, time]. This is the only place that knows; `checkpoint_names.py` has what stands
before a layer's names and beside the layers.
"""

from typing import Any

import numpy as np

from twinkle_jax.model.decoder.parameters import Parameter

LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}  # others keep their name
_TRANSPOSED = ("kernel", "lora_A", "lora_B")


def stored_name(path: tuple[str, ...]) -> str:
    """Name a tensor, without the prefix of the model or the layer."""
    *module, leaf = path
    return ".".join([*module, LEAVES.get(leaf, leaf)])


def stored_shape(parameter: Parameter) -> tuple[int, ...]:
    """Give the shape of the tensor of a parameter, or of a layer of it."""
    return to_stored(parameter.path, np.broadcast_to(np.False_, parameter.shape)).shape


def to_stored(path: tuple[str, ...], values: np.ndarray) -> np.ndarray:
    """Turn what is here, of one layer, into what stands there; a view where possible."""
    if "conv1d" in path:
        return values.T[:, None]
    return values.T if path[-1] in _TRANSPOSED else values


def read_part(path: tuple[str, ...], stored: Any, part: tuple[slice, ...]) -> np.ndarray:
    """Read a part of what is here from a tensor there, and no more than that part of it."""
    if "conv1d" in path:
        return stored[part[1], :, part[0]][:, 0].T
    return stored[part[::-1]].T if path[-1] in _TRANSPOSED else stored[part]
