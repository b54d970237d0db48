"""An estimator as a rule: a function of grouped samples, run by one compiled frame.

GRPO and RLOO have a core of their own, for speed. The rest of the family shares this one: it sums
reward components, applies the mask, lays out the groups, runs the rule, and shards the result as
the rewards are. A new estimator is a new rule, of a few lines.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from twinkle_jax.advantage._coefficients import check_coefficient, check_subset_size
from twinkle_jax.advantage._core import combine_components
from twinkle_jax.advantage._grouping import AxisName, Grouping, rows, segments, whole_batch
from twinkle_jax.advantage._moments import Moments
from twinkle_jax.advantage._rewards import HostOrDevice, check_rewards, check_segment_ids
from twinkle_jax.advantage._sample_data import check_lengths
from twinkle_jax.advantage._settings import check_axis_name, check_groups, check_size
from twinkle_jax.advantage._sharding import auto_sharded, one_per_sample


class Layout(NamedTuple):
    """How samples form groups: K neighbours or segments by id; fixed at compile time."""

    num_generations: int | None = None
    num_segments: int | None = None
    axis_name: AxisName | None = None


class Samples(NamedTuple):
    """What a rule sees."""

    values: Array
    """One reward a sample, `[N]`; 0 where left out."""
    keep: Array | None
    groups: Grouping
    batch: Grouping

    def total(self, values: Array) -> Array:
        """Sum what is kept in each group."""
        return self.groups.total(self.groups.split(self.masked(values)))

    def masked(self, values: Array) -> Array:
        """Put 0 where a sample is left out."""
        return values if self.keep is None else jnp.where(self.keep, values, 0)

    def deviations(self, own: Moments) -> Array:
        """Subtract the mean of its group from each reward, `[N]`; 0 where left out."""
        back = self.groups.back
        return self.masked((self.values - back(own.anchor)) + back(own.drop))

    def settled(self, own: Moments, result: Array) -> Array:
        """Put exactly 0 where a group has no signal, and NaN where it holds NaN or infinity."""
        signal = self.groups.back(own.has_signal)
        finite = self.groups.back(own.finite)
        return jnp.where(signal, jnp.where(finite, result, jnp.nan), 0)


Rule = Callable[..., Array]


def by_rows(
    rule: Rule,
    rewards: Any,
    num_generations: Any,
    *,
    where: Any,
    reward_weights: Any,
    axis_name: Any = None,
    **data: Any,
) -> Array:
    """Run a rule over groups of `num_generations` neighbours; it takes `data` as keywords."""
    size = check_group_size(num_generations)
    values, mask, weights = check_rewards(rewards, where, reward_weights)
    check_groups(values.shape[0], size)
    layout = Layout(num_generations=size, axis_name=check_axis_name(axis_name))
    data = _checked(data, values, mask, size)
    return apply_rule(values, mask, weights, None, data, rule=rule, layout=layout)


def check_group_size(num_generations: Any) -> int:
    """Return a static K of at least 2."""
    return check_size(
        "num_generations", num_generations, least=2, why=": a sample is compared with its group"
    )


def by_segments(
    rule: Rule,
    rewards: Any,
    segment_ids: Any,
    num_segments: Any,
    *,
    where: Any,
    reward_weights: Any,
    axis_name: Any,
    **data: Any,
) -> Array:
    """Run a rule over groups that share an id; it takes `data` as keywords."""
    size = check_size("num_segments", num_segments)
    values, mask, weights = check_rewards(rewards, where, reward_weights)
    ids = check_segment_ids(segment_ids, values.shape[0], size)
    layout = Layout(num_segments=size, axis_name=check_axis_name(axis_name))
    data = _checked(data, values, mask, values.shape[0])
    return apply_rule(values, mask, weights, ids, data, rule=rule, layout=layout)


def _checked(
    data: dict[str, Any], values: HostOrDevice, mask: HostOrDevice | None, size: int
) -> dict[str, Any]:
    """Check what a rule takes besides: lengths, the k of pass@k, other coefficients."""

    def check(name: str, value: Any) -> Any:
        if name == "lengths":
            return check_lengths(value, values.shape[0], mask)
        if name == "k":
            return check_subset_size(value, size, values)
        return check_coefficient(name, value, values)

    return {name: check(name, value) for name, value in data.items()}


@functools.partial(jax.jit, static_argnames=("rule", "layout"))
@auto_sharded(one_per_sample)
def apply_rule(
    rewards: Array,
    where: Array | None,
    reward_weights: Array | None,
    segment_ids: Array | None,
    data: dict[str, Array],
    *,
    rule: Rule,
    layout: Layout,
) -> Array:
    """Advantages `[N]` by a rule that takes one reward a sample; `data` reaches it as keywords."""
    values, keep = combine_components(rewards, where, reward_weights)
    keep, groups = grouped(values.shape[0], keep, segment_ids, layout)
    batch = whole_batch(values.shape[0], layout.axis_name)
    samples = Samples(values, keep, groups, batch)
    samples = samples._replace(values=samples.masked(values))
    data = {name: jax.lax.stop_gradient(jnp.asarray(value)) for name, value in data.items()}
    return samples.masked(rule(samples, **data))


def grouped(
    num_samples: int, keep: Array | None, segment_ids: Array | None, layout: Layout
) -> tuple[Array | None, Grouping]:
    """Lay out the groups; a sample whose id is out of range is left out."""
    if segment_ids is None:
        assert layout.num_generations is not None
        return keep, rows(num_samples // layout.num_generations, layout.num_generations)
    assert layout.num_segments is not None
    inside = (segment_ids >= 0) & (segment_ids < layout.num_segments)
    ids = jnp.where(inside, segment_ids, 0)
    keep = inside if keep is None else keep & inside
    return keep, segments(ids, layout.num_segments, layout.axis_name)
