"""Standard scores over all tokens of a batch."""

import jax.numpy as jnp
from jax import Array

from twinkle_jax.advantage._grouping import AxisName, Grouping, whole_batch
from twinkle_jax.advantage._moments import last_places, moments

_NOISE_UNITS = 8  # of the operands: what a few additions and subtractions of them may leave


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
        made_of: as `tokens`, how large the numbers are whose differences they are, if they are:
            then their own size does not tell what is rounding.

    Returns:
        As `tokens`: exactly 0 where all are equal up to rounding; all NaN where one is not finite.
    """
    values = tokens.reshape(-1)
    kept = None if keep is None else keep.reshape(-1)
    batch = whole_batch(values.shape[0], axis_name)
    everyone = moments(values, kept, batch)
    count = everyone.samples.astype(values.dtype)
    share = jnp.maximum(count - 1, 0) / jnp.maximum(count - correction, 1)
    divisor = everyone.std * jnp.sqrt(share) + epsilon.astype(values.dtype)
    centred = (tokens - everyone.anchor) + everyone.drop
    signal = everyone.has_signal
    if made_of is not None:
        size = _largest(made_of, keep, batch)
        rounding = _largest(jnp.abs(centred), keep, batch) <= last_places(_NOISE_UNITS, size)
        signal &= ~(rounding & everyone.finite)
    scores = jnp.where(signal, centred / divisor, 0)
    return scores if keep is None else jnp.where(keep, scores, 0)


def _largest(sizes: Array, keep: Array | None, batch: Grouping) -> Array:
    """Return the largest of what is kept; a maximum may skip NaN."""
    sizes = sizes if keep is None else jnp.where(keep, sizes, 0)
    return batch.largest(batch.split(sizes.reshape(-1)))
