"""Statistics of the rewards of each prompt, and a filter of prompts by their signal."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from twinkle_jax.advantage.estimate import (
    auto_sharded,
    check_rewards,
    check_whole_groups,
    sum_components,
)
from twinkle_jax.advantage.groups import Neighbours, Samples, WholeBatch
from twinkle_jax.advantage.inputs import (
    ArrayLike,
    Scalar,
    check_coefficient,
    check_flag,
    check_size,
    describe,
)


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
    two left) has no gradient. Dynamic sampling (DAPO) replaces such prompts; log their share.

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
    check_whole_groups(values.shape[0], size)
    return _group_statistics(values, mask, weights, num_generations=size)


def dynamic_sampling_filter(
    statistics: GroupStatistics,
    num_generations: int = 1,
    *,
    keep_solved: bool = False,
    keep_failed: bool = False,
    threshold: Scalar = 0.5,
) -> Bool[jax.Array, " samples"]:
    """Select the prompts to train on; the others are to be replaced (DAPO).

    A prompt whose rewards are all equal has no signal. It is solved if their mean lies above the
    threshold, and failed otherwise; either kind can be kept, for estimators that learn from it
    (such as `remax_advantage`, whose baseline is not the group). A prompt whose samples are all
    masked is never kept; one with NaN always is, so that the NaN stays visible.

    Args:
        statistics: of `group_statistics`.
        num_generations: K, to repeat the result for each sample, as a mask for the `where=` of an
            estimator; 1, the default, gives one entry a prompt. Static.
        keep_solved: keep prompts that every sample solves; static.
        keep_failed: keep prompts that no sample solves; static.
        threshold: what separates rewards of failure from those of success; may be traced.

    Returns:
        True = keep, `[P]`, or `[N]` for K samples a prompt.

    Raises:
        ValueError: `num_generations` below 1.
        TypeError: anything but `GroupStatistics`; an argument of the wrong type.

    References:
        DAPO, https://arxiv.org/abs/2503.14476, section 3.2

    Example:
        >>> from twinkle_jax.advantage import dynamic_sampling_filter, group_statistics
        >>> statistics = group_statistics([0.0, 1.0, 1.0, 1.0, 0.0, 0.0], num_generations=2)
        >>> dynamic_sampling_filter(statistics).tolist()
        [True, False, False]
        >>> dynamic_sampling_filter(statistics, num_generations=2, keep_solved=True).tolist()
        [True, True, True, True, False, False]
    """
    if not isinstance(statistics, GroupStatistics):
        raise TypeError(
            f"statistics must be what group_statistics returns, got {describe(statistics)}"
        )
    return _filter(
        statistics.has_signal,
        statistics.mean,
        statistics.count,
        check_coefficient("threshold", threshold, statistics.mean),
        num_generations=check_size("num_generations", num_generations),
        keep_solved=check_flag("keep_solved", keep_solved),
        keep_failed=check_flag("keep_failed", keep_failed),
    )


def _one_per_group(rewards: Array, *, num_generations: int) -> tuple[int]:
    return (rewards.shape[0] // num_generations,)


@functools.partial(jax.jit, static_argnames="num_generations")
@auto_sharded(_one_per_group)
def _group_statistics(
    rewards: Array, where: Array | None, reward_weights: Array | None, *, num_generations: int
) -> GroupStatistics:
    values, keep = sum_components(rewards, where, reward_weights)
    groups = Samples(values, keep, Neighbours(num_generations), WholeBatch(values.shape[0], None))
    return GroupStatistics(
        mean=jnp.where(groups.finite, groups.maximum - groups.mean_gap, jnp.nan),
        std=jnp.where(groups.finite, groups.std, jnp.nan),
        count=groups.count,
        has_signal=groups.has_signal,
    )


def _one_per_sample(has_signal: Array, *, num_generations: int, **static: Any) -> tuple[int]:
    del static
    return (has_signal.shape[0] * num_generations,)


@functools.partial(jax.jit, static_argnames=("num_generations", "keep_solved", "keep_failed"))
@auto_sharded(_one_per_sample)
def _filter(
    has_signal: Array,
    mean: Array,
    count: Array,
    threshold: Array,
    *,
    num_generations: int,
    keep_solved: bool,
    keep_failed: bool,
) -> Array:
    solved = mean > jnp.asarray(threshold).astype(mean.dtype)
    keep = has_signal | (count > 0) & ((solved & keep_solved) | (~solved & keep_failed))
    shape = (*keep.shape, num_generations)
    return jnp.broadcast_to(keep[:, None], shape).reshape(-1)
