"""The one runner of all estimators over groups: form groups, run a formula, mask, shard.

A function that users call checks what it is given (`in_rows`, `in_segments`) and hands it to
`estimate`, which runs its formula, `formula(samples, *settings, **data) -> advantages`, one for
each of `samples.values`. `settings` are fixed at compile time; `data` are arrays and coefficients,
which may be traced.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from twinkle_jax.advantage.grouping.explicit_axes import auto_sharded
from twinkle_jax.advantage.grouping.grouped import Grouped, Layout
from twinkle_jax.advantage.grouping.groups import Grid, Groups, Rows, Segments, WholeBatch
from twinkle_jax.advantage.grouping.samples import Samples, keep_components, sum_components

Formula = Callable[..., Array]


def _one_per_sample(grouped: Grouped, **static: Any) -> tuple[int, ...]:
    del static
    return grouped.rewards.shape[:1]


@functools.partial(jax.jit, static_argnames=("formula", "settings", "components_apart"))
@auto_sharded(_one_per_sample)
def estimate(
    grouped: Grouped,
    *,
    formula: Formula,
    settings: tuple[Any, ...] = (),
    components_apart: bool = False,
) -> Array:
    """Run a formula over groups.

    Args:
        grouped: rewards that are checked already, and which samples belong together.
        formula: takes `Samples`, the settings, and the data of `grouped` as keywords.
        settings: hashable, fixed at compile time.
        components_apart: whether the formula wants rewards `[N, C]`, and their weights with the
            data, instead of their sum.
    """
    samples = _form_groups(grouped, components_apart=components_apart)
    data = grouped.data
    if components_apart and grouped.reward_weights is not None:
        data = data | {"reward_weights": grouped.reward_weights}
    result = formula(samples, *settings, **_as_rewards(data, grouped, samples))
    if samples.where is not None:
        keep = jnp.any(samples.where, axis=1) if components_apart else samples.where
        result = jnp.where(keep, result, 0)
    return result.reshape(-1)


def _form_groups(grouped: Grouped, *, components_apart: bool) -> Samples:
    """Lay rewards out as their groups are, 0 where they are masked."""
    read = keep_components if components_apart else sum_components
    values, keep = read(grouped.rewards, grouped.where, grouped.reward_weights)
    groups, inside = _groups(len(values), grouped.segment_ids, grouped.layout)
    if inside is not None:
        inside = inside if values.ndim == 1 else jnp.broadcast_to(inside[:, None], values.shape)
        keep = inside if keep is None else keep & inside
    everyone = WholeBatch(len(values), grouped.layout.axis_name)
    if isinstance(groups, Rows) and groups.size > 1 and values.ndim == 1:
        shape, groups = (-1, groups.size), Grid(groups.size)
        values, keep = jax.tree.map(lambda x: x.reshape(shape), (values, keep))
    samples = Samples(values, keep, groups, everyone)
    return samples._replace(values=samples.masked(values))


def _groups(count: int, segment_ids: Array | None, layout: Layout) -> tuple[Groups, Array | None]:
    """Form the groups, and tell which ids lie in range, if there are any."""
    if layout.num_generations is not None:
        return Rows(layout.num_generations), None
    if layout.num_segments is None:
        return WholeBatch(count, layout.axis_name), None
    assert segment_ids is not None
    inside = (segment_ids >= 0) & (segment_ids < layout.num_segments)
    ids = jnp.where(inside, segment_ids, 0)
    return Segments(ids, layout.num_segments, layout.axis_name), inside


def _as_rewards(data: dict[str, Any], grouped: Grouped, samples: Samples) -> dict[str, Array]:
    """Bring data to the type and layout of the rewards; components are summed as theirs are."""

    def convert(value: Any) -> Array:
        value = jnp.asarray(value)
        if value.ndim == 2:
            value, _ = sum_components(value, None, grouped.reward_weights)
        if isinstance(samples.groups, Grid) and value.shape == grouped.rewards.shape[:1]:
            value = value.reshape(samples.values.shape)
        return jax.lax.stop_gradient(value).astype(samples.values.dtype)

    return {name: convert(value) for name, value in data.items()}
