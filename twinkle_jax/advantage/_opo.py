"""OPO: a reward minus the mean of its group, in which long completions count for more."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage._moments import moments
from twinkle_jax.advantage._rule import Samples, by_rows, by_segments


def opo_advantage(
    rewards: Any,
    lengths: Any,
    num_generations: int,
    *,
    where: Any = None,
    reward_weights: Any = None,
) -> Float[jax.Array, " samples"]:
    r"""Subtract the length-weighted mean of the group (on-policy RL with optimal baseline).

    $$A_i = r_i - \frac{\sum_j l_j r_j}{\sum_j l_j}$$

    with $l_j$ the tokens of completion $j$: the baseline of least variance where a gradient's
    square grows with the length. Completions of equal length give `grpo_advantage` at
    `scale='none'`.

    A group without signal, or without tokens, is exactly 0.

    Args:
        rewards: `[N]` or `[N, C]`, as in `grpo_advantage`.
        lengths: tokens per completion, `[N]`, at least zero.
        num_generations: K, at least 2; static.
        where: as in `grpo_advantage`.
        reward_weights: as in `grpo_advantage`.

    Returns:
        Advantages, `[N]`, sharded as the rewards are; weighted with the lengths, those of a group
        sum to 0.

    Raises:
        ValueError: as `rloo_advantage`; also for lengths of another shape, or below zero.
        TypeError: as `rloo_advantage`.

    References:
        https://arxiv.org/abs/2505.23585

    Example:
        >>> from twinkle_jax.advantage import opo_advantage
        >>> opo_advantage([0.0, 1.0], lengths=[30, 10], num_generations=2).tolist()
        [-0.25, 0.75]
    """
    return by_rows(
        _opo,
        rewards,
        num_generations,
        where=where,
        reward_weights=reward_weights,
        lengths=lengths,
    )


def segment_opo_advantage(
    rewards: Any,
    lengths: Any,
    segment_ids: Any,
    num_segments: int,
    *,
    where: Any = None,
    reward_weights: Any = None,
    axis_name: Any = None,
) -> Float[jax.Array, " samples"]:
    """Compute OPO advantages over the groups that `segment_ids` name.

    Args:
        rewards: as in `opo_advantage`, in any order.
        lengths: as in `opo_advantage`.
        segment_ids: as in `segment_grpo_advantage`.
        num_segments: as in `segment_grpo_advantage`.
        where: as in `grpo_advantage`.
        reward_weights: as in `grpo_advantage`.
        axis_name: as in `segment_grpo_advantage`.

    Returns:
        Advantages, `[N]`; a segment with a single sample is 0.

    Raises:
        ValueError: as `segment_grpo_advantage`; also for lengths of another shape, or below zero.
        TypeError: as `segment_grpo_advantage`.

    Example:
        >>> from twinkle_jax.advantage import segment_opo_advantage
        >>> segment_opo_advantage([0.0, 5.0, 1.0], [30, 10, 10], [0, 1, 0], 2).tolist()
        [-0.25, 0.0, 0.75]
    """
    return by_segments(
        _opo,
        rewards,
        segment_ids,
        num_segments,
        where=where,
        reward_weights=reward_weights,
        axis_name=axis_name,
        lengths=lengths,
    )


def _opo(samples: Samples, lengths: Array) -> Array:
    own = moments(samples.values, samples.keep, samples.groups)
    deviations = samples.deviations(own)
    weights = lengths.astype(deviations.dtype)
    tokens = samples.total(weights)
    baseline = samples.total(weights * deviations) / jnp.where(tokens > 0, tokens, 1)
    result = jnp.where(
        samples.groups.back(tokens) == 0, 0, deviations - samples.groups.back(baseline)
    )
    return samples.settled(own, result)
