"""MC-GRPO: a reward minus the median of its group, over the median absolute deviation."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage.estimate import estimate, in_rows
from twinkle_jax.advantage.estimators import FunctionAdvantage
from twinkle_jax.advantage.groups import NOISE_ULPS, Samples, ulps
from twinkle_jax.advantage.inputs import ArrayLike, Scalar


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
