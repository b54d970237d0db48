"""The traced part of GRPO and RLOO: rewards in, advantages out, one program per static setting.

Everything here runs under `jax.jit`. What callers may pass, and what they get told when it is
wrong, is settled before, in `_rewards.py` and `_settings.py`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from twinkle_jax.advantage._grouping import AxisName, Grouping, rows, segments, whole_batch
from twinkle_jax.advantage._moments import moments
from twinkle_jax.advantage._sharding import auto_sharded, one_per_sample

_NARROW, _WIDE = jnp.dtype(jnp.float32), jnp.dtype(jnp.float64)


class Setting(NamedTuple):
    """What is fixed at compile time."""

    scale: str
    leave_one_out: bool
    axis_name: AxisName | None
    num_generations: int | None = None
    num_segments: int | None = None


def compute_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Float64 stays; float16, bfloat16, integers and booleans are computed in float32."""
    return _WIDE if dtype == _WIDE else _NARROW


def combine_components(
    rewards: Array, where: Array | None, reward_weights: Array | None
) -> tuple[Array, Array | None]:
    """Turn `[N]` or `[N, C]` rewards into one reward a sample, 0 where masked, and its mask."""
    rewards = jax.lax.stop_gradient(rewards).astype(compute_dtype(rewards.dtype))
    if rewards.ndim == 1:
        return (rewards if where is None else jnp.where(where, rewards, 0)), where
    keep = where
    if where is not None:
        cells = where if where.ndim == 2 else jnp.broadcast_to(where[:, None], rewards.shape)
        keep = jnp.any(cells, axis=1)
    if reward_weights is not None:
        weights = jax.lax.stop_gradient(reward_weights).astype(rewards.dtype)
        rewards = rewards * jnp.broadcast_to(weights, rewards.shape)
    if where is not None:
        rewards = jnp.where(cells, rewards, 0)
    return jnp.sum(rewards, axis=1), keep


@functools.partial(jax.jit, static_argnames="setting")
@auto_sharded(one_per_sample)
def advantages(
    rewards: Array,
    where: Array | None,
    reward_weights: Array | None,
    epsilon: Array,
    segment_ids: Array | None = None,
    *,
    setting: Setting,
) -> Array:
    """Advantages `[N]` of `[N]` or `[N, C]` rewards."""
    values, keep = combine_components(rewards, where, reward_weights)
    epsilon = jax.lax.stop_gradient(jnp.asarray(epsilon)).astype(values.dtype)
    scale = setting.scale
    batch = whole_batch(values.shape[0], setting.axis_name)
    grouping: Grouping
    if segment_ids is not None:
        assert setting.num_segments is not None
        inside = (segment_ids >= 0) & (segment_ids < setting.num_segments)
        keep = inside if keep is None else keep & inside
        values = jnp.where(keep, values, 0)
        ids = jnp.where(inside, segment_ids, 0)
        grouping = segments(ids, setting.num_segments, setting.axis_name)
    elif setting.num_generations == 1:
        if scale == "group":
            return values
        # The batch is the group, and so is its standard deviation.
        grouping, scale = batch, "none" if scale == "none" else "group"
    else:
        assert setting.num_generations is not None
        grouping = rows(values.shape[0] // setting.num_generations, setting.num_generations)

    own = moments(values, keep, grouping)
    factor = jnp.ones_like(own.std)
    if setting.leave_one_out:
        samples = own.samples.astype(factor.dtype)
        factor = factor * (samples / jnp.maximum(samples - 1, 1))
    if scale == "group":  # dividing by infinity is 0 without signal
        factor = factor / jnp.where(own.has_signal, own.std + epsilon, jnp.inf)
    else:
        factor = jnp.where(own.has_signal, jnp.where(own.finite, factor, jnp.nan), 0)
    # Without signal the smallest reward takes the place of the mean: none is below, so 0, never -0.
    drop = jnp.where(factor == 0, own.spread, own.drop)
    centred = (values - grouping.back(own.anchor)) + grouping.back(drop)
    result = centred * grouping.back(factor)
    if scale == "batch":
        everyone = moments(values, keep, batch)
        result = result / (everyone.std + epsilon)
        # 0 / 0 where epsilon is 0 and nothing in the batch differs is still no signal.
        result = jnp.where(everyone.has_signal, result, 0)
    return result if keep is None else jnp.where(keep, result, 0)
