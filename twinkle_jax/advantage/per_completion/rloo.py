"""RLOO: a reward minus the mean of the other rewards of its group."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage.estimate import estimate, in_rows, in_segments
from twinkle_jax.advantage.estimators import FunctionAdvantage
from twinkle_jax.advantage.groups import Samples
from twinkle_jax.advantage.inputs import ArrayLike, AxisName, Scalar, Scale, check_scale


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
