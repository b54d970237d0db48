"""Check arrays with an entry per token, `[..., time]`, as `_rewards.py` checks those per sample."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from twinkle_jax.advantage._rewards import HostOrDevice, as_array, as_numbers, refuse_non_finite
from twinkle_jax.advantage._settings import describe

Like = tuple[str, tuple[int, ...]]
"""Another argument, by name and shape, that this one must fit."""


def check_tokens(name: str, values: Any, like: Like | None = None) -> HostOrDevice:
    """Return real numbers with a time axis."""
    array = as_numbers(name, values)
    _check_shape(name, array, like)
    return array


def check_token_mask(name: str, mask: Any, like: Like | None = None) -> HostOrDevice:
    """Return a boolean mask with a time axis."""
    array = as_array(name, mask)
    if array.dtype != bool:
        raise TypeError(
            f"{name} must be boolean (True = keep), got {describe(array)}: write {name} != 0"
        )
    _check_shape(name, array, like)
    return array


def check_per_row(name: str, values: Any, like: Like) -> HostOrDevice:
    """Return real and, on the host, finite numbers, one for each row of a token array."""
    array = as_numbers(name, values)
    if array.shape != like[1][:-1]:
        raise ValueError(
            f"{name} must have shape {like[1][:-1]}, one for each row of {like[0]}, {like[1]}, "
            f"got {array.shape}"
        )
    check_finite(name, array, None)
    return array


def optional(
    check: Callable[[str, Any, Like], HostOrDevice], name: str, value: Any, like: Like
) -> HostOrDevice | None:
    """Check what may be None."""
    return None if value is None else check(name, value, like)


def _check_shape(name: str, array: HostOrDevice, like: Like | None) -> None:
    if like is not None and array.shape != like[1]:
        raise ValueError(f"{name} must have the shape of {like[0]}, {like[1]}, got {array.shape}")
    if array.ndim < 1 or array.size == 0:
        raise ValueError(
            f"{name} must be [..., time] with at least one step, got shape {array.shape}"
        )


def check_finite(name: str, values: HostOrDevice, mask: HostOrDevice | None) -> None:
    """Refuse NaN and infinity in host data, where it is not masked."""
    if isinstance(values, np.ndarray) and not np.isfinite(values).all():
        refuse_non_finite(name, values, mask)


def check_flag(name: str, value: Any) -> bool:
    """Return a static yes or no."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, and static, got {describe(value)}")
    return bool(value)


def common_dtype(*arrays: HostOrDevice | None) -> Any:
    """Float64 if any of them is, else float32."""
    wide = any(array is not None and array.dtype == jnp.float64 for array in arrays)
    return jnp.float64 if wide else jnp.float32
