"""Check arrays with an entry per token, `[..., time]`, as `rewards.py` checks those per sample."""

from collections.abc import Callable
from typing import Any

from twinkle_jax.advantage.inputs.arrays import (
    HostOrDevice,
    as_mask,
    as_numbers,
    refuse_non_finite,
)

Like = tuple[str, tuple[int, ...]]
"""Another argument, by name and shape, that this one must fit."""


def check_tokens(name: str, values: Any, like: Like | None = None) -> HostOrDevice:
    """Return real numbers with a time axis."""
    array = as_numbers(name, values)
    _check_shape(name, array, like)
    return array


def check_token_mask(name: str, mask: Any, like: Like | None = None) -> HostOrDevice:
    """Return a boolean mask with a time axis."""
    array = as_mask(name, mask)
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
    refuse_non_finite(name, array, None)
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
