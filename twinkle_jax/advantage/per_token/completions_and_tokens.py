"""Between completions and tokens: advantages for every token, and KL penalties in the reward."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage.inputs import (
    ArrayLike,
    Scalar,
    check_coefficient,
    check_per_row,
    check_token_mask,
    check_tokens,
    common_dtype,
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


def kl_in_reward(
    rewards: ArrayLike, kl: ArrayLike, mask: ArrayLike, *, coefficient: Scalar
) -> Float[jax.Array, "*batch"]:
    r"""Take the divergence of a whole completion off its reward.

    $$r'_i = r_i - \beta \sum_t k_{it}$$

    For estimators that take a reward per completion: the penalty enters their baselines too.

    Args:
        rewards: one for each completion, `[...]`.
        kl: $k$, divergence per token, `[..., time]`, for instance the log-ratio of the policy to
            the reference (`kl_k1`): its mean over samples is the divergence, though single
            terms may be negative.
        mask: True where the policy chose the token, as `kl`.
        coefficient: $\beta$, at least zero; may be traced.

    Returns:
        Rewards, `[...]`, sharded as before. No gradient flows through them.

    Raises:
        ValueError: a shape that does not fit; NaN or infinity in host data.
        TypeError: a type that does not fit.

    References:
        https://arxiv.org/abs/2402.14740, section 2

    Example:
        >>> from twinkle_jax.advantage import kl_in_reward
        >>> kl_in_reward([1.0], [[0.5, 1.0, 9.0]], [[True, True, False]], coefficient=0.5).tolist()
        [0.25]
    """
    return _per_completion(*_check(rewards, kl, mask, coefficient))


def kl_in_token_reward(
    rewards: ArrayLike, kl: ArrayLike, mask: ArrayLike, *, coefficient: Scalar
) -> Float[jax.Array, "*batch time"]:
    r"""Put the reward of a completion on its last token, and the divergence on every one.

    $$r_{it} = -\beta\, k_{it} + r_i\, [t = t_{last}]$$

    For estimators over time: `reinforce_plus_plus_advantage`, `discounted_returns`,
    `gae_advantage`. A completion without tokens earns nothing.

    Args:
        rewards: as in `kl_in_reward`.
        kl: as in `kl_in_reward`.
        mask: as in `kl_in_reward`.
        coefficient: as in `kl_in_reward`; 0 for the reward alone.

    Returns:
        Rewards per token, `[..., time]`, 0 where masked, sharded as `kl` is. No gradient flows
        through them.

    Raises:
        ValueError: as `kl_in_reward`.
        TypeError: as `kl_in_reward`.

    References:
        https://arxiv.org/abs/2501.03262

    Example:
        >>> from twinkle_jax.advantage import kl_in_token_reward
        >>> kl, mask = [[0.5, 1.0, 9.0]], [[True, True, False]]
        >>> kl_in_token_reward([1.0], kl, mask, coefficient=0.5).tolist()
        [[-0.25, 0.5, 0.0]]
    """
    earned, divergence, keep, beta = _check(rewards, kl, mask, coefficient)
    return _per_token(divergence, earned, keep, beta)


def _check(
    rewards: ArrayLike, kl: ArrayLike, mask: ArrayLike, beta: Any
) -> tuple[Any, Any, Any, Any]:
    (divergence,), keep = check_tokens({"kl": kl}, "mask", mask, required=True)
    earned = check_per_row("rewards", rewards, "kl", divergence.shape)
    return earned, divergence, keep, check_coefficient("coefficient", beta, divergence, earned)


def _penalties(kl: Array, mask: Array, beta: Array, dtype: Any) -> Array:
    kl, beta = (jax.lax.stop_gradient(jnp.asarray(x)).astype(dtype) for x in (kl, beta))
    return beta * jnp.where(mask, kl, 0)


@jax.jit
@auto_sharded(like_first)
def _per_completion(rewards: Array, kl: Array, mask: Array, beta: Array) -> Array:
    dtype = common_dtype(rewards, kl)
    rewards = jax.lax.stop_gradient(rewards).astype(dtype)
    return rewards - jnp.sum(_penalties(kl, mask, beta, dtype), axis=-1)


@jax.jit
@auto_sharded(like_first)
def _per_token(kl: Array, rewards: Array, mask: Array, beta: Array) -> Array:
    dtype = common_dtype(rewards, kl)
    rewards = jax.lax.stop_gradient(rewards).astype(dtype)
    # Chosen tokens from each one on: 1 at the last.
    chosen_after = jax.lax.cumsum(mask.astype(jnp.int32), axis=mask.ndim - 1, reverse=True)
    last = mask & (chosen_after == 1)
    earned = jnp.where(last, jnp.broadcast_to(rewards[..., None], kl.shape), 0)
    return earned - _penalties(kl, mask, beta, dtype)
