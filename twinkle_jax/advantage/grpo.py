"""GRPO and its variants (MaxRL, DGPO, MC-GRPO): a reward minus the mean or median of its group."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage.estimate import estimate, in_rows, in_segments
from twinkle_jax.advantage.estimators import FunctionAdvantage
from twinkle_jax.advantage.groups import NOISE_ULPS, Samples, ulps
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
            get 0; a group with fewer than two samples left is 0. A component that is left out adds
            nothing to the reward of its sample.
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


def mc_grpo_advantage(
    rewards: ArrayLike,
    num_generations: int,
    *,
    where: ArrayLike | None = None,
    reward_weights: ArrayLike | None = None,
    epsilon: Scalar = 1e-3,
) -> Float[jax.Array, " samples"]:
    r"""Compare every reward with the median of its group (median-centred GRPO).

    $$A_i = \frac{r_i - m}{s + \epsilon}, \qquad
      m = \mathrm{median}_j(r_j), \qquad s = \mathrm{median}_j(|r_j - m|)$$

    For few samples a prompt: an outlier shifts the mean and changes the signs of other advantages,
    but hardly moves the median. Draw an odd number of samples, one more than you train on: the
    median is one of them, has an advantage of exactly 0, and can be dropped. Of an even number the
    lower of the two middle samples is the median.

    Where more than half of the rewards equal the median, as they always do for rewards of 0 and 1,
    the median deviation is 0, and division by $\epsilon$ alone would give advantages of 1000;
    $s$ then is the mean absolute deviation from the median. (The published code divides.)

    Args:
        rewards: `[N]` or `[N, C]`, as in `grpo_advantage`.
        num_generations: K, at least 2, preferably odd; static.
        where: as in `grpo_advantage`.
        reward_weights: as in `grpo_advantage`.
        epsilon: added to the deviation; may be traced.

    Returns:
        Advantages, `[N]`, sharded as the rewards are; a group without signal is exactly 0.

    Raises:
        ValueError: as `rloo_advantage`.
        TypeError: as `rloo_advantage`.

    References:
        MC-GRPO, https://arxiv.org/abs/2601.22582

    Example:
        >>> from twinkle_jax.advantage import mc_grpo_advantage
        >>> rewards = [0.0, 2.0, 3.0, 4.0, 99.0]  # median 3, deviations 3 1 0 1 96, their median 1
        >>> mc_grpo_advantage(rewards, num_generations=5, epsilon=0.0).tolist()
        [-3.0, -1.0, 0.0, 1.0, 96.0]
    """
    grouped = in_rows(rewards, num_generations, where, reward_weights, epsilon=epsilon)
    return estimate(grouped, formula=_mc_grpo)


@dataclasses.dataclass(frozen=True)
class MCGRPOAdvantage(FunctionAdvantage, name="mc_grpo"):
    """`mc_grpo_advantage` with Twinkle's signature; takes `epsilon=`.

    Example:
        >>> from twinkle_jax.advantage import MCGRPOAdvantage
        >>> MCGRPOAdvantage()([0.0, 2.0, 6.0], num_generations=3, epsilon=0.0).tolist()
        [-1.0, 0.0, 2.0]
    """

    function = staticmethod(mc_grpo_advantage)


def _mc_grpo(samples: Samples, epsilon: Array) -> Array:
    values, each = samples.values, samples.each
    deviations = samples.masked(values - each(_median(samples, values)))
    distances = jnp.abs(deviations)
    typical = _median(samples, distances)
    # Where most rewards equal the median, up to rounding: the mean distance instead.
    magnitude = samples.groups.largest(jnp.abs(values))
    degenerate = typical <= ulps(NOISE_ULPS, magnitude)
    typical = jnp.where(degenerate, samples.mean(distances), typical)
    divisor = jnp.where(samples.has_signal, typical + epsilon, 1)
    return samples.zero_without_signal(deviations / each(divisor))


def _median(samples: Samples, values: Array) -> Array:
    """Median of the kept samples of each group, the lower of two, `[P]`; 0 for an empty one."""
    size = samples.groups.size
    assert size is not None
    if samples.where is None:
        return jnp.sort(values.reshape(-1, size), axis=1)[:, (size - 1) // 2]
    # Masked samples sort to the end of their row.
    rising = jnp.sort(samples.masked(values, jnp.inf).reshape(-1, size), axis=1)
    count = jnp.sum(samples.where.reshape(-1, size), axis=1)
    middle = jnp.take_along_axis(rising, jnp.maximum(count - 1, 0)[:, None] // 2, axis=1)[:, 0]
    return jnp.where(count > 0, middle, 0)
