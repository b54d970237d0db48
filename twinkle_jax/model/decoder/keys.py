"""Random keys from which a row draws the same alone and beside others."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

_THREEFRY = "threefry2x32"


def threefry_keys(keys: Key[Array, "*rows"]) -> Key[Array, "*rows"]:
    """Turn keys of another implementation into threefry keys; those stay as they are.

    Under `vmap`, `rbg` and `unsafe_rbg` draw for all rows by the key of the first one. What a row
    draws would depend on the others, and once the first row has ended and its key stays the same,
    all others would draw the same noise for every token.
    """
    if jax.random.key_impl(keys) == _THREEFRY:
        return keys
    return _from_words(keys)


@jax.jit
def _from_words(keys: Key[Array, "*rows"]) -> Key[Array, "*rows"]:
    words = jax.random.key_data(keys)
    words = words.reshape(-1, words.shape[-1])
    result = jax.random.wrap_key_data(words[:, :2], impl=_THREEFRY)
    for word in range(2, words.shape[1]):
        result = jax.vmap(jax.random.fold_in)(result, words[:, word])
    return result.reshape(keys.shape)


@partial(jax.jit, static_argnums=1)
def row_keys(key: Key[Array, ""], rows: int) -> Key[Array, " rows"]:
    """Derive the threefry key of each row from `jax.random.fold_in(key, row)`."""
    numbers = jnp.arange(rows, dtype=jnp.int32)
    if jax.random.key_impl(key) == _THREEFRY:
        return jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
    # One by one: `unsafe_rbg` folds other numbers in under `vmap`.
    return threefry_keys(jax.lax.map(partial(jax.random.fold_in, key), numbers))
