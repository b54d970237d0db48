"""Which samples are compared with which: rows of K, segments by id, or the whole batch.

Statistics need the same three operations whatever the groups are, so a way to form groups is these
three, and the mathematics in `moments.py` is written once.

Rows are only ever a reshape to [P, K] and reductions along axis 1. Columns taken one by one were
faster on some CPUs, and XLA of jaxlib 0.11.1 to 0.12.0.1 compiles them wrongly.
"""

import dataclasses
import functools
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array

from twinkle_jax.advantage.inputs.settings import AxisName


class Groups(Protocol):
    """A way to form groups of `[N]` samples."""

    @property
    def size(self) -> int | None:
        """Samples in each group before any is masked; None where that depends on the data."""

    def total(self, values: Array) -> Array:
        """Sum `[N]` values in each group."""

    def largest(self, values: Array) -> Array:
        """Find the maximum of `[N]` values in each group."""

    def to_samples(self, statistic: Array) -> Array:
        """Repeat a statistic of each group for every sample: `[N]`, or what broadcasts to it."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Groups of K neighbours: statistics are `[P]`."""

    size: int

    def total(self, values: Array) -> Array:
        """Sum each row."""
        return jnp.sum(values.reshape(-1, self.size), axis=1)

    def largest(self, values: Array) -> Array:
        """Find the maximum of each row."""
        return jnp.max(values.reshape(-1, self.size), axis=1)

    def to_samples(self, statistic: Array) -> Array:
        """Repeat a statistic along its row."""
        return jnp.broadcast_to(statistic[:, None], (*statistic.shape, self.size)).reshape(-1)


@dataclasses.dataclass(frozen=True)
class Grid(Rows):
    """Groups of K neighbours, of samples that are laid out as [P, K] already.

    XLA fuses what stays in this shape into few passes; a statistic that is repeated to `[N]` it
    works out again for each sample.
    """

    def to_samples(self, statistic: Array) -> Array:
        """Leave the repetition along its row to broadcasting."""
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
        # Long segments are summed in stripes, or a running float32 sum would lose digits.
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

    def to_samples(self, statistic: Array) -> Array:
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

    def to_samples(self, statistic: Array) -> Array:
        """Leave a statistic to broadcasting: it is a scalar."""
        return statistic
