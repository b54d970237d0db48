"""DGPO: a reward minus the mean of its group, over the group's mean absolute deviation."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage.estimate import estimate, in_rows, in_segments
from twinkle_jax.advantage.estimators import FunctionAdvantage
from twinkle_jax.advantage.groups import Samples
from twinkle_jax.advantage.inputs import ArrayLike, AxisName, Scalar


def dgpo_advantage(
    rewards: ArrayLike,
    num_generations: int,
    *,
    where: ArrayLike | None = None,
    reward_weights: ArrayLike | None = None,
    epsilon: Scalar = 1e-8,
) -> Float[jax.Array, " samples"]:
    r"""Give every prompt the same total weight (difficulty-balanced estimation of DGPO).

    $$A_i = \frac{r_i - \mu}{\frac{1}{K} \sum_j |r_j - \mu| + \epsilon}$$

    so that $\sum_i |A_i| = K$ for every prompt with a signal, easy or hard; divided by a standard
    deviation, prompts of medium difficulty weigh most. (The weights that DGPO gives to whole
    questions are not part of this.)

    Args:
        rewards: `[N]` or `[N, C]`, as in `grpo_advantage`.
        num_generations: K, at least 2; static.
        where: as in `grpo_advantage`.
        reward_weights: as in `grpo_advantage`.
        epsilon: added to the mean absolute deviation; may be traced.

    Returns:
        Advantages, `[N]`, sharded as the rewards are; a group without signal is exactly 0.

    Raises:
        ValueError: as `rloo_advantage`.
        TypeError: as `rloo_advantage`.

    References:
        DGPO, https://arxiv.org/abs/2601.20614

    Example:
        >>> from twinkle_jax.advantage import dgpo_advantage
        >>> dgpo_advantage([0.0, 0.0, 0.0, 8.0], num_generations=4).tolist()
        [-0.6666666865348816, -0.6666666865348816, -0.6666666865348816, 2.0]
    """
    grouped = in_rows(rewards, num_generations, where, reward_weights, epsilon=epsilon)
    return estimate(grouped, formula=_dgpo)


def segment_dgpo_advantage(
    rewards: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int,
    *,
    where: ArrayLike | None = None,
    reward_weights: ArrayLike | None = None,
    epsilon: Scalar = 1e-8,
    axis_name: AxisName | None = None,
) -> Float[jax.Array, " samples"]:
    """Compute DGPO advantages over the groups that `segment_ids` name.

    Args:
        rewards: as in `dgpo_advantage`, in any order.
        segment_ids: as in `segment_grpo_advantage`.
        num_segments: as in `segment_grpo_advantage`.
        where: as in `grpo_advantage`.
        reward_weights: as in `grpo_advantage`.
        epsilon: as in `dgpo_advantage`.
        axis_name: as in `segment_grpo_advantage`.

    Returns:
        Advantages, `[N]`; a segment with a single sample is 0.

    Raises:
        ValueError: as `segment_grpo_advantage`.
        TypeError: as `segment_grpo_advantage`.

    References:
        DGPO, https://arxiv.org/abs/2601.20614

    Example:
        >>> from twinkle_jax.advantage import segment_dgpo_advantage
        >>> segment_dgpo_advantage([0.0, 5.0, 3.0], [0, 1, 0], 2).tolist()
        [-1.0, 0.0, 1.0]
    """
    grouped = in_segments(
        rewards, segment_ids, num_segments, where, reward_weights, axis_name, epsilon=epsilon
    )
    return estimate(grouped, formula=_dgpo)


@dataclasses.dataclass(frozen=True)
class DGPOAdvantage(FunctionAdvantage, name="dgpo"):
    """`dgpo_advantage` with Twinkle's signature; takes `epsilon=`.

    Example:
        >>> from twinkle_jax.advantage import DGPOAdvantage
        >>> DGPOAdvantage()([0.0, 3.0], num_generations=2).tolist()
        [-1.0, 1.0]
    """

    function = staticmethod(dgpo_advantage)


def _dgpo(samples: Samples, epsilon: Array) -> Array:
    deviations = samples.deviations()
    divisor = samples.mean(jnp.abs(deviations)) + epsilon
    divisor = jnp.where(samples.has_signal, divisor, 1)
    return samples.zero_without_signal(deviations / samples.each(divisor))
