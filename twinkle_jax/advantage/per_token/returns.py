"""Discounted reward-to-go."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage.grouping.explicit_axes import auto_sharded, like_first
from twinkle_jax.advantage.inputs.arrays import ArrayLike, Scalar, common_dtype, refuse_non_finite
from twinkle_jax.advantage.inputs.settings import check_coefficient
from twinkle_jax.advantage.inputs.tokens import (
    check_per_row,
    check_token_mask,
    check_tokens,
    optional,
)
from twinkle_jax.advantage.per_token.time_scan import discounted_sum


def discounted_returns(
    rewards: ArrayLike,
    *,
    where: ArrayLike | None = None,
    gamma: Scalar = 1.0,
    bootstrap_values: ArrayLike | None = None,
) -> Float[jax.Array, "*batch time"]:
    r"""Add up the rewards from each step to the end, later ones discounted.

    $$G_t = r_t + \gamma\, G_{t'}, \qquad G_{end} = V_{end}$$

    with $t'$ the next step that is kept: a masked step neither adds nor discounts. Computed as a
    parallel scan over time. No gradient flows through it.

    Args:
        rewards: one for each step, `[..., time]`: a list, an array, a tracer or a PyTorch tensor.
            Computed in float32 (float64 stays, with x64 on).
        where: True = keep, as `rewards`: the steps that the policy took. The rest may hold
            anything.
        gamma: the discount per step; may be traced.
        bootstrap_values: `[...]`, the value of what comes after the last step, for sequences that
            were cut off; 0 by default.

    Returns:
        Returns, `[..., time]`, 0 where masked, sharded as the rewards are.

    Raises:
        ValueError: a shape that does not fit; NaN or infinity in host data.
        TypeError: a type that does not fit.

    Example:
        >>> from twinkle_jax.advantage import discounted_returns
        >>> discounted_returns([[1.0, 2.0, 4.0]], gamma=0.5).tolist()
        [[3.0, 4.0, 4.0]]
        >>> discounted_returns([[1.0, 2.0, 4.0]], gamma=0.5, where=[[True, False, True]]).tolist()
        [[3.0, 0.0, 4.0]]
    """
    values = check_tokens("rewards", rewards)
    like = ("rewards", values.shape)
    mask = optional(check_token_mask, "where", where, like)
    refuse_non_finite("rewards", values, mask)
    last = optional(check_per_row, "bootstrap_values", bootstrap_values, like)
    return _returns(values, mask, check_coefficient("gamma", gamma, values, last), last)


@jax.jit
@auto_sharded(like_first)
def _returns(rewards: Array, where: Array | None, gamma: Array, last: Array | None) -> Array:
    rewards, gamma, last = jax.lax.stop_gradient((rewards, jnp.asarray(gamma), last))
    dtype = common_dtype(rewards, last)
    rewards = rewards.astype(dtype)
    if where is not None:
        rewards = jnp.where(where, rewards, 0)
    if last is not None:
        last = last.astype(dtype)
    result = discounted_sum(rewards, gamma, where, last)
    return result if where is None else jnp.where(where, result, 0)
