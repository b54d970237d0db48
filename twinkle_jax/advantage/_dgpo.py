"""DGPO: a reward minus the mean of its group, over the group's mean absolute deviation."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage._moments import moments
from twinkle_jax.advantage._rule import Samples, by_rows, by_segments


def dgpo_advantage(
    rewards: Any,
    num_generations: int,
    *,
    where: Any = None,
    reward_weights: Any = None,
    epsilon: Any = 1e-8,
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
        https://arxiv.org/abs/2601.20614

    Example:
        >>> from twinkle_jax.advantage import dgpo_advantage
        >>> dgpo_advantage([0.0, 0.0, 0.0, 8.0], num_generations=4).tolist()
        [-0.6666666865348816, -0.6666666865348816, -0.6666666865348816, 2.0]
    """
    return by_rows(
        _dgpo,
        rewards,
        num_generations,
        where=where,
        reward_weights=reward_weights,
        epsilon=epsilon,
    )


def segment_dgpo_advantage(
    rewards: Any,
    segment_ids: Any,
    num_segments: int,
    *,
    where: Any = None,
    reward_weights: Any = None,
    epsilon: Any = 1e-8,
    axis_name: Any = None,
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

    Example:
        >>> from twinkle_jax.advantage import segment_dgpo_advantage
        >>> segment_dgpo_advantage([0.0, 5.0, 3.0], [0, 1, 0], 2).tolist()
        [-1.0, 0.0, 1.0]
    """
    return by_segments(
        _dgpo,
        rewards,
        segment_ids,
        num_segments,
        where=where,
        reward_weights=reward_weights,
        axis_name=axis_name,
        epsilon=epsilon,
    )


def _dgpo(samples: Samples, epsilon: Array) -> Array:
    own = moments(samples.values, samples.keep, samples.groups)
    deviations = samples.deviations(own)
    count = jnp.maximum(own.samples, 1).astype(deviations.dtype)
    spread = samples.total(jnp.abs(deviations)) / count + epsilon.astype(deviations.dtype)
    divisor = jnp.where(own.has_signal, spread, 1)
    return samples.settled(own, deviations / samples.groups.back(divisor))
