"""The one runner of all estimators over groups: check, form groups, run a formula, mask, shard.

An estimator is a formula, `formula(samples, **settings, **data) -> advantages`, one for each of
`samples.values`. `settings` are fixed at compile time; `data` are arrays and coefficients, which
may be traced.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jax import Array

from twinkle_jax.advantage.grouping.groups import Grid, Groups, Rows, Segments, WholeBatch
from twinkle_jax.advantage.grouping.samples import Samples, keep_components, sum_components
from twinkle_jax.advantage.grouping.sharding import auto_sharded, one_per_sample
from twinkle_jax.advantage.inputs.rewards import check_rewards, check_segment_ids
from twinkle_jax.advantage.inputs.sample_data import Rewards, check_sample_data
from twinkle_jax.advantage.inputs.settings import check_axis_name, check_groups, check_size

Formula = Callable[..., Array]


class Layout(NamedTuple):
    """How samples form groups, fixed at compile time: K neighbours, segments, or all at once."""

    num_generations: int | None = None
    num_segments: int | None = None
    axis_name: Any = None


class Grouped(NamedTuple):
    """A layout, and the ids of its segments, which are not checked yet."""

    layout: Layout
    segment_ids: Any = None


def in_rows(
    num_generations: Any,
    *,
    axis_name: Any = None,
    least: int = 2,
    why: str = ": a sample is compared with its group",
) -> Grouped:
    """Form groups of `num_generations` neighbours."""
    size = check_size("num_generations", num_generations, least=least, why=why)
    return Grouped(Layout(num_generations=size, axis_name=check_axis_name(axis_name)))


def in_segments(segment_ids: Any, num_segments: Any, *, axis_name: Any = None) -> Grouped:
    """Form groups of samples that share an id."""
    size = check_size("num_segments", num_segments)
    layout = Layout(num_segments=size, axis_name=check_axis_name(axis_name))
    return Grouped(layout, segment_ids)


def estimate(
    formula: Formula,
    rewards: Any,
    grouped: Grouped,
    *,
    where: Any,
    reward_weights: Any,
    settings: Mapping[str, Any] | None = None,
    components_apart: bool = False,
    **data: Any,
) -> Array:
    """Run a formula over groups.

    Args:
        formula: takes `Samples`, and `settings` and `data` as keywords.
        rewards: as callers pass them.
        grouped: which samples belong together.
        where: as callers pass it.
        reward_weights: as callers pass them.
        settings: hashable, fixed at compile time.
        components_apart: whether the formula wants rewards `[N, C]`, and their weights with the
            data, instead of their sum.
        **data: arrays and coefficients, as callers pass them.
    """
    values, mask, weights = check_rewards(rewards, where, reward_weights)
    count, (layout, ids) = values.shape[0], grouped
    if layout.num_segments is not None:
        ids = check_segment_ids(ids, count, layout.num_segments)
    elif layout.num_generations is not None:
        check_groups(count, layout.num_generations)
    data = check_sample_data(data, Rewards(values, mask, layout.num_generations or count))
    if components_apart:
        data["reward_weights"] = weights
    return _run(
        values,
        mask,
        weights,
        ids,
        data,
        formula=formula,
        layout=layout,
        settings=tuple((settings or {}).items()),
        components_apart=components_apart,
    )


@functools.partial(jax.jit, static_argnames=("formula", "layout", "settings", "components_apart"))
@auto_sharded(one_per_sample)
def _run(
    rewards: Array,
    where: Array | None,
    reward_weights: Array | None,
    segment_ids: Array | None,
    data: dict[str, Array | None],
    *,
    formula: Formula,
    layout: Layout,
    settings: tuple[tuple[str, Any], ...],
    components_apart: bool,
) -> Array:
    read = keep_components if components_apart else sum_components
    values, keep = read(rewards, where, reward_weights)
    count = values.shape[0]
    groups, inside = _groups(count, segment_ids, layout)
    if inside is not None:
        inside = inside if values.ndim == 1 else jnp.broadcast_to(inside[:, None], values.shape)
        keep = inside if keep is None else keep & inside
    data = _as_rewards(data, values.dtype, reward_weights)
    one_each = keep if keep is None or keep.ndim == 1 else jnp.any(keep, axis=1)
    if isinstance(groups, Rows) and groups.size > 1 and values.ndim == 1:
        shape, groups = (-1, groups.size), Grid(groups.size)
        values, keep = jax.tree.map(lambda x: x.reshape(shape), (values, keep))
        data = {k: x.reshape(shape) if _per_sample(x, count) else x for k, x in data.items()}
    samples = Samples(values, keep, groups, WholeBatch(count, layout.axis_name))
    samples = samples._replace(values=samples.masked(values))
    result = formula(samples, **dict(settings), **data).reshape(-1)
    return result if one_each is None else jnp.where(one_each, result, 0)


def _per_sample(value: Array | None, count: int) -> TypeGuard[Array]:
    return value is not None and value.shape == (count,)


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


def _as_rewards(
    data: dict[str, Array | None], dtype: jnp.dtype, reward_weights: Array | None
) -> dict[str, Array | None]:
    """Bring data to the type of the rewards; what has components is summed as they are."""

    def convert(value: Array) -> Array:
        value = jnp.asarray(value)
        if value.ndim == 2:
            value, _ = sum_components(value, None, reward_weights)
        return jax.lax.stop_gradient(value).astype(dtype)

    return {name: None if value is None else convert(value) for name, value in data.items()}
