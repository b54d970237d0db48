"""Check settings, which are fixed at compile time, and coefficients, which may be traced."""

import operator
from collections.abc import Hashable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from twinkle_jax.advantage.inputs.arrays import HostOrDevice, common_dtype, describe

AxisName = Hashable | Sequence[Hashable]
"""The `shard_map` or `vmap` axis, or several of them."""
Scale = Literal["group", "batch", "none"]


def check_scale(scale: Any) -> str:
    """Return `scale` if it is one of the three."""
    hint = " (write scale='none' for no scaling)" if scale is None else ""
    return check_choice("scale", scale, get_args(Scale), hint)


def check_choice(name: str, value: Any, choices: tuple[str, ...], hint: str = "") -> str:
    """Return a string that must be one of `choices`."""
    known = ", ".join(map(repr, choices))
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {known} as a string, got {describe(value)}{hint}")
    if value not in choices:
        raise ValueError(f"{name} must be one of {known}, got {value!r}")
    return value


def check_size(name: str, value: Any, *, least: int = 1, why: str = "") -> int:
    """Return a static count as an int of at least `least`; NumPy integers are welcome."""
    if isinstance(value, jax.Array | np.ndarray):
        raise TypeError(
            f"{name} must be a static Python int, got {describe(value)}: it decides shapes, so "
            f"mark it static (jax.jit(..., static_argnames={name!r})) or close over it"
        )
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a positive int, got {describe(value)}")
    size = operator.index(value)
    if size < least:
        raise ValueError(f"{name} must be at least {least}, got {size}{why}")
    return size


def check_groups(num_samples: int, num_generations: int) -> None:
    """Refuse a number of rewards that K does not divide."""
    if num_samples % num_generations:
        raise ValueError(
            f"rewards must hold num_generations={num_generations} samples for every prompt, next "
            f"to each other, got {num_samples} rewards, which {num_generations} does not divide; "
            "for groups of different sizes use the segment_* functions or where="
        )


def check_axis_name(axis_name: Any) -> Any:
    """Return a hashable axis name, or a tuple of them."""
    return tuple(axis_name) if isinstance(axis_name, list) else axis_name


def check_flag(name: str, value: Any) -> bool:
    """Return a static yes or no."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, and static, got {describe(value)}")
    return bool(value)


def check_coefficient(name: str, value: Any, *beside: HostOrDevice | None) -> Any:
    """Return a real scalar: a Python number as it is, or an array without axes.

    A number beside arrays on a device is put there in so many words, in their type: nothing is
    transferred that `jax.transfer_guard` would call implicit.
    """
    if type(value) in (float, int):
        arrays = [array for array in beside if array is not None]
        if any(isinstance(array, np.ndarray | jax.core.Tracer) for array in arrays):
            return float(value)
        return jax.device_put(np.asarray(value, common_dtype(*arrays)))
    if not isinstance(value, jax.Array | np.ndarray | np.number):
        raise TypeError(f"{name} must be a number, got {describe(value)}")
    if value.shape != ():
        raise ValueError(f"{name} must be a scalar, got shape {value.shape}")
    if not jnp.issubdtype(value.dtype, np.floating):
        raise TypeError(f"{name} must be a real number, got {describe(value)}")
    return value


def check_subset_size(k: Any, num_generations: int, rewards: HostOrDevice) -> Any:
    """Return k of pass@k: an int from 1 to K, or a traced integer, which nobody can check."""
    if isinstance(k, jax.Array):
        if k.shape != ():
            raise ValueError(f"k must be a scalar, got shape {k.shape}")
        if not jnp.issubdtype(k.dtype, np.integer):
            raise TypeError(f"k must be an integer, got {describe(k)}")
        return k
    size = check_size("k", k)
    if size > num_generations:
        raise ValueError(
            f"k must be at most num_generations={num_generations}, got {size}: a subset of k "
            "samples is drawn from those of one prompt"
        )
    return check_coefficient("k", size, rewards)
