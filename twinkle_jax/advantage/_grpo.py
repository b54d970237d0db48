"""GRPO: a reward minus the mean of its group."""

from typing import Any

import jax
from jaxtyping import Float

from twinkle_jax.advantage._estimate import estimate
from twinkle_jax.advantage._settings import Scale


def grpo_advantage(
    rewards: Any,
    num_generations: int = 1,
    scale: Scale = "group",
    *,
    where: Any = None,
    reward_weights: Any = None,
    epsilon: Any = 1e-8,
    axis_name: Any = None,
) -> Float[jax.Array, " samples"]:
    r"""Compare every reward with the mean of its group (group-relative policy optimisation).

    $$A_i = \frac{r_i - \mu}{s + \epsilon}$$

    with $\mu$ the mean of the $K$ rewards of the same prompt, and $s$ their standard deviation
    $\sigma$ (`scale='group'`), the standard deviation $\sigma_B$ of all $N$ rewards (`'batch'`),
    both with Bessel's correction, or no division at all (`'none'`, which is Dr. GRPO). Advantages
    are weights: no gradient flows through them.

    A group whose rewards are all equal, up to 4 units in the last place, is exactly 0. With
    `num_generations=1` there is no group: `'group'` returns the rewards, and the other two scales
    take the whole batch as the group.

    Args:
        rewards: `[N]`, or `[N, C]` for C reward components, which are summed. **The K rewards of a
            prompt stand next to each other**: p1 p1 p2 p2, not p1 p2 p1 p2, and `[P, K]` must be
            flattened first, or it reads as K components. A list, a NumPy or JAX array, a tracer or
            a PyTorch tensor. Computed in float32 (float64 stays, with x64 on); good up to 1e18.
        num_generations: K, the number of samples per prompt; static.
        scale: `'group'`, `'batch'` or `'none'`; static.
        where: True = keep, `[N]` or as `rewards`. What is left out enters no statistic and gets 0;
            a group with fewer than two samples left is 0.
        reward_weights: `[C]`, ones by default.
        epsilon: added to the standard deviation; may be traced.
        axis_name: the `shard_map` or `vmap` axis (or a tuple of them) over which `'batch'` takes
            its statistics. Under `jit` with sharded arrays they are global anyway.

    Returns:
        Advantages, `[N]`, sharded as the rewards are.

    Raises:
        ValueError: a shape, size or scale that does not fit; NaN or infinity in host data.
        TypeError: a type that does not fit; a traced `num_generations`.

    References:
        DeepSeekMath, https://arxiv.org/abs/2402.03300; Dr. GRPO, https://arxiv.org/abs/2503.20783

    Example:
        >>> from twinkle_jax import grpo_advantage
        >>> rewards = [0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
        >>> grpo_advantage(rewards, num_generations=4, scale="none").tolist()
        [-0.5, 0.5, -0.5, 0.5, 0.75, -0.25, -0.25, -0.25]
        >>> grpo_advantage(rewards, num_generations=4)[4:].tolist()
        [1.5, -0.5, -0.5, -0.5]
    """
    return estimate(
        rewards,
        num_generations,
        scale,
        leave_one_out=False,
        where=where,
        reward_weights=reward_weights,
        epsilon=epsilon,
        axis_name=axis_name,
    )
