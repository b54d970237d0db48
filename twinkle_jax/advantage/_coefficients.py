"""Coefficients of the formulas: numbers or traced scalars, checked by name."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from twinkle_jax.advantage._core import compute_dtype
from twinkle_jax.advantage._settings import check_size, describe


def check_coefficient(name: str, value: Any, *beside: Any) -> Any:
    """Return a real scalar; a number `beside` arrays on a device is put there once, not per call.

    Args:
        name: the argument, for the message.
        value: a Python number, or a scalar array, which may be traced.
        beside: the arrays that it will be computed with, in the widest of their types; None is
            none.

    Returns:
        A float, a NumPy scalar or an array without axes.
    """
    if type(value) in (float, int):
        arrays = [array for array in beside if array is not None]
        if any(isinstance(array, np.ndarray | jax.core.Tracer) for array in arrays):
            return float(value)
        return _on_device(float(value), max(compute_dtype(array.dtype) for array in arrays))
    if not isinstance(value, jax.Array | np.ndarray | np.number):
        raise TypeError(f"{name} must be a number, got {describe(value)}")
    if value.shape != ():
        raise ValueError(f"{name} must be a scalar, got shape {value.shape}")
    if not jnp.issubdtype(value.dtype, np.floating):
        raise TypeError(f"{name} must be a real number, got {describe(value)}")
    return value


def check_subset_size(k: Any, num_generations: int, beside: Any) -> Any:
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
    return check_coefficient("k", size, beside)


_device_scalars: dict[tuple[float, Any], jax.Array] = {}


def _on_device(value: float, dtype: Any) -> jax.Array:
    """Keep a scalar on the default device, so that eager calls transfer nothing implicitly."""
    scalar = _device_scalars.get((value, dtype))
    if scalar is None or scalar.is_deleted():
        scalar = jax.device_put(np.asarray(value, dtype))
        if isinstance(scalar, jax.core.Tracer):
            return scalar
        if len(_device_scalars) >= 16:
            _device_scalars.clear()
        _device_scalars[(value, dtype)] = scalar
    return scalar
