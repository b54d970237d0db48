"""GRPO and RLOO over groups of different sizes, told apart by an id per sample."""

from typing import Any

import jax
from jaxtyping import Float

from twinkle_jax.advantage._estimate import estimate_segments
from twinkle_jax.advantage._settings import Scale


def segment_grpo_advantage(
    rewards: Any,
    segment_ids: Any,
    num_segments: int,
    scale: Scale = "group",
    *,
    where: Any = None,
    reward_weights: Any = None,
    epsilon: Any = 1e-8,
    axis_name: Any = None,
) -> Float[jax.Array, " samples"]:
    r"""Compute GRPO advantages over the groups that `segment_ids` name.

    $$A_i = \frac{r_i - \mu_{g(i)}}{s + \epsilon}$$

    with $g(i)$ the segment of sample $i$; otherwise as `grpo_advantage`. A segment with a single
    sample is 0, at every scale, for there is nothing to compare it with.

    Args:
        rewards: `[N]` or `[N, C]`, as in `grpo_advantage`, in any order.
        segment_ids: `[N]` integers; they need not be sorted, contiguous or all present. A sample
            whose id lies outside [0, num_segments) enters no statistic and gets 0.
        num_segments: how many ids there are; static.
        scale: as in `grpo_advantage`.
        where: as in `grpo_advantage`.
        reward_weights: as in `grpo_advantage`.
        epsilon: as in `grpo_advantage`.
        axis_name: the `shard_map` or `vmap` axis over which all statistics are taken: unlike the
            groups of `grpo_advantage`, segments may straddle shards.

    Returns:
        Advantages, `[N]`, in the order of the rewards and sharded as they are.

    Raises:
        ValueError: a shape, size or scale that does not fit; NaN or infinity in host data.
        TypeError: a type that does not fit; a traced `num_segments`.

    References:
        https://arxiv.org/abs/2402.03300

    Example:
        >>> from twinkle_jax.advantage import segment_grpo_advantage
        >>> segment_grpo_advantage([0.0, 5.0, 1.0, 7.0], [0, 1, 0, 2], 3, scale="none").tolist()
        [-0.5, 0.0, 0.5, 0.0]
    """
    return estimate_segments(
        rewards,
        segment_ids,
        num_segments,
        scale,
        leave_one_out=False,
        where=where,
        reward_weights=reward_weights,
        epsilon=epsilon,
        axis_name=axis_name,
    )


def segment_rloo_advantage(
    rewards: Any,
    segment_ids: Any,
    num_segments: int,
    scale: Scale = "group",
    *,
    where: Any = None,
    reward_weights: Any = None,
    epsilon: Any = 1e-8,
    axis_name: Any = None,
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
        https://arxiv.org/abs/2402.14740

    Example:
        >>> from twinkle_jax.advantage import segment_rloo_advantage
        >>> segment_rloo_advantage([0.0, 5.0, 1.0, 7.0], [0, 1, 0, 2], 3, scale="none").tolist()
        [-1.0, 0.0, 1.0, 0.0]
    """
    return estimate_segments(
        rewards,
        segment_ids,
        num_segments,
        scale,
        leave_one_out=True,
        where=where,
        reward_weights=reward_weights,
        epsilon=epsilon,
        axis_name=axis_name,
    )
