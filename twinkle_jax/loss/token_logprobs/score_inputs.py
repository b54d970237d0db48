"""What `token_logprobs` may be given, and what is said when it does not fit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def matrix(name: str, values: Any) -> jax.Array:
    """Check that it is a matrix of floating point."""
    array = jnp.asarray(values)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating point, got {array.dtype}")
    if array.ndim != 2:
        raise ValueError(f"{name} must be a matrix (flatten batch and time), got {array.shape}")
    return array


def checked_mask(mask: Any, time: int) -> jax.Array:
    """Check that it has one boolean a token."""
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise TypeError(f"mask must be boolean (True = keep), got {mask.dtype}; try mask != 0")
    if mask.shape != (time,):
        raise ValueError(f"mask must have shape {(time,)}, one a hidden state, got {mask.shape}")
    return mask


def checked_tokens(tokens: Any, mask: Any, time: int, vocab: int) -> jax.Array:
    """Check tokens, and those in host data against the vocabulary."""
    array = jnp.asarray(tokens)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"tokens must be integers, got {array.dtype}")
    if array.shape != (time,):
        raise ValueError(f"tokens must have shape {(time,)}, one a hidden state, got {array.shape}")
    values, counted = _visible(tokens), True if mask is None else _visible(mask)
    if values is not None and counted is not None:
        beyond = np.flatnonzero(counted & ((values < 0) | (values >= vocab)))
        if beyond.size:
            raise ValueError(
                f"tokens must lie in [0, {vocab}), the columns of head, got "
                f"{values[beyond[0]]} at {beyond[0]}; leave out with mask what is not to be scored"
            )
    return array if array.dtype.itemsize >= 4 else array.astype(jnp.int32)


def _visible(values: Any) -> Any:
    """Give host data as NumPy; what is on a device is not read back to be checked."""
    return None if isinstance(values, jax.Array) else np.asarray(values)


def checked_temperature(temperature: Any, time: int) -> jax.Array:
    """Check that it is one number, or one a token."""
    # A Python number becomes a float32 like any other, so as not to be compiled for separately.
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    array = jnp.asarray(temperature, float if number else None)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"temperature must be floating point, got {array.dtype}")
    if array.shape not in ((), (time,)):
        raise ValueError(f"temperature must have shape () or {(time,)}, got {array.shape}")
    return array


def checked_chunk_size(chunk_size: Any) -> int | None:
    """Check that it is a positive int, or None."""
    if chunk_size is None:
        return None
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int | np.integer):
        raise TypeError(f"chunk_size must be an int or None, got {chunk_size!r}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    return int(chunk_size)
