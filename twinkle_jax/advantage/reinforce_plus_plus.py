"""REINFORCE++: reward-to-go per token, or a reward minus its group's mean, normalised."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage.estimate import (
    auto_sharded,
    check_lengths,
    estimate,
    in_rows,
    in_segments,
    like_first,
)
from twinkle_jax.advantage.estimators import FunctionAdvantage
from twinkle_jax.advantage.groups import Samples
from twinkle_jax.advantage.inputs import (
    ArrayLike,
    AxisName,
    Scalar,
    check_axis_name,
    check_coefficient,
    check_tokens,
    common_dtype,
)
from twinkle_jax.advantage.rewards_and_returns import discounted_sum, whiten


def reinforce_plus_plus_advantage(
    rewards: ArrayLike,
    *,
    where: ArrayLike | None = None,
    gamma: Scalar = 1.0,
    epsilon: Scalar = 1e-8,
    axis_name: AxisName | None = None,
) -> Float[jax.Array, "*batch time"]:
    r"""Normalise the reward-to-go of every token over the batch (REINFORCE++).

    $$G_t = r_t + \gamma\, G_{t'}, \qquad A_t = \frac{G_t - \bar G}{\sigma_G + \epsilon}$$

    with $t'$ the next token that is kept, and mean and standard deviation (Bessel-corrected) over
    all tokens kept. Rewards are per token: `kl_in_token_reward` puts the reward of a
    completion on its last token and subtracts a penalty from all of them.

    Args:
        rewards: one for each token, `[..., time]`, as in `discounted_returns`.
        where: True = keep, as `rewards`: the tokens that the policy chose.
        gamma: the discount per token; may be traced.
        epsilon: added to the standard deviation; may be traced.
        axis_name: as in `gae_advantage`.

    Returns:
        Advantages, `[..., time]`, 0 where masked, sharded as the rewards are; all exactly 0 where
        the returns are equal up to rounding.

    Raises:
        ValueError: an invalid shape; NaN or infinity in host data.
        TypeError: an argument of the wrong type.

    References:
        https://arxiv.org/abs/2501.03262

    Example:
        >>> from twinkle_jax.advantage import reinforce_plus_plus_advantage
        >>> rewards = [[2.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
        >>> where = [[True, False, False], [False, False, True]]
        >>> reinforce_plus_plus_advantage(rewards, where=where, epsilon=0.0)[0, 1:].tolist()
        [0.0, 0.0]
    """
    return _checked(rewards, "where", where, gamma=gamma, epsilon=epsilon, axis_name=axis_name)


@dataclasses.dataclass(frozen=True)
class ReinforcePlusPlusAdvantage:
    """`reinforce_plus_plus_advantage` as an object, called as `GAEAdvantage` is, without values.

    Args:
        gamma: the discount per token.

    Example:
        >>> from twinkle_jax.advantage import ReinforcePlusPlusAdvantage
        >>> ReinforcePlusPlusAdvantage()([[0.0, 0.0, 3.0], [0.0, 0.0, 3.0]]).tolist()
        [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """

    gamma: Scalar = 1.0

    def __call__(self, rewards: ArrayLike, *, masks: ArrayLike | None = None) -> jax.Array:
        """Call `reinforce_plus_plus_advantage`.

        Args:
            rewards: one for each token, `[..., time]`.
            masks: True = keep, as `rewards`.

        Returns:
            Advantages, `[..., time]`, 0 where masked.

        Raises:
            ValueError: as `reinforce_plus_plus_advantage`.
            TypeError: as `reinforce_plus_plus_advantage`.
        """
        return _checked(rewards, "masks", masks, gamma=self.gamma)


def _checked(
    rewards: ArrayLike,
    mask_name: str,
    mask: ArrayLike | None,
    *,
    gamma: Scalar,
    epsilon: Scalar = 1e-8,
    axis_name: AxisName | None = None,
) -> Array:
    """Check, convert, call the compiled core; errors name the mask as the user did."""
    (values,), keep = check_tokens({"rewards": rewards}, mask_name, mask)
    return _reinforce_plus_plus(
        values,
        keep,
        check_coefficient("gamma", gamma, values),
        check_coefficient("epsilon", epsilon, values),
        axis_name=check_axis_name(axis_name),
    )


@functools.partial(jax.jit, static_argnames="axis_name")
@auto_sharded(like_first)
def _reinforce_plus_plus(
    rewards: Array,
    where: Array | None,
    gamma: Array,
    epsilon: Array,
    *,
    axis_name: AxisName | None,
) -> Array:
    dtype = common_dtype(rewards)
    rewards = jax.lax.stop_gradient(rewards).astype(dtype)
    gamma, epsilon = (jax.lax.stop_gradient(jnp.asarray(x)).astype(dtype) for x in (gamma, epsilon))
    if where is not None:
        rewards = jnp.where(where, rewards, 0)
    returns = discounted_sum(rewards, gamma, where)
    if where is not None:
        returns = jnp.where(where, returns, 0)
    return whiten(returns, where, epsilon, correction=1, axis_name=axis_name)


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
