"""Mean, spread and standard deviation of each group, accurate under an offset and under a mask.

Three things that the obvious formulas get wrong are settled here, for every estimator at once:

* The mean is kept as two numbers, `anchor + shift`. The anchor is the largest reward of the group;
  subtracting it from a reward near it is exact, and the shift is the mean of what remains. Rewards
  of 1e6 plus small differences so give the advantages of the differences. (A rounded mean would be
  a better anchor, were it the same number everywhere: the compiler recomputes it in each fused
  loop, in another order or unrounded in a multiply-add. A maximum has no rounding to differ in.)
* Squares are taken of deviations divided by the spread, so that nothing overflows up to 1e18.
* Whether a group holds a signal at all is decided on its rewards (maximum against minimum), not on
  a standard deviation that is itself made of rounding noise.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from twinkle_jax.advantage._grouping import Grouping

_NOISE_ULPS = 4  # a spread of so many units in the last place is rounding, not signal


class Moments(NamedTuple):
    """Statistics per group; the mean is `anchor + shift`."""

    anchor: Array
    shift: Array
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

    def centred(values: list[Array], statistic: Array) -> list[Array]:
        return [v - grouping.share(statistic) for v in values]

    def mean(values: list[Array]) -> Array:
        return grouping.total(masked(values, 0)) / divisor

    top = grouping.largest(masked(pieces, -jnp.inf))
    top = jnp.where(count > 0, top, 0)
    bottom = -grouping.largest(masked([-p for p in pieces], -jnp.inf))
    bottom = jnp.where(count > 0, bottom, 0)
    spread = top - bottom
    magnitude = jnp.maximum(jnp.abs(top), jnp.abs(bottom))
    unit = jnp.nextafter(magnitude, jnp.inf) - magnitude

    pieces = centred(pieces, top)
    shift = mean(pieces)
    if grouping.many:  # a running sum over many samples loses digits, which a second pass finds
        shift = shift + mean(centred(pieces, shift))
    pieces = centred(pieces, shift)

    # A maximum may skip NaN on some backend; a sum never does.
    finite = jnp.isfinite(spread) & jnp.isfinite(shift)
    has_signal = ~finite | ((count > 1) & (spread > _NOISE_ULPS * unit))
    inverse = grouping.share(1 / jnp.where(has_signal & finite, spread, 1))
    squares = masked([jnp.square(p * inverse) for p in pieces], 0)
    variance = grouping.total(squares) / jnp.maximum(divisor - 1, 1)
    return Moments(
        anchor=top,
        shift=shift,
        std=jnp.where(has_signal, spread * jnp.sqrt(variance), 0),
        samples=count,
        has_signal=has_signal,
        finite=finite,
    )
