"""Building blocks of estimators over time: rewards per token, discounted returns, whitening.

From completions to tokens and back: `kl_in_token_reward` puts the reward of a completion on its
last token, `broadcast_to_tokens` gives the advantage of a completion to all of its tokens.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage.estimate import auto_sharded, like_first
from twinkle_jax.advantage.groups import Samples, WholeBatch, ulps
from twinkle_jax.advantage.inputs import (
    ArrayLike,
    AxisName,
    Scalar,
    check_coefficient,
    check_per_row,
    check_token_mask,
    check_tokens,
    common_dtype,
    compute_dtype,
)

_BLOCK = 8  # steps that are computed one after the other


def broadcast_to_tokens(advantages: ArrayLike, mask: ArrayLike) -> Float[jax.Array, "*batch time"]:
    """Give every token of a completion the advantage of the completion.

    Args:
        advantages: one for each completion, `[...]`, as the estimators return them.
        mask: True where the policy chose the token, `[..., time]`.

    Returns:
        Advantages, `[..., time]`, 0 where masked, in float32 (float64 stays), sharded as the mask
        is. No gradient flows through them.

    Raises:
        ValueError: an invalid shape; NaN or infinity in host data.
        TypeError: an argument of the wrong type.

    Example:
        >>> from twinkle_jax.advantage import broadcast_to_tokens
        >>> mask = [[True, True, False], [True, True, True]]
        >>> broadcast_to_tokens([-0.5, 0.5], mask).tolist()
        [[-0.5, -0.5, 0.0], [0.5, 0.5, 0.5]]
    """
    keep = check_token_mask(mask)
    return _broadcast(keep, check_per_row("advantages", advantages, "mask", keep.shape))


@jax.jit
@auto_sharded(like_first)
def _broadcast(mask: Array, advantages: Array) -> Array:
    values = jax.lax.stop_gradient(advantages).astype(compute_dtype(advantages.dtype))
    return jnp.where(mask, jnp.broadcast_to(values[..., None], mask.shape), 0)


def kl_in_reward(
    rewards: ArrayLike, kl: ArrayLike, mask: ArrayLike, *, coefficient: Scalar
) -> Float[jax.Array, "*batch"]:
    r"""Subtract the KL divergence of a whole completion from its reward.

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
        ValueError: an invalid shape; NaN or infinity in host data.
        TypeError: an argument of the wrong type.

    References:
        https://arxiv.org/abs/2402.14740, section 2

    Example:
        >>> from twinkle_jax.advantage import kl_in_reward
        >>> kl_in_reward([1.0], [[0.5, 1.0, 9.0]], [[True, True, False]], coefficient=0.5).tolist()
        [0.25]
    """
    return _kl_per_completion(*_checked_kl(rewards, kl, mask, coefficient))


def kl_in_token_reward(
    rewards: ArrayLike, kl: ArrayLike, mask: ArrayLike, *, coefficient: Scalar
) -> Float[jax.Array, "*batch time"]:
    r"""Put the reward of a completion on its last token, and a KL penalty on every token.

    $$r_{it} = -\beta\, k_{it} + r_i\, [t = t_{last}]$$

    For estimators over time: `reinforce_plus_plus_advantage`, `discounted_returns`,
    `gae_advantage`. A completion without tokens has no reward.

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
    earned, divergence, keep, beta = _checked_kl(rewards, kl, mask, coefficient)
    return _kl_per_token(divergence, earned, keep, beta)


