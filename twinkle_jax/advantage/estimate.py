"""Run an estimator per completion: form groups, apply its formula, keep the sharding.

A public function is two lines: `in_rows` or `in_segments` checks its arguments, and `estimate`
runs its formula, `formula(samples, *settings, **data)`, in one compiled program. `settings` are
fixed at compile time; `data` are arrays and coefficients.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from twinkle_jax.advantage.groups import Grid, Groups, Neighbours, Samples, Segments, WholeBatch
from twinkle_jax.advantage.inputs import compute_dtype
from twinkle_jax.advantage.rewards import Grouped
from twinkle_jax.advantage.sharding import auto_sharded


def _one_per_sample(grouped: Grouped, **static: Any) -> tuple[int, ...]:
    del static
    return grouped.rewards.shape[:1]


@functools.partial(jax.jit, static_argnames=("formula", "settings", "components_apart"))
@auto_sharded(_one_per_sample)
def estimate(
    grouped: Grouped,
    *,
    formula: Callable[..., Array],
    settings: tuple[Any, ...] = (),
    components_apart: bool = False,
) -> Array:
    """Run a formula over groups.

    Args:
        grouped: rewards that passed the checks, and their groups.
        formula: takes `Samples`, the settings, and the data of `grouped` by name.
        settings: hashable, fixed at compile time.
        components_apart: whether the formula wants rewards `[N, C]`, and `reward_weights` by name,
            instead of their sum.
    """
    data = grouped.data
    if components_apart and grouped.reward_weights is not None:
        data = data | {"reward_weights": grouped.reward_weights}
    samples = _form_groups(grouped, components_apart=components_apart)
    data = {name: _like_rewards(value, grouped, samples) for name, value in data.items()}
    advantages = formula(samples, *settings, **data)
    if samples.where is not None:
        keep = jnp.any(samples.where, axis=1) if components_apart else samples.where
        advantages = jnp.where(keep, advantages, 0)
    return advantages.reshape(-1)


def _form_groups(grouped: Grouped, *, components_apart: bool) -> Samples:
    """Lay rewards out as their groups are, 0 where they are masked."""
    read = keep_components if components_apart else sum_components
    values, keep = read(grouped.rewards, grouped.where, grouped.reward_weights)
    batch = WholeBatch(len(values), grouped.axis_name)
    groups: Groups = batch
    if grouped.num_generations is not None:
        groups = Neighbours(grouped.num_generations)
        if groups.size > 1 and values.ndim == 1:
            groups = Grid(groups.size)
            values, keep = jax.tree.map(lambda x: x.reshape(-1, groups.size), (values, keep))
    elif grouped.num_segments is not None:
        ids = grouped.segment_ids
        inside = (ids >= 0) & (ids < grouped.num_segments)
        groups = Segments(jnp.where(inside, ids, 0), grouped.num_segments, grouped.axis_name)
        if values.ndim == 2:
            inside = jnp.broadcast_to(inside[:, None], values.shape)
        keep = inside if keep is None else keep & inside
    samples = Samples(values, keep, groups, batch)
    return dataclasses.replace(samples, values=samples.masked(values))


def _like_rewards(value: Any, grouped: Grouped, samples: Samples) -> Array:
    """Convert data to the dtype and layout of the rewards, components summed likewise."""
    value = jnp.asarray(value)
    if value.ndim == 2:
        value, _ = sum_components(value, None, grouped.reward_weights)
    if isinstance(samples.groups, Grid) and value.shape == grouped.rewards.shape[:1]:
        value = value.reshape(samples.values.shape)
    return jax.lax.stop_gradient(value).astype(samples.values.dtype)


def sum_components(
    rewards: Array, where: Array | None, reward_weights: Array | None
) -> tuple[Array, Array | None]:
    """Turn `[N]` or `[N, C]` rewards into one reward a sample, 0 where masked, and its mask."""
    rewards = jax.lax.stop_gradient(rewards).astype(compute_dtype(rewards.dtype))
    if rewards.ndim == 1:
        return (rewards if where is None else jnp.where(where, rewards, 0)), where
    if reward_weights is not None:
        weights = jax.lax.stop_gradient(reward_weights).astype(rewards.dtype)
        rewards = rewards * jnp.broadcast_to(weights, rewards.shape)
    if where is None:
        return jnp.sum(rewards, axis=1), None
    cells = jnp.broadcast_to(where.reshape(len(where), -1), rewards.shape)
    return jnp.sum(jnp.where(cells, rewards, 0), axis=1), jnp.any(cells, axis=1)


def keep_components(
    rewards: Array, where: Array | None, reward_weights: Array | None
) -> tuple[Array, Array]:
    """Turn rewards into `[N, C]`, 0 where masked, and their mask; weights are for the formula."""
    del reward_weights
    rewards = jax.lax.stop_gradient(rewards).astype(compute_dtype(rewards.dtype))
    rewards = rewards.reshape(len(rewards), -1)
    if where is None:
        return rewards, jnp.ones(rewards.shape, bool)
    cells = jnp.broadcast_to(where.reshape(len(where), -1), rewards.shape)
    return jnp.where(cells, rewards, 0), cells
