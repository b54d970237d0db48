"""Mean, spread and standard deviation of each group, accurate under an offset and under a mask.

Three things that the obvious formulas get wrong are settled here, for every estimator at once:

* The mean is kept as two numbers, `anchor - drop`. The anchor is the largest reward of the group;
  how far a reward is below it is exact where they are near, and the drop is the mean of that.
  Rewards of 1e6 plus small differences so give the advantages of the differences. (A rounded mean
  would be a better anchor, were it the same number everywhere: the compiler recomputes it in each
  fused loop, in another order or unrounded in a multiply-add. A maximum has no rounding to differ
  in.)
* Squares are taken of deviations divided by the spread, so that nothing overflows up to 1e18.
* Whether a group holds a signal at all is decided on its rewards (maximum against minimum), not on
  a standard deviation that is itself made of rounding noise.

Operations are counted: XLA's CPU runtime runs a program of less than 1,000 at once, and hands a
larger one to another thread, which takes longer than all of the work on 64 rewards.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from twinkle_jax.advantage._grouping import Grouping

NOISE_UNITS = 4  # a spread of so many units in the last place is rounding, not signal


class Moments(NamedTuple):
    """Statistics per group; the mean is `anchor - drop`."""

    anchor: Array
    """The largest sample."""
    drop: Array
    """How far below the anchor the samples are, in the mean."""
    spread: Array
    """The largest sample less the smallest."""
    std: Array
    """Bessel-corrected; 0 without signal."""
    samples: Array
    """How many were kept, int32."""
    has_signal: Array
    """At least two samples that differ by more than rounding; True where not finite."""
    finite: Array
    """No NaN and no infinity among the samples that were kept."""


def moments(rewards: Array, keep: Array | None, grouping: Grouping) -> Moments:
    """Compute the statistics of every group of `rewards`, of shape `[N]`.

    Args:
        rewards: `[N]` in a floating type. What stands under the mask must already be finite.
        keep: `[N]` boolean, or None to keep everything.
        grouping: which samples belong together.
    """
    pieces = grouping.split(rewards)
    kept = None if keep is None else grouping.split(keep)
    if kept is not None:
        count = grouping.total([k.astype(jnp.int32) for k in kept])
    else:
        assert grouping.size is not None
        count = jnp.asarray(grouping.size, jnp.int32)
    divisor = jnp.maximum(count, 1).astype(rewards.dtype)

    def masked(values: list[Array], fill: float) -> list[Array]:
        if kept is None:
            return values
        return [jnp.where(k, v, fill) for k, v in zip(kept, values, strict=True)]

    top = grouping.largest(masked(pieces, float(jnp.finfo(rewards.dtype).min)))
    if kept is not None:
        # 0 for an empty group. A quotient is stored for each group; what a `where` chooses would be
        # worked out again for each sample, from all of its group (jaxlib 0.12 did so wrongly).
        top = top / jnp.where(count > 0, jnp.ones_like(top), jnp.inf)
    below = masked([grouping.share(top) - p for p in pieces], 0)
    spread = grouping.largest(below)
    drop = grouping.total(below) / divisor
    # A maximum may skip NaN on some backend; a sum never does.
    finite = jnp.isfinite(drop)
    # Of the largest and the smallest reward, the larger magnitude; exact where the spread is small.
    has_signal = ~finite | (spread > last_places(NOISE_UNITS, jnp.maximum(top, spread - top)))
    inverse = grouping.share(1 / jnp.where(spread > 0, spread, 1))
    deviations = masked([(p - grouping.share(drop)) * inverse for p in below], 0)
    variance = grouping.total([jnp.square(d) for d in deviations]) / jnp.maximum(divisor - 1, 1)
    return Moments(
        anchor=top,
        drop=drop,
        spread=spread,
        std=jnp.where(has_signal, spread * jnp.sqrt(variance), 0),
        samples=count,
        has_signal=has_signal,
        finite=finite,
    )


def last_places(units: int, magnitude: Array) -> Array:
    """Give so many units in the last place of a finite magnitude; infinity for one that is not."""
    if magnitude.dtype == jnp.float64:
        integer, exponent = jnp.int64, 0x7FF0000000000000
    else:
        integer, exponent = jnp.int32, 0x7F800000
    bits = jax.lax.bitcast_convert_type(magnitude, integer) & integer(exponent)
    power = jax.lax.bitcast_convert_type(bits, magnitude.dtype)  # the power of two below
    return power * (units * jnp.finfo(magnitude.dtype).eps)
