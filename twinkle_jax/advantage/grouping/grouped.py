"""Rewards that have been checked, with the groups they fall into: what the runner takes."""

import dataclasses
from typing import Any, NamedTuple

import jax

from twinkle_jax.advantage.inputs.rewards import check_rewards, check_segment_ids
from twinkle_jax.advantage.inputs.sample_data import Rewards, check_sample_data
from twinkle_jax.advantage.inputs.settings import check_axis_name, check_groups, check_size


class Layout(NamedTuple):
    """How samples form groups, fixed at compile time: K neighbours, segments, or all at once."""

    num_generations: int | None = None
    num_segments: int | None = None
    axis_name: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grouped:
    """Rewards, what belongs to them, and their layout: NumPy or JAX arrays, or tracers."""

    rewards: Any
    where: Any
    reward_weights: Any
    segment_ids: Any
    data: dict[str, Any]
    """Arrays and coefficients that a formula takes by name."""
    layout: Layout = dataclasses.field(metadata={"static": True})

    def as_one_group(self) -> "Grouped":
        """Compare every sample with the whole batch."""
        return dataclasses.replace(self, layout=Layout(axis_name=self.layout.axis_name))


def in_rows(
    rewards: Any,
    num_generations: Any,
    *,
    where: Any,
    reward_weights: Any,
    axis_name: Any = None,
    least: int = 2,
    why: str = ": a sample is compared with its group",
    **data: Any,
) -> Grouped:
    """Check rewards and form groups of `num_generations` neighbours.

    Args:
        rewards: as callers pass them, and so all that follows.
        num_generations: K.
        where: which samples count.
        reward_weights: one for each component.
        axis_name: of shards, for statistics of the batch.
        least: the smallest K that makes sense.
        why: what a caller with a smaller K is told.
        **data: what the formula takes besides.
    """
    size = check_size("num_generations", num_generations, least=least, why=why)
    layout = Layout(num_generations=size, axis_name=check_axis_name(axis_name))
    values, mask, weights = check_rewards(rewards, where, reward_weights)
    check_groups(values.shape[0], size)
    data = check_sample_data(data, Rewards(values, mask, size))
    return Grouped(values, mask, weights, None, data, layout)


def in_segments(
    rewards: Any,
    segment_ids: Any,
    num_segments: Any,
    *,
    where: Any,
    reward_weights: Any,
    axis_name: Any = None,
    **data: Any,
) -> Grouped:
    """Check rewards and form groups of the samples that share an id; arguments as `in_rows`."""
    size = check_size("num_segments", num_segments)
    layout = Layout(num_segments=size, axis_name=check_axis_name(axis_name))
    values, mask, weights = check_rewards(rewards, where, reward_weights)
    count = values.shape[0]
    ids = check_segment_ids(segment_ids, count, size)
    data = check_sample_data(data, Rewards(values, mask, count))
    return Grouped(values, mask, weights, ids, data, layout)
