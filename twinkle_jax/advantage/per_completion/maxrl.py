"""MaxRL: a reward minus the mean of its group, divided by that mean."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage.estimate import estimate, in_rows, in_segments
from twinkle_jax.advantage.estimators import FunctionAdvantage
from twinkle_jax.advantage.groups import Samples
from twinkle_jax.advantage.inputs import ArrayLike, AxisName, Scalar


def maxrl_advantage(
    rewards: ArrayLike,
    num_generations: int,
    *,
    where: ArrayLike | None = None,
    reward_weights: ArrayLike | None = None,
    epsilon: Scalar = 1e-8,
) -> Float[jax.Array, " samples"]:
    r"""Follow the likelihood of success instead of its probability (maximum-likelihood RL).

    $$A_i = \frac{r_i - \mu}{\mu + \epsilon}$$

    with $\mu$ the mean of the $K$ rewards of the same prompt. For rewards of 0 and 1, a prompt
    that is solved once in $K$ weighs $K$ times as much as under `scale='none'`.

    A group without signal, or without a positive mean, is exactly 0.

    Args:
        rewards: `[N]` or `[N, C]`, as in `grpo_advantage`, at least zero.
        num_generations: K, at least 2; static.
        where: as in `grpo_advantage`.
        reward_weights: as in `grpo_advantage`.
        epsilon: added to the mean; may be traced.

    Returns:
        Advantages, `[N]`, sharded as the rewards are.

    Raises:
        ValueError: as `rloo_advantage`.
        TypeError: as `rloo_advantage`.

    References:
        MaxRL, https://arxiv.org/abs/2602.02710

    Example:
        >>> from twinkle_jax.advantage import maxrl_advantage
        >>> maxrl_advantage([1.0, 0.0, 0.0, 0.0], num_generations=4).tolist()
        [3.0, -1.0, -1.0, -1.0]
    """
    grouped = in_rows(rewards, num_generations, where, reward_weights, epsilon=epsilon)
    return estimate(grouped, formula=_maxrl)


def segment_maxrl_advantage(
    rewards: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int,
    *,
    where: ArrayLike | None = None,
    reward_weights: ArrayLike | None = None,
    epsilon: Scalar = 1e-8,
    axis_name: AxisName | None = None,
) -> Float[jax.Array, " samples"]:
    """Compute MaxRL advantages over the groups that `segment_ids` name.

    Args:
        rewards: as in `maxrl_advantage`, in any order.
        segment_ids: as in `segment_grpo_advantage`.
        num_segments: as in `segment_grpo_advantage`.
        where: as in `grpo_advantage`.
        reward_weights: as in `grpo_advantage`.
        epsilon: as in `maxrl_advantage`.
        axis_name: as in `segment_grpo_advantage`.

    Returns:
        Advantages, `[N]`; a segment with a single sample is 0.

    Raises:
        ValueError: as `segment_grpo_advantage`.
        TypeError: as `segment_grpo_advantage`.

    References:
        MaxRL, https://arxiv.org/abs/2602.02710

    Example:
        >>> from twinkle_jax.advantage import segment_maxrl_advantage
        >>> segment_maxrl_advantage([1.0, 5.0, 0.0, 0.0, 0.0], [0, 1, 0, 0, 0], 2).tolist()
        [3.0, 0.0, -1.0, -1.0, -1.0]
    """
    grouped = in_segments(
        rewards, segment_ids, num_segments, where, reward_weights, axis_name, epsilon=epsilon
    )
    return estimate(grouped, formula=_maxrl)


@dataclasses.dataclass(frozen=True)
class MaxRLAdvantage(FunctionAdvantage, name="maxrl"):
    """`maxrl_advantage` with Twinkle's signature; takes `epsilon=`.

    Example:
        >>> from twinkle_jax.advantage import MaxRLAdvantage
        >>> MaxRLAdvantage()([1.0, 0.0, 0.0, 0.0], num_generations=4).tolist()
        [3.0, -1.0, -1.0, -1.0]
    """

    function = staticmethod(maxrl_advantage)


def _maxrl(samples: Samples, epsilon: Array) -> Array:
    mean = samples.maximum - samples.mean_gap
    # Where rewards cancel, the mean is rounding noise and not a success rate to divide by.
    positive = mean > 4 * jnp.finfo(mean.dtype).eps * samples.mean_gap
    inverse = jnp.where(positive, 1 / jnp.where(positive, mean + epsilon, 1), 0)
    return samples.zero_without_signal(samples.deviations() * samples.each(inverse))
