r"""What adapters add to a projection, and dropout of their input while they are trained.

$$y = x W + s \, d(x) A B, \qquad d(x) = x \cdot m / (1 - p), \quad m \sim \text{Bernoulli}(1 - p)$$

as in PEFT: each projection draws a mask of its own. The noise of a row depends on the root key and
the row's number alone, not on the other rows, the padding or the devices.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

RATE, KEYS = "lora_dropout", "lora_dropout_keys"


def check_rate(rate: float) -> None:
    """Refuse a rate that is no number, or leaves nothing."""
    if type(rate) not in (int, float) or not 0 <= rate < 1:
        raise ValueError(f"lora_dropout must be a number in [0, 1), got {rate!r}")


def drop_out(
    x: Float[Array, "rows into"], rate: Float[Array, ""], keys: Key[Array, " batch"]
) -> Float[Array, "rows into"]:
    """Drop entries with the probability `rate`, and divide the rest by what is kept of 1."""
    batch, width = len(keys), x.shape[1]
    shape = (len(x) // batch, width)  # time first: a longer row begins with the same noise
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, shape))(keys)
    return jnp.where(kept.reshape(x.shape), x / (1 - rate).astype(x.dtype), jnp.zeros_like(x))


def with_dropout(
    params: Mapping[str, Any], key: Key[Array, ""], rows: Int[Array, " batch"]
) -> dict[str, Any]:
    """Lay keys beside the adapters that have a rate: for each layer, one for each row.

    Args:
        params: frozen parameters and adapters, merged.
        key: the root key of a training run.
        rows: numbers of the rows, different ones throughout the run.
    """
    row_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, rows)
    number = 0

    def visit(tree: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal number
        out = {name: visit(x) if isinstance(x, Mapping) else x for name, x in sorted(tree.items())}
        if RATE in tree:
            layers = jnp.arange(len(tree[RATE]), dtype=jnp.int32)
            own = jax.vmap(jax.random.fold_in, (0, None))(row_keys, number)
            out[KEYS] = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (None, 0))(own, layers)
            number += 1
        return out

    return visit(params)
