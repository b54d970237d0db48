"""Check the settings of an estimator: sizes and scales are Python values, fixed at compile time."""

import operator
from typing import Any, Literal, get_args

import jax
import numpy as np

Scale = Literal["group", "batch", "none"]
_SCALES: tuple[str, ...] = get_args(Scale)


def check_scale(scale: Any) -> str:
    """Return `scale` if it is one of the three."""
    if not isinstance(scale, str):
        raise TypeError(
            f"scale must be one of {_list(_SCALES)} as a string, got {describe(scale)}"
            + (" (write scale='none' for no scaling)" if scale is None else "")
        )
    if scale not in _SCALES:
        raise ValueError(f"scale must be one of {_list(_SCALES)}, got {scale!r}")
    return scale


def check_size(name: str, value: Any, *, least: int = 1, why: str = "") -> int:
    """Return a static count as an int of at least `least`; NumPy integers are welcome."""
    if type(value) is not int:
        if isinstance(value, jax.Array | np.ndarray):
            raise TypeError(
                f"{name} must be a static Python int, got {describe(value)}: it decides shapes, so "
                f"mark it static (jax.jit(..., static_argnames={name!r})) or close over it"
            )
        if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be a positive int, got {describe(value)}")
        value = operator.index(value)
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}{why}")
    return int(value)


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


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names))


def describe(value: Any) -> str:
    """Say what arrived, shortly."""
    if isinstance(value, jax.core.Tracer):
        return f"a traced array ({jax.typeof(value)})"
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array ({value.dtype}{list(value.shape)})"
    return f"{type(value).__name__} {value!r}"
