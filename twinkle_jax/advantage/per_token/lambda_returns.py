"""The recursion of GAE, checked and compiled: lambda-returns as one parallel scan."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage.grouping.explicit_axes import auto_sharded, like_first
from twinkle_jax.advantage.inputs.arrays import ArrayLike, Scalar, common_dtype, refuse_non_finite
from twinkle_jax.advantage.inputs.settings import (
    AxisName,
    check_axis_name,
    check_coefficient,
    check_flag,
)
from twinkle_jax.advantage.inputs.tokens import (
    check_per_row,
    check_token_mask,
    check_tokens,
    optional,
)
from twinkle_jax.advantage.per_token.time_scan import discounted_sum
from twinkle_jax.advantage.per_token.whitening import whiten


class GAE(NamedTuple):
    """Advantages and the returns that a critic is trained on; see `gae_advantage`.

    Example:
        >>> from twinkle_jax.advantage import gae_advantage
        >>> gae_advantage([[1.0, 1.0]], [[0.0, 0.0]], gae_lambda=1.0, normalize=False).returns
        Array([[2., 1.]], dtype=float32)
    """

    advantages: Float[jax.Array, "*batch time"]
    returns: Float[jax.Array, "*batch time"]


def estimate_gae(
    rewards: ArrayLike,
    values: ArrayLike,
    named_mask: tuple[str, Any],
    *,
    gamma: Any,
    gae_lambda: Any,
    normalize: Any,
    bootstrap_values: ArrayLike | None = None,
    epsilon: Scalar = 1e-8,
    axis_name: AxisName | None = None,
) -> GAE:
    """Check, convert, call the compiled core; the mask comes with the name that it was given."""
    earned = check_tokens("rewards", rewards)
    like = ("rewards", earned.shape)
    critic = check_tokens("values", values, like)
    mask = optional(check_token_mask, *named_mask, like)
    refuse_non_finite("rewards", earned, mask)
    refuse_non_finite("values", critic, mask)
    last = optional(check_per_row, "bootstrap_values", bootstrap_values, like)
    beside = earned, critic, last
    return _gae(
        earned,
        critic,
        mask,
        last,
        check_coefficient("gamma", gamma, *beside),
        check_coefficient("gae_lambda", gae_lambda, *beside),
        check_coefficient("epsilon", epsilon, *beside),
        normalize=check_flag("normalize", normalize),
        axis_name=check_axis_name(axis_name),
    )


@functools.partial(jax.jit, static_argnames=("normalize", "axis_name"))
@auto_sharded(like_first)
def _gae(
    rewards: Array,
    values: Array,
    where: Array | None,
    last: Array | None,
    gamma: Array,
    gae_lambda: Array,
    epsilon: Array,
    *,
    normalize: bool,
    axis_name: AxisName | None,
) -> GAE:
    dtype = common_dtype(rewards, values, last)
    rewards, values = (jax.lax.stop_gradient(x).astype(dtype) for x in (rewards, values))
    gamma, gae_lambda, epsilon = (
        jax.lax.stop_gradient(jnp.asarray(x)).astype(dtype) for x in (gamma, gae_lambda, epsilon)
    )
    if where is not None:
        rewards, values = jnp.where(where, rewards, 0), jnp.where(where, values, 0)
    if last is None:
        last = jnp.zeros_like(values[..., -1])
    last = jax.lax.stop_gradient(last).astype(dtype)

    # The lambda-return of the next step that is kept; a masked step repeats it.
    mixed = gae_lambda * rewards + (1 - gae_lambda) * values
    ahead = discounted_sum(mixed, gamma * gae_lambda, where, last)
    ahead = jnp.concatenate([ahead[..., 1:], last[..., None]], axis=-1)
    returns = rewards + gamma * ahead
    if where is not None:
        returns = jnp.where(where, returns, 0)
    advantages = returns - values
    if normalize:
        sizes = jnp.maximum(jnp.abs(returns), jnp.maximum(jnp.abs(values), jnp.abs(rewards)))
        advantages = whiten(
            advantages, where, epsilon, correction=0, axis_name=axis_name, made_of=sizes
        )
    return GAE(advantages, returns)
