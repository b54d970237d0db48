"""Standard scores over all tokens of a batch."""

import jax.numpy as jnp
from jax import Array

from twinkle_jax.advantage.groups import Samples, WholeBatch, ulps
from twinkle_jax.advantage.inputs import AxisName

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
