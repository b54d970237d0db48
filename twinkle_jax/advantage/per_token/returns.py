"""Sums and statistics over time: discounted returns, the scan behind them, and whitening."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage.groups import Samples, WholeBatch, ulps
from twinkle_jax.advantage.inputs import (
    ArrayLike,
    AxisName,
    Scalar,
    check_coefficient,
    check_per_row,
    check_tokens,
    common_dtype,
)
from twinkle_jax.advantage.sharding import auto_sharded, like_first

_BLOCK = 8  # steps that are walked one after the other


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
    are solved in the same way, and each block is then walked from what comes after it. Blocks do
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
        """The first step of every block, the second, ...; what is missing at the end is added."""
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
    """Take steps one after the other, from the last: what stands after each, in order of time."""
    reached = []
    for slope, step in zip(reversed(slopes), reversed(inputs), strict=True):
        after = step if after is None else step + slope * after
        reached.append(after)
    return reached[::-1]


_NOISE_ULPS = 8  # of the operands: what a few additions and subtractions of them may leave


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
        correction: what is taken off the number of tokens in the divisor of the variance.
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
