"""REINFORCE++ with baseline: a reward minus its group's mean, normalised over all tokens."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage.estimate import check_lengths, estimate, in_rows, in_segments
from twinkle_jax.advantage.estimators import FunctionAdvantage
from twinkle_jax.advantage.groups import Samples
from twinkle_jax.advantage.inputs import ArrayLike, AxisName, Scalar


def reinforce_plus_plus_baseline_advantage(
    rewards: ArrayLike,
    lengths: ArrayLike,
    num_generations: int,
    *,
    where: ArrayLike | None = None,
    reward_weights: ArrayLike | None = None,
    epsilon: Scalar = 1e-8,
    axis_name: AxisName | None = None,
) -> Float[jax.Array, " samples"]:
    r"""Subtract the group's mean, then normalise over the tokens of the batch.

    $$d_i = r_i - \mu, \qquad A_i = \frac{d_i - \bar d}{\sigma_d + \epsilon}$$

    with $\bar d$ and $\sigma_d$ (Bessel-corrected) taken over all tokens of the batch, each of
    which has the $d$ of its completion: a completion counts once per token. All tokens
    of a completion share the result, see `broadcast_to_tokens`.

    A group without signal is exactly 0, though its tokens count in $\bar d$ and $\sigma_d$; so is a
    completion without tokens.

    Args:
        rewards: `[N]` or `[N, C]`, as in `grpo_advantage`.
        lengths: tokens per completion, `[N]`, at least zero.
        num_generations: K, at least 2; static.
        where: as in `grpo_advantage`.
        reward_weights: as in `grpo_advantage`.
        epsilon: added to the standard deviation; may be traced.
        axis_name: as in `grpo_advantage`: the axis that the batch lies on.

    Returns:
        Advantages, `[N]`, sharded as the rewards are.

    Raises:
        ValueError: as `rloo_advantage`; also for lengths of another shape, or below zero.
        TypeError: as `rloo_advantage`.

    References:
        REINFORCE++, https://arxiv.org/abs/2501.03262

    Example:
        >>> from twinkle_jax.advantage import reinforce_plus_plus_baseline_advantage
        >>> rewards, lengths = [0.0, 4.0, 7.0, 7.0], [1, 1, 1, 6]
        >>> reinforce_plus_plus_baseline_advantage(rewards, lengths, num_generations=2).tolist()
        [-2.0, 2.0, 0.0, 0.0]
    """
    grouped = in_rows(rewards, num_generations, where, reward_weights, axis_name, epsilon=epsilon)
    grouped = grouped.with_data(lengths=check_lengths(lengths, grouped))
    return estimate(grouped, formula=_reinforce_plus_plus_baseline)


def segment_reinforce_plus_plus_baseline_advantage(
    rewards: ArrayLike,
    lengths: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int,
    *,
    where: ArrayLike | None = None,
    reward_weights: ArrayLike | None = None,
    epsilon: Scalar = 1e-8,
    axis_name: AxisName | None = None,
) -> Float[jax.Array, " samples"]:
    """Compute REINFORCE++ advantages with baseline over the groups that `segment_ids` name.

    Args:
        rewards: as in `reinforce_plus_plus_baseline_advantage`, in any order.
        lengths: as in `reinforce_plus_plus_baseline_advantage`.
        segment_ids: as in `segment_grpo_advantage`.
        num_segments: as in `segment_grpo_advantage`.
        where: as in `grpo_advantage`.
        reward_weights: as in `grpo_advantage`.
        epsilon: as in `reinforce_plus_plus_baseline_advantage`.
        axis_name: as in `segment_grpo_advantage`.

    Returns:
        Advantages, `[N]`; a segment with a single sample is 0.

    Raises:
        ValueError: as `segment_grpo_advantage`; also for lengths of another shape, or below zero.
        TypeError: as `segment_grpo_advantage`.

    References:
        REINFORCE++, https://arxiv.org/abs/2501.03262

    Example:
        >>> from twinkle_jax.advantage import segment_reinforce_plus_plus_baseline_advantage
        >>> segment_reinforce_plus_plus_baseline_advantage(
        ...     [7.0, 0.0, 7.0, 4.0], [6, 1, 1, 1], [0, 1, 0, 1], 2
        ... ).tolist()
        [0.0, -2.0, 0.0, 2.0]
    """
    grouped = in_segments(
        rewards, segment_ids, num_segments, where, reward_weights, axis_name, epsilon=epsilon
    )
    grouped = grouped.with_data(lengths=check_lengths(lengths, grouped))
    return estimate(grouped, formula=_reinforce_plus_plus_baseline)


@dataclasses.dataclass(frozen=True)
class ReinforcePlusPlusBaselineAdvantage(FunctionAdvantage, name="reinforce_plus_plus_baseline"):
    """`reinforce_plus_plus_baseline_advantage` with Twinkle's signature; needs `lengths=`.

    Example:
        >>> from twinkle_jax.advantage import ReinforcePlusPlusBaselineAdvantage
        >>> estimator = ReinforcePlusPlusBaselineAdvantage()
        >>> estimator([0.0, 4.0, 7.0, 7.0], num_generations=2, lengths=[1, 1, 1, 6]).tolist()
        [-2.0, 2.0, 0.0, 0.0]
    """

    function = staticmethod(reinforce_plus_plus_baseline_advantage)


def _reinforce_plus_plus_baseline(samples: Samples, lengths: Array, epsilon: Array) -> Array:
    deviations = samples.zero_without_signal(samples.deviations())
    tokens = samples.masked(lengths)
    counted = tokens > 0
    # Divide by the spread in the batch first, so that squares neither overflow nor underflow.
    batch = Samples(deviations, counted, samples.batch, samples.batch)
    spread = jnp.where(batch.has_signal & (batch.std > 0), batch.std, 1)
    scores = batch.deviations() / spread
    # Then normalise, each completion weighted by its tokens.
    total, count = samples.batch.total, samples.batch.total(tokens)
    mean = total(tokens * scores) / jnp.maximum(count, 1)
    variance = total(tokens * jnp.square(scores - mean)) / jnp.maximum(count - 1, 1)
    advantages = (scores - mean) / (jnp.sqrt(variance) + epsilon / spread)
    advantages = jnp.where(counted & batch.has_signal, advantages, 0)
    advantages = jnp.where(samples.each(samples.has_signal), advantages, 0)
    return jnp.where(batch.finite, advantages, jnp.nan)
