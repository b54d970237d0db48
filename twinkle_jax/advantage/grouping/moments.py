"""Mean, spread and standard deviation of each group, accurate under an offset and under a mask.

Three things that the obvious formulas get wrong are right here, for every estimator at once:

* The mean is kept as two numbers, `maximum - mean_gap`. How far a reward is below the maximum is
  exact where they are near, and the gap is the mean of that. Rewards of 1e6 plus small differences
  so give the advantages of the differences. (A rounded mean would do as well, were it the same
  number everywhere: the compiler recomputes it in each fused loop, in another order or unrounded in
  a multiply-add. A maximum has no rounding to differ in.)
* Squares are taken of deviations divided by the spread, so that nothing overflows up to 1e18.
* Whether a group holds a signal at all is decided on its rewards (maximum against minimum), not on
  a standard deviation that is itself made of rounding noise.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from twinkle_jax.advantage.grouping.groups import Groups

NOISE_ULPS = 4  # a spread of so many units in the last place is rounding, not signal


class Moments(NamedTuple):
    """Statistics per group; the mean is `maximum - mean_gap`."""

    maximum: Array
    mean_gap: Array
    """How far below the maximum the samples are, in the mean."""
    spread: Array
    """The largest sample less the smallest."""
    std: Array
    """Bessel-corrected; 0 without signal."""
    samples: Array
    """How many are not masked, int32."""
    divisor: Array
    """As many, but at least 1, in the type of the rewards: what a mean divides by."""
    has_signal: Array
    """At least two samples that differ by more than rounding; True where not finite."""
    finite: Array
    """No NaN and no infinity among the samples."""


def moments(values: Array, where: Array | None, groups: Groups) -> Moments:
    """Compute the statistics of every group of `values`, of shape `[N]`.

    Args:
        values: `[N]` in a floating type. What stands under the mask must already be finite.
        where: `[N]` boolean, or None to keep everything.
        groups: which samples belong together.
    """

    def masked(entries: Array, fill: float) -> Array:
        return entries if where is None else jnp.where(where, entries, fill)

    if where is not None:
        count = groups.total(where.astype(jnp.int32))
    else:
        assert groups.size is not None
        count = jnp.asarray(groups.size, jnp.int32)
    divisor = jnp.maximum(count, 1).astype(values.dtype)

    maximum = groups.largest(masked(values, float(jnp.finfo(values.dtype).min)))
    if where is not None:
        maximum = jnp.where(count > 0, maximum, 0)
    gaps = masked(groups.to_samples(maximum) - values, 0)
    spread = groups.largest(gaps)
    mean_gap = groups.total(gaps) / divisor
    # A maximum may skip NaN on some backend; a sum never does.
    finite = jnp.isfinite(mean_gap)
    # Of the largest and the smallest reward, the larger magnitude; exact where the spread is small.
    size = jnp.maximum(maximum, spread - maximum)
    has_signal = ~finite | (spread > ulps(NOISE_ULPS, size))
    inverse = groups.to_samples(1 / jnp.where(spread > 0, spread, 1))
    deviations = masked((gaps - groups.to_samples(mean_gap)) * inverse, 0)
    variance = groups.total(jnp.square(deviations)) / jnp.maximum(divisor - 1, 1)
    return Moments(
        maximum=maximum,
        mean_gap=mean_gap,
        spread=spread,
        std=jnp.where(has_signal, spread * jnp.sqrt(variance), 0),
        samples=jnp.broadcast_to(count, maximum.shape),
        divisor=jnp.broadcast_to(divisor, maximum.shape),
        has_signal=has_signal,
        finite=finite,
    )


def ulps(number: int, magnitude: Array) -> Array:
    """Give so many units in the last place of a finite magnitude; infinity for one that is not."""
    if magnitude.dtype == jnp.float64:
        integer, exponent = jnp.int64, 0x7FF0000000000000
    else:
        integer, exponent = jnp.int32, 0x7F800000
    bits = jax.lax.bitcast_convert_type(magnitude, integer) & integer(exponent)
    power = jax.lax.bitcast_convert_type(bits, magnitude.dtype)  # the power of two below
    return power * (number * jnp.finfo(magnitude.dtype).eps)
