"""Standard scores over all tokens of a batch."""

import jax.numpy as jnp
from jax import Array

from twinkle_jax.advantage.grouping.groups import WholeBatch
from twinkle_jax.advantage.grouping.moments import moments, ulps
from twinkle_jax.advantage.inputs.settings import AxisName

_NOISE_ULPS = 8  # of the operands: what a few additions and subtractions of them may leave


def whiten(
    tokens: Array,
    keep: Array | None,
    epsilon: Array,
    *,
    correction: int,
    axis_name: AxisName | None,
    made_of: Array | None = None,
) -> Array:
    """Subtract the mean and divide by the standard deviation of what is kept; 0 elsewhere.

    Args:
        tokens: any shape; finite where masked.
        keep: True where a token counts, or None for all.
        epsilon: added to the standard deviation.
        correction: what is taken off the number of tokens in the divisor of the variance.
        axis_name: the mapped axis over which the batch extends.
        made_of: as `tokens`, 0 where masked: how large the numbers are whose differences they are,
            if they are: then their own size does not tell what is rounding.

    Returns:
        As `tokens`: exactly 0 where all are equal up to rounding; all NaN where one is not finite.
    """
    values = tokens.reshape(-1)
    kept = None if keep is None else keep.reshape(-1)
    batch = WholeBatch(values.shape[0], axis_name)
    everyone = moments(values, kept, batch)
    count = everyone.samples.astype(values.dtype)
    share = jnp.maximum(count - 1, 0) / jnp.maximum(count - correction, 1)
    divisor = everyone.std * jnp.sqrt(share) + epsilon.astype(values.dtype)
    centred = (tokens - everyone.maximum) + everyone.mean_gap
    signal = everyone.has_signal
    if made_of is not None:
        size = batch.largest(made_of.reshape(-1))
        farthest = jnp.maximum(
            everyone.mean_gap, everyone.spread - everyone.mean_gap
        )  # from the mean
        signal &= ~((farthest <= ulps(_NOISE_ULPS, size)) & everyone.finite)
    scores = jnp.where(signal, centred / divisor, 0)
    return scores if keep is None else jnp.where(keep, scores, 0)
