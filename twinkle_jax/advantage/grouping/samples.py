"""What the formula of an estimator sees: one reward a sample, its mask, and the groups."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from twinkle_jax.advantage.grouping.groups import Groups
from twinkle_jax.advantage.grouping.moments import Moments, moments
from twinkle_jax.advantage.inputs.arrays import compute_dtype


class Samples(NamedTuple):
    """Rewards with their groups; the methods are what formulas have in common."""

    values: Array
    """One reward a sample, 0 where masked: `[P, K]` for groups of neighbours, `[N]` for others, or
    `[N, C]` where components stay apart."""
    where: Array | None
    groups: Groups
    batch: Groups

    def moments(self) -> Moments:
        """Compute the statistics of each group."""
        return moments(self.values, self.where, self.groups)

    def batch_moments(self) -> Moments:
        """Compute the statistics of the whole batch."""
        return moments(self.values, self.where, self.batch)

    def masked(self, values: Array) -> Array:
        """Put 0 where a sample is masked."""
        return values if self.where is None else jnp.where(self.where, values, 0)

    def total(self, values: Array) -> Array:
        """Sum what is not masked in each group."""
        return self.groups.total(self.masked(values))

    def deviations(self, own: Moments) -> Array:
        """Subtract the mean of its group from each reward; 0 where masked."""
        to_samples = self.groups.to_samples
        return self.masked((self.values - to_samples(own.maximum)) + to_samples(own.mean_gap))

    def zero_without_signal(self, own: Moments, result: Array) -> Array:
        """Put exactly 0 where a group has no signal, and NaN where it holds NaN or infinity."""
        signal = self.groups.to_samples(own.has_signal)
        finite = self.groups.to_samples(own.finite)
        return jnp.where(signal, jnp.where(finite, result, jnp.nan), 0)


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
