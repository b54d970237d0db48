"""What callers pass to the sampler, checked: prompts, limits and keys."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int


def checked_prompts(
    prompts: Any, mask: Any, vocab: int
) -> tuple[Int[Array | np.ndarray, "prompts time"], Bool[Array | np.ndarray, "prompts time"]]:
    """Check types and shapes, and the values that are on the host, where they stay."""
    tokens = _array(prompts)
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"prompts must be integers, got {tokens.dtype}")
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"prompts must be [prompts, time], neither 0, got {tokens.shape}")
    kept = np.ones(tokens.shape, bool) if mask is None else _array(mask)
    if kept.dtype != jnp.bool_:
        raise TypeError(f"prompt_mask must be bool, got {kept.dtype}")
    if kept.shape != tokens.shape:
        raise ValueError(
            f"prompt_mask must have the shape of prompts, {tokens.shape}, got {kept.shape}"
        )
    if not isinstance(kept, jax.Array):
        empty = np.flatnonzero(~kept.any(axis=1))
        if empty.size:
            raise ValueError(f"prompts must have a token in each row, got none in row {empty[0]}")
        if not isinstance(tokens, jax.Array):
            beyond = np.argwhere(kept & ((tokens < 0) | (tokens >= vocab)))
            if beyond.size:
                row, column = beyond[0]
                raise ValueError(
                    f"prompts must lie in [0, {vocab}), the vocabulary, got "
                    f"{tokens[row, column]} in row {row}"
                )
    return tokens.astype(np.int32), kept


def checked_limits(
    limits: Any, prompts: int, samples: int, most: int
) -> Int[Array | np.ndarray, " rows"]:
    """Give each row the most tokens it may get."""
    array = _array(most if limits is None else limits)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"max_tokens must be integers, got {array.dtype}")
    shapes = ((), (prompts,), (prompts * samples,))
    if array.shape not in shapes:
        raise ValueError(f"max_tokens must have one of the shapes {shapes}, got {array.shape}")
    if isinstance(array, np.ndarray):
        wrong = np.flatnonzero((array < 1) | (array > most))
        if wrong.size:
            place = f" for row {wrong[0]}" if array.ndim else ""
            raise ValueError(
                f"max_tokens must be at least 1 and at most max_new_tokens, {most}, "
                f"got {array.reshape(-1)[wrong[0]]}{place}"
            )
    arrays = np if isinstance(array, np.ndarray) else jnp  # what is on the host stays there
    wide = arrays.repeat(array, samples) if array.shape == (prompts,) else array
    wide = arrays.clip(arrays.broadcast_to(wide, (prompts * samples,)), 1, most)
    return wide.astype(np.int32)


def row_keys(key: Any, rows: int) -> jax.Array:
    """Give each row its key."""
    if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        raise TypeError(f"key must be made with jax.random.key, got {key!r}")
    if key.shape not in ((), (rows,)):
        raise ValueError(f"key must be one key or one for each of {rows} rows, got {key.shape}")
    if key.shape:
        return key
    return _split(key, rows)


@partial(jax.jit, static_argnums=1)
def _split(key: jax.Array, rows: int) -> jax.Array:
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows, dtype=jnp.int32))


def _array(values: Any) -> jax.Array | np.ndarray:
    return values if isinstance(values, jax.Array) else np.asarray(values)
