"""RLOO: a reward minus the mean of the other rewards of its group."""

from typing import Any

import jax
from jaxtyping import Float

from twinkle_jax.advantage._estimate import estimate
from twinkle_jax.advantage._settings import Scale


def rloo_advantage(
    rewards: Any,
    num_generations: int,
    scale: Scale = "group",
    *,
    where: Any = None,
    reward_weights: Any = None,
    epsilon: Any = 1e-8,
    axis_name: Any = None,
) -> Float[jax.Array, " samples"]:
    r"""Compare every reward with the mean of the others in its group (REINFORCE leave-one-out).

    $$A_i = \frac{1}{s + \epsilon} \Bigl(r_i - \frac{1}{K - 1} \sum_{j \ne i} r_j\Bigr)
          = \frac{K}{K - 1} \cdot \frac{r_i - \mu}{s + \epsilon}$$

    with $s$ the standard deviation of the group (`scale='group'`), of all rewards (`'batch'`), or
    no division (`'none'`, the estimator of the paper: unbiased, because a sample takes no part in
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
    return estimate(
        rewards,
        num_generations,
        scale,
        leave_one_out=True,
        where=where,
        reward_weights=reward_weights,
        epsilon=epsilon,
        axis_name=axis_name,
    )
