"""ReMax: a reward minus that of the greedy completion of the same prompt."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage.grouping.grouped import in_rows
from twinkle_jax.advantage.grouping.moments import NOISE_ULPS, ulps
from twinkle_jax.advantage.grouping.runner import estimate
from twinkle_jax.advantage.grouping.samples import Samples
from twinkle_jax.advantage.inputs.arrays import ArrayLike
from twinkle_jax.advantage.per_completion.estimator import FunctionAdvantage


def remax_advantage(
    rewards: ArrayLike,
    greedy_rewards: ArrayLike,
    num_generations: int = 1,
    *,
    where: ArrayLike | None = None,
    reward_weights: ArrayLike | None = None,
) -> Float[jax.Array, " samples"]:
    r"""Subtract the reward of the prompt's greedy completion (ReMax).

    $$A_i = r_i - r^{greedy}_{p(i)}$$

    One more completion a prompt, decoded greedily, pays for a baseline that needs neither a group
    nor a critic. A difference of at most 4 units in the last place is exactly 0. For groups of
    different sizes leave K at 1 and pass `greedy_rewards[segment_ids]`.

    Args:
        rewards: `[N]` or `[N, C]`, as in `grpo_advantage`.
        greedy_rewards: `[P]`, or `[P, C]`, one for each prompt; P = N / K.
        num_generations: K, samples per prompt, at least 1; static.
        where: as in `grpo_advantage`.
        reward_weights: as in `grpo_advantage`.

    Returns:
        Advantages, `[N]`, sharded as the rewards are.

    Raises:
        ValueError: as `grpo_advantage`; also for greedy rewards of another shape.
        TypeError: as `grpo_advantage`.

    References:
        ReMax, https://arxiv.org/abs/2310.10505

    Example:
        >>> from twinkle_jax.advantage import remax_advantage
        >>> remax_advantage([1.0, 0.0, 2.0, 4.0], [0.5, 3.0], num_generations=2).tolist()
        [0.5, -0.5, -1.0, 1.0]
    """
    grouped = in_rows(
        rewards,
        num_generations,
        where=where,
        reward_weights=reward_weights,
        least=1,
        greedy_rewards=greedy_rewards,
    )
    return estimate(grouped, formula=_remax)


@dataclasses.dataclass(frozen=True)
class ReMaxAdvantage(FunctionAdvantage, name="remax"):
    """`remax_advantage` with Twinkle's signature; needs `greedy_rewards=`, `[P]`.

    Example:
        >>> from twinkle_jax.advantage import ReMaxAdvantage
        >>> ReMaxAdvantage()([1.0, 0.0, None, 4.0], 2, greedy_rewards=[0.5, 3.0]).tolist()
        [0.5, -0.5, 0.0, 1.0]
    """

    function = staticmethod(remax_advantage)


def _remax(samples: Samples, greedy_rewards: Array) -> Array:
    baseline = samples.groups.to_samples(greedy_rewards)
    magnitude = jnp.maximum(jnp.abs(samples.values), jnp.abs(baseline))
    difference = samples.values - baseline
    equal = jnp.isfinite(difference) & (jnp.abs(difference) <= ulps(NOISE_ULPS, magnitude))
    return jnp.where(equal, 0, difference)
