"""What a group of rewards looks like: for logging, and for choosing which prompts to train on."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from twinkle_jax.advantage.grouping.explicit_axes import auto_sharded
from twinkle_jax.advantage.grouping.groups import Rows
from twinkle_jax.advantage.grouping.moments import moments
from twinkle_jax.advantage.grouping.samples import sum_components
from twinkle_jax.advantage.inputs.arrays import ArrayLike
from twinkle_jax.advantage.inputs.rewards import check_rewards
from twinkle_jax.advantage.inputs.settings import check_groups, check_size


class GroupStatistics(NamedTuple):
    """Statistics of the rewards of each prompt; see `group_statistics`."""

    mean: Float[jax.Array, " prompts"]
    std: Float[jax.Array, " prompts"]
    count: Int[jax.Array, " prompts"]  # type: ignore[assignment]  # hides tuple.count, as wanted
    has_signal: Bool[jax.Array, " prompts"]


def group_statistics(
    rewards: ArrayLike,
    num_generations: int,
    *,
    where: ArrayLike | None = None,
    reward_weights: ArrayLike | None = None,
) -> GroupStatistics:
    r"""Describe the rewards of each prompt.

    $$\mu_p = \frac{1}{n_p} \sum_i r_i, \qquad
      \sigma_p = \sqrt{\frac{1}{n_p - 1} \sum_i (r_i - \mu_p)^2}$$

    A prompt without signal (all its rewards equal, up to 4 units in the last place, or fewer than
    two left) teaches nothing. Dynamic sampling (DAPO) replaces such prompts; their share is worth a
    place in every log.

    Args:
        rewards: `[N]` or `[N, C]`, as in `grpo_advantage`.
        num_generations: K, at least 1; static.
        where: as in `grpo_advantage`.
        reward_weights: as in `grpo_advantage`.

    Returns:
        `mean`, `std`, `count` (int32: samples kept) and `has_signal`, each `[P]`. An empty group
        is 0, 0, 0, False, and `std` is exactly 0 without signal. A group with NaN or infinity has
        mean and std NaN and counts as having a signal, so that no filter drops it in silence.

    Raises:
        ValueError: as `grpo_advantage`.
        TypeError: as `grpo_advantage`.

    References:
        DAPO, https://arxiv.org/abs/2503.14476

    Example:
        >>> from twinkle_jax.advantage import group_statistics
        >>> statistics = group_statistics([0.0, 2.0, 7.0, 7.0], num_generations=2)
        >>> statistics.mean.tolist(), statistics.has_signal.tolist()
        ([1.0, 7.0], [True, False])
    """
    size = check_size("num_generations", num_generations)
    values, mask, weights = check_rewards(rewards, where, reward_weights)
    check_groups(values.shape[0], size)
    return _group_statistics(values, mask, weights, num_generations=size)


def _one_per_group(rewards: jax.Array, *, num_generations: int) -> tuple[int]:
    return (rewards.shape[0] // num_generations,)


@functools.partial(jax.jit, static_argnames="num_generations")
@auto_sharded(_one_per_group)
def _group_statistics(
    rewards: jax.Array,
    where: jax.Array | None,
    reward_weights: jax.Array | None,
    *,
    num_generations: int,
) -> GroupStatistics:
    values, keep = sum_components(rewards, where, reward_weights)
    own = moments(values, keep, Rows(num_generations))
    return GroupStatistics(
        mean=jnp.where(own.finite, own.maximum - own.mean_gap, jnp.nan),
        std=jnp.where(own.finite, own.std, jnp.nan),
        count=own.samples,
        has_signal=own.has_signal,
    )
