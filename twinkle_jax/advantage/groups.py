"""Groups of samples and their statistics, which every formula is written with.

A way to form groups (`Neighbours`, `Segments`, `WholeBatch`) is three operations: sum, maximum, and
repeating a statistic for each sample. `Samples` has the statistics, written once on these three.

Numerical details, handled here once for every estimator:

* The mean is kept as two numbers, `maximum - mean_gap`. The difference between a
  reward and the maximum is exact where they are close, and the gap is the mean of these. So rewards
  of 1e6 plus small differences give the advantages of the differences. (A rounded mean would do as
  well if it were the same number everywhere, but the compiler recomputes it in each fused loop, in
  another order or unrounded in a multiply-add. A maximum is not rounded.)
* Deviations are divided by the spread before they are squared, so that rewards up to 1e18 do not
  overflow.
* Whether a group has a signal at all is decided on its rewards (maximum against minimum), not on
  a standard deviation that is itself made of rounding noise.
"""

import dataclasses
import functools
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array

from twinkle_jax.advantage.inputs import AxisName

NOISE_ULPS = 4
"""Rewards of a group that differ by at most this many units in the last place count as equal."""


class Groups(Protocol):
    """A way to form groups of `[N]` samples."""

    @property
    def size(self) -> int | None:
        """Samples in each group before any is masked; None where that depends on the data."""

    def total(self, values: Array) -> Array:
        """Sum `[N]` values in each group."""

    def largest(self, values: Array) -> Array:
        """Find the maximum of `[N]` values in each group."""

    def each(self, statistic: Array) -> Array:
        """Repeat a statistic of each group for every sample: `[N]`, or what broadcasts to it."""


@dataclasses.dataclass(frozen=True)
class Neighbours:
    """Groups of K neighbours: statistics are `[P]`.

    Only ever a reshape to [P, K] and reductions along axis 1. Two other forms are faster on CPUs:
    columns taken one by one, which XLA of jaxlib 0.11.1 to 0.12.0.1 compiles wrongly, and products
    with a vector of ones, which that of jaxlib 0.10.2 compiles wrongly before some reductions.
    """

    size: int

    def total(self, values: Array) -> Array:
        """Sum each row."""
        return jnp.sum(values.reshape(-1, self.size), axis=1)

    def largest(self, values: Array) -> Array:
        """Find the maximum of each row."""
        return jnp.max(values.reshape(-1, self.size), axis=1)

    def each(self, statistic: Array) -> Array:
        """Repeat a statistic along its row."""
        return jnp.broadcast_to(statistic[:, None], (*statistic.shape, self.size)).reshape(-1)


@dataclasses.dataclass(frozen=True)
class Grid(Neighbours):
    """Groups of K neighbours, of samples that are laid out as [P, K] already.

    XLA fuses operations in this shape into few passes. If a statistic were repeated to `[N]`, XLA
    would recompute it for each sample.
    """

    def each(self, statistic: Array) -> Array:
        """Add an axis, so that a statistic broadcasts along its row."""
        return statistic[:, None]


