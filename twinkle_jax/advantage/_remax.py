"""ReMax: a reward minus that of the greedy completion of the same prompt."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage._core import combine_components
from twinkle_jax.advantage._grouping import rows
from twinkle_jax.advantage._moments import NOISE_UNITS, last_places
from twinkle_jax.advantage._rewards import check_rewards
from twinkle_jax.advantage._sample_data import check_greedy_rewards
from twinkle_jax.advantage._settings import check_groups, check_size
from twinkle_jax.advantage._sharding import auto_sharded, one_per_sample


def remax_advantage(
    rewards: Any,
    greedy_rewards: Any,
    num_generations: int = 1,
    *,
    where: Any = None,
    reward_weights: Any = None,
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
        https://arxiv.org/abs/2310.10505

    Example:
        >>> from twinkle_jax.advantage import remax_advantage
        >>> remax_advantage([1.0, 0.0, 2.0, 4.0], [0.5, 3.0], num_generations=2).tolist()
        [0.5, -0.5, -1.0, 1.0]
    """
    size = check_size("num_generations", num_generations)
    values, mask, weights = check_rewards(rewards, where, reward_weights)
    check_groups(values.shape[0], size)
    greedy = check_greedy_rewards(greedy_rewards, values, size, mask)
    return _advantages(values, mask, weights, greedy, num_generations=size)


@functools.partial(jax.jit, static_argnames="num_generations")
@auto_sharded(one_per_sample)
def _advantages(
    rewards: Array,
    where: Array | None,
    reward_weights: Array | None,
    greedy_rewards: Array,
    *,
    num_generations: int,
) -> Array:
    values, keep = combine_components(rewards, where, reward_weights)
    greedy, _ = combine_components(greedy_rewards, None, reward_weights)
    groups = rows(greedy.shape[0], num_generations)
    baseline = groups.back(greedy.astype(values.dtype))
    magnitude = jnp.maximum(jnp.abs(values), jnp.abs(baseline))
    difference = values - baseline
    equal = jnp.isfinite(difference) & (jnp.abs(difference) <= last_places(NOISE_UNITS, magnitude))
    difference = jnp.where(equal, 0, difference)
    return difference if keep is None else jnp.where(keep, difference, 0)