def _checked_kl(
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
def _kl_per_completion(rewards: Array, kl: Array, mask: Array, beta: Array) -> Array:
    dtype = common_dtype(rewards, kl)
    rewards = jax.lax.stop_gradient(rewards).astype(dtype)
    return rewards - jnp.sum(_penalties(kl, mask, beta, dtype), axis=-1)


@jax.jit
@auto_sharded(like_first)
def _kl_per_token(kl: Array, rewards: Array, mask: Array, beta: Array) -> Array:
    dtype = common_dtype(rewards, kl)
    rewards = jax.lax.stop_gradient(rewards).astype(dtype)
    # Chosen tokens from each one on: 1 at the last.
    chosen_after = jax.lax.cumsum(mask.astype(jnp.int32), axis=mask.ndim - 1, reverse=True)
    last = mask & (chosen_after == 1)
    earned = jnp.where(last, jnp.broadcast_to(rewards[..., None], kl.shape), 0)
    return earned - _penalties(kl, mask, beta, dtype)


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
        ValueError: an invalid shape; NaN or infinity in host data.
        TypeError: an argument of the wrong type.

    Example:
        >>> from twinkle_jax.advantage import discounted_returns
        >>> discounted_returns([[1.0, 2.0, 4.0]], gamma=0.5).tolist()
        [[3.0, 4.0, 4.0]]
        >>> discounted_returns([[1.0, 2.0, 4.0]], gamma=0.5, where=[[True, False, True]]).tolist()
        [[3.0, 0.0, 4.0]]
    """
    (values,), mask = check_tokens({"rewards": rewards}, "where", where)
    last = bootstrap_values
    if last is not None:
        last = check_per_row("bootstrap_values", last, "rewards", values.shape)
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


def discounted_sum(
    inputs: Array, decay: Array, keep: Array | None, last: Array | None = None
) -> Array:
    r"""Solve $h_t = x_t + d\, h_{next(t)}$, from the end, over the steps that are kept.

    A step is the map $h \mapsto x_t + d h$, and maps compose associatively: eight steps in a row
    are one map as well. So time is cut into blocks of eight, the blocks, an eighth as many steps,
    are solved in the same way, and each block is then solved from the value after it. Blocks do
    not wait for each other, so the number of steps in a row grows with the logarithm of the time.
    A step that is masked is the identity, and so repeats what comes after it.

    Args:
        inputs: $x$, `[..., time]`; finite where masked.
        decay: $d$, a scalar.
        keep: True where a step counts, or None for all.
        last: what comes after the last step, `[...]`; 0 by default.

    Returns:
        $h$, `[..., time]`.
    """
    slopes = jnp.broadcast_to(decay.astype(inputs.dtype), inputs.shape)
    if keep is not None:
        slopes = jnp.where(keep, slopes, 1)
        inputs = jnp.where(keep, inputs, 0)
    return _solve(slopes, inputs, last)


def _solve(slopes: Array, inputs: Array, last: Array | None) -> Array:
    *batch, time = inputs.shape
    if time <= _BLOCK:
        walked = _walk(jnp.unstack(slopes, axis=-1), jnp.unstack(inputs, axis=-1), last)
        return jnp.stack(walked, axis=-1) if time else inputs

    def blocks(steps: Array, identity: int) -> tuple[Array, ...]:
        """Return the first step of every block, the second, ...; the last block is padded."""
        padding = [(0, 0)] * len(batch) + [(0, -time % _BLOCK)]
        steps = jnp.pad(steps, padding, constant_values=identity)
        return jnp.unstack(steps.reshape(*batch, steps.shape[-1] // _BLOCK, _BLOCK), axis=-1)

    slopes_in, inputs_in = blocks(slopes, 1), blocks(inputs, 0)
    from_zero = _walk(slopes_in, inputs_in, None)[0]
    firsts = _solve(functools.reduce(jnp.multiply, slopes_in), from_zero, last)
    end = jnp.zeros_like(firsts[..., :1]) if last is None else last[..., None]
    after = jnp.concatenate([firsts[..., 1:], end], axis=-1)
    steps = jnp.stack(_walk(slopes_in, inputs_in, after), axis=-1)
    return steps.reshape(*batch, steps.shape[-2] * _BLOCK)[..., :time]


def _walk(slopes: Sequence[Array], inputs: Sequence[Array], after: Array | None) -> list[Array]:
    """Apply steps in sequence, from the last; return the value at each, in order of time."""
    reached = []
    for slope, step in zip(reversed(slopes), reversed(inputs), strict=True):
        after = step if after is None else step + slope * after
        reached.append(after)
    return reached[::-1]


_NOISE_ULPS = 8  # of the operands: the rounding error of a few additions and subtractions


def whiten(
    tokens: Array,
    keep: Array | None,
    epsilon: Array,
    *,
    correction: int,
    axis_name: AxisName | None,
    operands: Array | None = None,
) -> Array:
    """Subtract the mean and divide by the standard deviation of what is kept; 0 elsewhere.

    Args:
        tokens: any shape; finite where masked.
        keep: True where a token counts, or None for all.
        epsilon: added to the standard deviation.
        correction: subtracted from the number of tokens in the divisor of the variance.
        axis_name: the mapped axis over which the batch extends.
        operands: if `tokens` are differences, the size of the numbers that were subtracted, as
            `tokens`, 0 where masked: the rounding of a difference is relative to that.

    Returns:
        As `tokens`: exactly 0 where all are equal up to rounding; all NaN where one is not finite.
    """
    groups = WholeBatch(tokens.size, axis_name)
    batch = Samples(tokens.reshape(-1), None if keep is None else keep.reshape(-1), groups, groups)
    count = batch.count.astype(tokens.dtype)
    share = jnp.maximum(count - 1, 0) / jnp.maximum(count - correction, 1)
    divisor = batch.std * jnp.sqrt(share) + epsilon.astype(tokens.dtype)
    signal = batch.has_signal
    if operands is not None:
        size = groups.largest(operands.reshape(-1))
        farthest = jnp.maximum(batch.mean_gap, batch.spread - batch.mean_gap)  # from the mean
        signal &= ~((farthest <= ulps(_NOISE_ULPS, size)) & batch.finite)
    deviations = (tokens - batch.maximum) + batch.mean_gap
    scores = jnp.where(signal, deviations / divisor, 0)
    return scores if keep is None else jnp.where(keep, scores, 0)
