"""OPO: a reward minus the mean of its group, in which long completions count for more."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage.estimate import check_lengths, estimate, in_rows, in_segments
from twinkle_jax.advantage.estimators import FunctionAdvantage
from twinkle_jax.advantage.groups import Samples
from twinkle_jax.advantage.inputs import ArrayLike, AxisName


def opo_advantage(
    rewards: ArrayLike,
    lengths: ArrayLike,
    num_generations: int,
    *,
    where: ArrayLike | None = None,
    reward_weights: ArrayLike | None = None,
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
        OPO, https://arxiv.org/abs/2505.23585

    Example:
        >>> from twinkle_jax.advantage import opo_advantage
        >>> opo_advantage([0.0, 1.0], lengths=[30, 10], num_generations=2).tolist()
        [-0.25, 0.75]
    """
    grouped = in_rows(rewards, num_generations, where, reward_weights)
    return estimate(grouped.with_data(lengths=check_lengths(lengths, grouped)), formula=_opo)


def segment_opo_advantage(
    rewards: ArrayLike,
    lengths: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int,
    *,
    where: ArrayLike | None = None,
    reward_weights: ArrayLike | None = None,
    axis_name: AxisName | None = None,
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

    References:
        OPO, https://arxiv.org/abs/2505.23585

    Example:
        >>> from twinkle_jax.advantage import segment_opo_advantage
        >>> segment_opo_advantage([0.0, 5.0, 1.0], [30, 10, 10], [0, 1, 0], 2).tolist()
        [-0.25, 0.0, 0.75]
    """
    grouped = in_segments(rewards, segment_ids, num_segments, where, reward_weights, axis_name)
    return estimate(grouped.with_data(lengths=check_lengths(lengths, grouped)), formula=_opo)


@dataclasses.dataclass(frozen=True)
class OPOAdvantage(FunctionAdvantage, name="opo"):
    """`opo_advantage` with Twinkle's signature; needs `lengths=`, tokens per completion.

    Example:
        >>> from twinkle_jax.advantage import OPOAdvantage
        >>> OPOAdvantage()([0.0, 1.0], num_generations=2, lengths=[30, 10]).tolist()
        [-0.25, 0.75]
    """

    function = staticmethod(opo_advantage)


def _opo(samples: Samples, lengths: Array) -> Array:
    deviations = samples.deviations()
    tokens = samples.total(lengths)
    # Deviations have no large common part, so their weighted mean is accurate.
    baseline = samples.total(lengths * deviations) / jnp.where(tokens > 0, tokens, 1)
    advantages = deviations - samples.each(baseline)
    advantages = jnp.where(samples.each(tokens) == 0, 0, advantages)
    return samples.zero_without_signal(advantages)
