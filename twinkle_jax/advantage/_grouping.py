"""Which samples are compared with which: rows of K, segments by id, or the whole batch.

Statistics need the same five things whatever the layout is, so a layout is the five functions of
`Grouping`, and the mathematics in `_moments.py` is written once.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

AxisName = Hashable | tuple[Hashable, ...]


class Grouping(NamedTuple):
    """A layout of `[N]` samples, as the operations that statistics are made of."""

    split: Callable[[Array], list[Array]]
    """`[N]` values -> the pieces that the reductions below take."""
    share: Callable[[Array], Array]
    """A statistic per group -> its value for every entry of a piece."""
    back: Callable[[Array], Array]
    """A statistic per group -> its value for every sample, `[N]`."""
    total: Callable[[list[Array]], Array]
    """The sum of each group."""
    largest: Callable[[list[Array]], Array]
    """The maximum of each group."""
    size: int | None
    """Samples in each group before any is left out; None where that depends on the data."""


def rows(num_groups: int, num_generations: int) -> Grouping:
    """Groups of K neighbours: statistics are `[P]`.

    Only a reshape to [P, K] and reductions along its rows. Columns taken one by one were faster on
    some CPUs, and XLA of jaxlib 0.11.1 to 0.12.0.1 compiles them wrongly.
    """
    shape = (num_groups, num_generations)

    def back(statistic: Array) -> Array:
        # The elementwise pass runs over [N], so the result is sharded as the rewards are.
        return jnp.broadcast_to(statistic[:, None], shape).reshape(-1)

    return Grouping(
        split=lambda values: [values.reshape(shape)],
        share=lambda statistic: jnp.broadcast_to(statistic[:, None], shape),
        back=back,
        total=lambda pieces: jnp.sum(pieces[0], axis=1),
        largest=lambda pieces: jnp.max(pieces[0], axis=1),
        size=num_generations,
    )


def segments(segment_ids: Array, num_segments: int, axis_name: AxisName | None) -> Grouping:
    """Groups by id: statistics are `[num_segments]`; ids must already lie in range."""
    # Long segments are summed in stripes, or a running float32 sum would lose digits.
    count = segment_ids.shape[0]
    stripes = max(1, min(64, count // (64 * num_segments)))
    striped_ids = segment_ids * stripes + jnp.arange(count, dtype=segment_ids.dtype) % stripes

    def share(statistic: Array) -> Array:
        return statistic[segment_ids]

    def total(pieces: list[Array]) -> Array:
        partial = jax.ops.segment_sum(pieces[0], striped_ids, num_segments * stripes)
        sums = jnp.sum(partial.reshape(num_segments, stripes), axis=1)
        return sums if axis_name is None else jax.lax.psum(sums, axis_name)

    def largest(pieces: list[Array]) -> Array:
        tops = jax.ops.segment_max(pieces[0], segment_ids, num_segments)
        return tops if axis_name is None else jax.lax.pmax(tops, axis_name)

    return Grouping(lambda values: [values], share, share, total, largest, None)


def whole_batch(num_samples: int, axis_name: AxisName | None) -> Grouping:
    """One group of everything, over all shards of `axis_name`: statistics are scalars."""
    shards = 1 if axis_name is None else jax.lax.axis_size(axis_name)

    def total(pieces: list[Array]) -> Array:
        value = jnp.sum(pieces[0])
        return value if axis_name is None else jax.lax.psum(value, axis_name)

    def largest(pieces: list[Array]) -> Array:
        value = jnp.max(pieces[0])
        return value if axis_name is None else jax.lax.pmax(value, axis_name)

    def share(statistic: Array) -> Array:
        return statistic

    return Grouping(lambda values: [values], share, share, total, largest, num_samples * shards)
