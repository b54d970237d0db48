"""ReMax: a reward minus that of the greedy completion of the same prompt."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage.estimate import Grouped, estimate, in_rows
from twinkle_jax.advantage.estimators import FunctionAdvantage
from twinkle_jax.advantage.groups import NOISE_ULPS, Samples, ulps
from twinkle_jax.advantage.inputs import ArrayLike, HostOrDevice, as_numbers, check_shape, refuse


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

    The baseline needs neither a group nor a critic, but one more completion a prompt, decoded
    greedily. A difference of at most 4 units in the last place is exactly 0. For groups of
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
    grouped = in_rows(rewards, num_generations, where, reward_weights, least=1)
    greedy = _check_greedy_rewards(greedy_rewards, grouped)
    return estimate(grouped.with_data(greedy_rewards=greedy), formula=_remax)


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
    baseline = samples.each(greedy_rewards)
    advantages = samples.values - baseline
    magnitude = jnp.maximum(jnp.abs(samples.values), jnp.abs(baseline))
    equal = jnp.isfinite(advantages) & (jnp.abs(advantages) <= ulps(NOISE_ULPS, magnitude))
    return jnp.where(equal, 0, advantages)


def _check_greedy_rewards(greedy_rewards: Any, grouped: Grouped) -> HostOrDevice:
    """Return the greedy reward of each prompt, `[P]`, or `[P, C]` beside rewards `[N, C]`."""
    greedy = as_numbers("greedy_rewards", greedy_rewards)
    shape, size = grouped.rewards.shape, grouped.num_generations
    expected = (shape[0] // (size or 1), *shape[1:])
    why = f", one greedy completion for each prompt, for rewards of shape {shape} and "
    check_shape("greedy_rewards", greedy, expected, f"{why}num_generations={size}")
    if isinstance(greedy, np.ndarray):
        bad = ~np.isfinite(greedy).reshape(len(greedy), -1).all(axis=1)
        refuse("greedy_rewards must be finite", greedy, bad, grouped.where)
    return greedy