@dataclasses.dataclass(frozen=True)
class Segments:
    """Groups by id: statistics are `[count]`; ids must lie in range."""

    ids: Array
    count: int
    axis_name: AxisName | None
    size: None = None

    def total(self, values: Array) -> Array:
        """Sum each segment."""
        # Long segments are summed in stripes: a running float32 sum would lose digits.
        samples = self.ids.shape[0]
        stripes = max(1, min(64, samples // (64 * self.count)))
        striped = self.ids * stripes + jnp.arange(samples, dtype=self.ids.dtype) % stripes
        partial = jax.ops.segment_sum(values, striped, self.count * stripes)
        sums = jnp.sum(partial.reshape(self.count, stripes), axis=1)
        return sums if self.axis_name is None else jax.lax.psum(sums, self.axis_name)

    def largest(self, values: Array) -> Array:
        """Find the maximum of each segment."""
        tops = jax.ops.segment_max(values, self.ids, self.count)
        return tops if self.axis_name is None else jax.lax.pmax(tops, self.axis_name)

    def each(self, statistic: Array) -> Array:
        """Look a statistic up by id."""
        return statistic[self.ids]


@dataclasses.dataclass(frozen=True)
class WholeBatch:
    """One group of everything, over all shards of `axis_name`: statistics are scalars."""

    samples: int
    axis_name: AxisName | None

    @functools.cached_property
    def size(self) -> int:
        """Count the samples of all shards."""
        return self.samples * (1 if self.axis_name is None else jax.lax.axis_size(self.axis_name))

    def total(self, values: Array) -> Array:
        """Sum the batch."""
        value = jnp.sum(values)
        return value if self.axis_name is None else jax.lax.psum(value, self.axis_name)

    def largest(self, values: Array) -> Array:
        """Find the maximum of the batch."""
        value = jnp.max(values)
        return value if self.axis_name is None else jax.lax.pmax(value, self.axis_name)

    def each(self, statistic: Array) -> Array:
        """Return the statistic, a scalar, which broadcasts."""
        return statistic


@dataclasses.dataclass(frozen=True)
class Samples:
    """Samples in groups, and lazily computed statistics of each group.

    Attributes:
        values: one a sample, 0 where masked: `[P, K]` for groups of neighbours, `[N]` for others,
            or `[N, C]` where components stay apart.
        where: True = keep, or None.
        groups: which samples are compared with which.
        batch: all of them as one group.
    """

    values: Array
    where: Array | None
    groups: Groups
    batch: WholeBatch

    def masked(self, values: Array, fill: float = 0) -> Array:
        """Replace masked values."""
        return values if self.where is None else jnp.where(self.where, values, fill)

    def each(self, statistic: Array) -> Array:
        """Repeat a statistic of each group for its samples."""
        return self.groups.each(statistic)

    def total(self, values: Array) -> Array:
        """Sum the unmasked values of each group."""
        return self.groups.total(self.masked(values))

    def mean(self, values: Array) -> Array:
        """Average the unmasked values of each group; 0 for an empty one."""
        return self.total(values) / self.divisor

    @functools.cached_property
    def count(self) -> Array:
        """Number of unmasked samples of each group, int32."""
        if self.where is not None:
            return self.groups.total(self.where.astype(jnp.int32))
        assert self.groups.size is not None
        return jnp.broadcast_to(jnp.asarray(self.groups.size, jnp.int32), self.maximum.shape)

    @property
    def divisor(self) -> Array:
        """`count`, at least 1, in the dtype of the values."""
        return jnp.maximum(self.count, 1).astype(self.values.dtype)

    @functools.cached_property
    def maximum(self) -> Array:
        """The largest value of each group; 0 for an empty one."""
        least = float(jnp.finfo(self.values.dtype).min)
        top = self.groups.largest(self.masked(self.values, least))
        return top if self.where is None else jnp.where(self.count > 0, top, 0)

    @functools.cached_property
    def gaps(self) -> Array:
        """How far each sample lies below the maximum of its group; 0 where masked."""
        return self.masked(self.each(self.maximum) - self.values)

    @functools.cached_property
    def mean_gap(self) -> Array:
        """Maximum minus mean of each group."""
        return self.groups.total(self.gaps) / self.divisor

    @functools.cached_property
    def spread(self) -> Array:
        """The largest value of each group less the smallest."""
        return self.groups.largest(self.gaps)

    @property
    def finite(self) -> Array:
        """No NaN and no infinity in the group."""
        # A maximum may skip NaN on some backend; a sum never does.
        return jnp.isfinite(self.mean_gap)

    @functools.cached_property
    def has_signal(self) -> Array:
        """At least two samples that differ by more than rounding; True where not finite."""
        # The larger magnitude of maximum and minimum; exact where the spread is small.
        size = jnp.maximum(self.maximum, self.spread - self.maximum)
        return ~self.finite | (self.spread > ulps(NOISE_ULPS, size))

    @functools.cached_property
    def std(self) -> Array:
        """Standard deviation of each group, with Bessel's correction; 0 without signal."""
        inverse = self.each(1 / jnp.where(self.spread > 0, self.spread, 1))
        deviations = self.masked((self.gaps - self.each(self.mean_gap)) * inverse)
        variance = self.groups.total(jnp.square(deviations)) / jnp.maximum(self.divisor - 1, 1)
        return jnp.where(self.has_signal, self.spread * jnp.sqrt(variance), 0)

    def deviations(self) -> Array:
        """Subtract the mean of its group from each value; 0 where masked.

        As value - maximum + mean gap: exact where values are near each other, however large.
        """
        return self.masked((self.values - self.each(self.maximum)) + self.each(self.mean_gap))

    def zero_without_signal(self, results: Array) -> Array:
        """Put exactly 0 where a group has no signal, and NaN where it holds NaN or infinity."""
        signal, finite = self.each(self.has_signal), self.each(self.finite)
        return jnp.where(signal, jnp.where(finite, results, jnp.nan), 0)

    def scaled(self, advantages: Array, scale: str, epsilon: Array) -> Array:
        """Divide by the std of the group (`'group'`) or batch (`'batch'`); 0 without signal."""
        if scale == "group":
            divisor = jnp.where(self.has_signal, self.std + epsilon, 1)
            advantages = advantages * self.each(1 / divisor)  # one division a group
        advantages = self.zero_without_signal(advantages)
        if scale == "batch":
            batch = dataclasses.replace(self, groups=self.batch)
            advantages = jnp.where(batch.has_signal, advantages / (batch.std + epsilon), 0)
        return advantages


def ulps(number: int, magnitude: Array) -> Array:
    """Return `number` units in the last place of a magnitude; infinity for infinity."""
    if magnitude.dtype == jnp.float64:
        integer, exponent = jnp.int64, 0x7FF0000000000000
    else:
        integer, exponent = jnp.int32, 0x7F800000
    # Keep the exponent's bits alone: the power of two below.
    bits = jax.lax.bitcast_convert_type(magnitude, integer) & integer(exponent)
    power = jax.lax.bitcast_convert_type(bits, magnitude.dtype)
    return power * (number * jnp.finfo(magnitude.dtype).eps)
