"""REINFORCE: a reward, or a reward minus a baseline (ReMax, RLOO, OPO)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage.estimate import Grouped, check_lengths, estimate, in_rows, in_segments
from twinkle_jax.advantage.estimators import FunctionAdvantage
from twinkle_jax.advantage.groups import NOISE_ULPS, Samples, ulps
from twinkle_jax.advantage.inputs import (
    ArrayLike,
    AxisName,
    HostOrDevice,
    Scalar,
    Scale,
    as_numbers,
    check_scale,
    check_shape,
    refuse,
)


def reinforce_advantage(
    rewards: ArrayLike,
    num_generations: int = 1,
    *,
    where: ArrayLike | None = None,
    reward_weights: ArrayLike | None = None,
) -> Float[jax.Array, " samples"]:
    r"""Take the reward as the advantage (REINFORCE without a baseline).

    $$A_i = r_i$$

    Its gradient is unbiased and of high variance: a constant added to all rewards changes it, and
    a prompt whose rewards are all equal still has one. It is meant for comparisons; train with
    `rloo_advantage` or `grpo_advantage`. Groups have no effect, so there is no `segment_` form:
    leave K at 1.

    Args:
        rewards: `[N]` or `[N, C]`, as in `grpo_advantage`.
        num_generations: K, samples per prompt, at least 1; without effect.
        where: as in `grpo_advantage`.
        reward_weights: as in `grpo_advantage`.

    Returns:
        Advantages, `[N]`, sharded as the rewards are.

    Raises:
        ValueError: as `grpo_advantage`.
        TypeError: as `grpo_advantage`.

    References:
        Simple statistical gradient-following algorithms (Williams, 1992),
        https://doi.org/10.1007/BF00992696

    Example:
        >>> from twinkle_jax.advantage import reinforce_advantage
        >>> reinforce_advantage([1.0, 0.0, 0.5, 0.5]).tolist()
        [1.0, 0.0, 0.5, 0.5]
    """
    grouped = in_rows(rewards, num_generations, where, reward_weights, least=1)
    return estimate(grouped, formula=_reinforce)


@dataclasses.dataclass(frozen=True)
class ReinforceAdvantage(FunctionAdvantage, name="reinforce"):
    """`reinforce_advantage` with Twinkle's signature; a missing reward gives 0.

    Example:
        >>> from twinkle_jax.advantage import ReinforceAdvantage
        >>> ReinforceAdvantage()([1.0, 0.0, None, 4.0], num_generations=2).tolist()
        [1.0, 0.0, 0.0, 4.0]
    """

    function = staticmethod(reinforce_advantage)


def _reinforce(samples: Samples) -> jax.Array:
    return samples.values


def remax_advantage(
    rewards: ArrayLike,
    greedy_rewards: ArrayLike,
    num_generations: int = 1,
    *,
    where: ArrayLike | None = None,
    reward_weights: ArrayLike | None = None,
) -> Float[jax.Array, " samples"]:
    r"""Subtract the reward of the prompt's greedy completion (ReMax).

    $$A_i = r_i - r^{greedy}_{p(i)}$$

    The baseline needs neither a group nor a critic, but one more completion a prompt, decoded
    greedily. A difference of at most 4 units in the last place is exactly 0. For groups of
    different sizes leave K at 1 and pass `greedy_rewards[segment_ids]`.

    Args:
        rewards: `[N]` or `[N, C]`, as in `grpo_advantage`.
        greedy_rewards: `[P]`, or `[P, C]`, one for each prompt; P = N / K.
        num_generations: K, samples per prompt, at least 1; static.
        where: as in `grpo_advantage`. Baselines have all components, whatever a sample lacks.
        reward_weights: as in `grpo_advantage`.

    Returns:
        Advantages, `[N]`, sharded as the rewards are.

    Raises:
        ValueError: as `grpo_advantage`; also for greedy rewards of another shape.
        TypeError: as `grpo_advantage`.

    References:
        ReMax, https://arxiv.org/abs/2310.10505

    Example:
        >>> from twinkle_jax.advantage import remax_advantage
        >>> remax_advantage([1.0, 0.0, 2.0, 4.0], [0.5, 3.0], num_generations=2).tolist()
        [0.5, -0.5, -1.0, 1.0]
    """
    grouped = in_rows(rewards, num_generations, where, reward_weights, least=1)
    greedy = _check_greedy_rewards(greedy_rewards, grouped)
    return estimate(grouped.with_data(greedy_rewards=greedy), formula=_remax)


@dataclasses.dataclass(frozen=True)
class ReMaxAdvantage(FunctionAdvantage, name="remax"):
    """`remax_advantage` with Twinkle's signature; needs `greedy_rewards=`, `[P]`.

    Example:
        >>> from twinkle_jax.advantage import ReMaxAdvantage
        >>> ReMaxAdvantage()([1.0, 0.0, None, 4.0], 2, greedy_rewards=[0.5, 3.0]).tolist()
        [0.5, -0.5, 0.0, 1.0]
    """

    function = staticmethod(remax_advantage)


def _remax(samples: Samples, greedy_rewards: Array) -> Array:
    baseline = samples.each(greedy_rewards)
    advantages = samples.values - baseline
    magnitude = jnp.maximum(jnp.abs(samples.values), jnp.abs(baseline))
    equal = jnp.isfinite(advantages) & (jnp.abs(advantages) <= ulps(NOISE_ULPS, magnitude))
    return jnp.where(equal, 0, advantages)


def _check_greedy_rewards(greedy_rewards: Any, grouped: Grouped) -> HostOrDevice:
    """Return the greedy reward of each prompt, `[P]`, or `[P, C]` beside rewards `[N, C]`."""
    greedy = as_numbers("greedy_rewards", greedy_rewards)
    shape, size = grouped.rewards.shape, grouped.num_generations
    expected = (shape[0] // (size or 1), *shape[1:])
    why = f", one greedy completion for each prompt, for rewards of shape {shape} and "
    check_shape("greedy_rewards", greedy, expected, f"{why}num_generations={size}")
    if isinstance(greedy, np.ndarray):
        bad = ~np.isfinite(greedy).reshape(len(greedy), -1).all(axis=1)
        refuse("greedy_rewards must be finite", greedy, bad, grouped.where)
    return greedy


def rloo_advantage(
    rewards: ArrayLike,
    num_generations: int,
    scale: Scale = "group",
    *,
    where: ArrayLike | None = None,
    reward_weights: ArrayLike | None = None,
    epsilon: Scalar = 1e-8,
    axis_name: AxisName | None = None,
) -> Float[jax.Array, " samples"]:
    r"""Compare every reward with the mean of the others in its group (REINFORCE leave-one-out).

    $$A_i = \frac{1}{s + \epsilon} \Bigl(r_i - \frac{1}{K - 1} \sum_{j \ne i} r_j\Bigr)
          = \frac{K}{K - 1} \cdot \frac{r_i - \mu}{s + \epsilon}$$

    with $s$ the standard deviation of the group (`scale='group'`), of all rewards (`'batch'`), or
    no division (`'none'`, the estimator of the paper: unbiased, because a sample is not part of
    its own baseline). Under a mask K is the number of samples that the group has left.

    Args:
        rewards: as in `grpo_advantage`.
        num_generations: K, at least 2; static.
        scale: as in `grpo_advantage`.
        where: as in `grpo_advantage`.
        reward_weights: as in `grpo_advantage`.
        epsilon: as in `grpo_advantage`.
        axis_name: as in `grpo_advantage`.

    Returns:
        Advantages, `[N]`, sharded as the rewards are.

    Raises:
        ValueError: as `grpo_advantage`; also for `num_generations` below 2.
        TypeError: as `grpo_advantage`.

    References:
        Back to Basics, https://arxiv.org/abs/2402.14740

    Example:
        >>> from twinkle_jax import rloo_advantage
        >>> rloo_advantage([0.0, 3.0, 0.0, 1.0], num_generations=2, scale="none").tolist()
        [-3.0, 3.0, -1.0, 1.0]
    """
    grouped = in_rows(
        rewards,
        num_generations,
        where,
        reward_weights,
        axis_name,
        why=": leave-one-out compares a sample with the others of its group",
        epsilon=epsilon,
    )
    return estimate(grouped, formula=_rloo, settings=(check_scale(scale),))


def segment_rloo_advantage(
    rewards: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int,
    scale: Scale = "group",
    *,
    where: ArrayLike | None = None,
    reward_weights: ArrayLike | None = None,
    epsilon: Scalar = 1e-8,
    axis_name: AxisName | None = None,
) -> Float[jax.Array, " samples"]:
    r"""Compute RLOO advantages over the groups that `segment_ids` name.

    $$A_i = \frac{n_{g(i)}}{n_{g(i)} - 1} \cdot \frac{r_i - \mu_{g(i)}}{s + \epsilon}$$

    with $n_g$ the number of samples of segment $g$; otherwise as `segment_grpo_advantage`.

    Args:
        rewards: as in `segment_grpo_advantage`.
        segment_ids: as in `segment_grpo_advantage`.
        num_segments: as in `segment_grpo_advantage`.
        scale: as in `grpo_advantage`.
        where: as in `grpo_advantage`.
        reward_weights: as in `grpo_advantage`.
        epsilon: as in `grpo_advantage`.
        axis_name: as in `segment_grpo_advantage`.

    Returns:
        Advantages, `[N]`, in the order of the rewards and sharded as they are.

    Raises:
        ValueError: as `segment_grpo_advantage`.
        TypeError: as `segment_grpo_advantage`.

    References:
        Back to Basics, https://arxiv.org/abs/2402.14740

    Example:
        >>> from twinkle_jax.advantage import segment_rloo_advantage
        >>> segment_rloo_advantage([0.0, 5.0, 1.0, 7.0], [0, 1, 0, 2], 3, scale="none").tolist()
        [-1.0, 0.0, 1.0, 0.0]
    """
    grouped = in_segments(
        rewards, segment_ids, num_segments, where, reward_weights, axis_name, epsilon=epsilon
    )
    return estimate(grouped, formula=_rloo, settings=(check_scale(scale),))


@dataclasses.dataclass(frozen=True)
class RLOOAdvantage(FunctionAdvantage, name="rloo"):
    """`rloo_advantage` with Twinkle's signature; None in a list of rewards means "missing".

    Example:
        >>> from twinkle_jax import RLOOAdvantage
        >>> RLOOAdvantage()([0.0, 1.0, 2.0, 4.0], num_generations=2, scale="none").tolist()
        [-1.0, 1.0, -2.0, 2.0]
    """

    function = staticmethod(rloo_advantage)


def _rloo(samples: Samples, scale: str, epsilon: Array) -> Array:
    count = samples.divisor
    # A reward is n / (n - 1) times as far from the mean of the others as from the mean of all n.
    advantages = samples.deviations() * samples.each(count / jnp.maximum(count - 1, 1))
    return samples.scaled(advantages, scale, epsilon)


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
