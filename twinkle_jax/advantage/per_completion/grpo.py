"""GRPO: a reward minus the mean of its group."""

import dataclasses

import jax
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage.estimate import estimate, in_rows, in_segments
from twinkle_jax.advantage.estimators import FunctionAdvantage
from twinkle_jax.advantage.groups import Samples
from twinkle_jax.advantage.inputs import ArrayLike, AxisName, Scalar, Scale, check_scale


def grpo_advantage(
    rewards: ArrayLike,
    num_generations: int = 1,
    scale: Scale = "group",
    *,
    where: ArrayLike | None = None,
    reward_weights: ArrayLike | None = None,
    epsilon: Scalar = 1e-8,
    axis_name: AxisName | None = None,
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
            prompt are adjacent**: p1 p1 p2 p2, not p1 p2 p1 p2, and `[P, K]` must be
            flattened first, or it reads as K components. A list, a NumPy or JAX array, a tracer or
            a PyTorch tensor. Computed in float32 (float64 stays, with x64 on); results are finite
            for rewards up to 1e18.
        num_generations: K, the number of samples per prompt; static.
        scale: `'group'`, `'batch'` or `'none'`; static.
        where: True = keep, `[N]` or as `rewards`. Samples that are left out enter no statistic and
            get 0; a group with fewer than two samples left is 0.
        reward_weights: `[C]`, ones by default.
        epsilon: added to the standard deviation; may be traced.
        axis_name: the `shard_map` or `vmap` axis (or a tuple of them) over which `'batch'` takes
            its statistics. Under `jit` with sharded arrays they are global anyway.

    Returns:
        Advantages, `[N]`, sharded as the rewards are.

    Raises:
        ValueError: an invalid shape, size or scale; NaN or infinity in host data.
        TypeError: an argument of the wrong type; a traced `num_generations`.

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
    settings = (check_scale(scale),)
    grouped = in_rows(
        rewards, num_generations, where, reward_weights, axis_name, least=1, why="", epsilon=epsilon
    )
    if grouped.num_generations != 1:
        return estimate(grouped, formula=_grpo, settings=settings)
    formula = _rewards if scale == "group" else _grpo
    return estimate(grouped.as_one_group(), formula=formula, settings=settings)


def segment_grpo_advantage(
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
    r"""Compute GRPO advantages over the groups that `segment_ids` name.

    $$A_i = \frac{r_i - \mu_{g(i)}}{s + \epsilon}$$

    with $g(i)$ the segment of sample $i$; otherwise as `grpo_advantage`. A segment with a single
    sample is 0, at every scale, since there is nothing to compare it with.

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
        ValueError: an invalid shape, size or scale; NaN or infinity in host data.
        TypeError: an argument of the wrong type; a traced `num_segments`.

    References:
        DeepSeekMath, https://arxiv.org/abs/2402.03300

    Example:
        >>> from twinkle_jax.advantage import segment_grpo_advantage
        >>> segment_grpo_advantage([0.0, 5.0, 1.0, 7.0], [0, 1, 0, 2], 3, scale="none").tolist()
        [-0.5, 0.0, 0.5, 0.0]
    """
    grouped = in_segments(
        rewards, segment_ids, num_segments, where, reward_weights, axis_name, epsilon=epsilon
    )
    return estimate(grouped, formula=_grpo, settings=(check_scale(scale),))


@dataclasses.dataclass(frozen=True)
class GRPOAdvantage(FunctionAdvantage, name="grpo"):
    """`grpo_advantage` with Twinkle's signature; None in a list of rewards means "missing".

    Example:
        >>> from twinkle_jax import GRPOAdvantage
        >>> GRPOAdvantage()([0.0, 1.0, None, 3.0], num_generations=2, scale="none").tolist()
        [-0.5, 0.5, 0.0, 0.0]
    """

    function = staticmethod(grpo_advantage)


def _grpo(samples: Samples, scale: str, epsilon: Array) -> Array:
    return samples.scaled(samples.deviations(), scale, epsilon)  # r - mean(r), scaled


def _rewards(samples: Samples, scale: str, epsilon: Array) -> Array:
    """Return the rewards: a single sample has no group to be compared with."""
    del scale, epsilon
    return samples.values
