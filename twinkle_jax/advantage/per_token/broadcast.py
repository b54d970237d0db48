"""From an advantage per completion to one per token."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage.inputs import (
    ArrayLike,
    check_per_row,
    check_token_mask,
    compute_dtype,
)
from twinkle_jax.advantage.sharding import auto_sharded, like_first


def broadcast_to_tokens(advantages: ArrayLike, mask: ArrayLike) -> Float[jax.Array, "*batch time"]:
    """Give every token of a completion the advantage of the completion.

    Args:
        advantages: one for each completion, `[...]`, as the estimators return them.
        mask: True where the policy chose the token, `[..., time]`.

    Returns:
        Advantages, `[..., time]`, 0 where masked, in float32 (float64 stays), sharded as the mask
        is. No gradient flows through them.

    Raises:
        ValueError: a shape that does not fit; NaN or infinity in host data.
        TypeError: a type that does not fit.

    Example:
        >>> from twinkle_jax.advantage import broadcast_to_tokens
        >>> mask = [[True, True, False], [True, True, True]]
        >>> broadcast_to_tokens([-0.5, 0.5], mask).tolist()
        [[-0.5, -0.5, 0.0], [0.5, 0.5, 0.5]]
    """
    keep = check_token_mask("mask", mask)
    return _broadcast(keep, check_per_row("advantages", advantages, "mask", keep.shape))


@jax.jit
@auto_sharded(like_first)
def _broadcast(mask: Array, advantages: Array) -> Array:
    values = jax.lax.stop_gradient(advantages).astype(compute_dtype(advantages.dtype))
    return jnp.where(mask, jnp.broadcast_to(values[..., None], mask.shape), 0)
