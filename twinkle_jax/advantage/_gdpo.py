"""GDPO: every reward component is normalised in its group before they are added up."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage._coefficients import check_coefficient
from twinkle_jax.advantage._core import compute_dtype
from twinkle_jax.advantage._grouping import Grouping, whole_batch
from twinkle_jax.advantage._moments import moments
from twinkle_jax.advantage._rewards import check_rewards, check_segment_ids
from twinkle_jax.advantage._rule import Layout, Samples, check_group_size, grouped
from twinkle_jax.advantage._settings import check_axis_name, check_groups, check_size
from twinkle_jax.advantage._sharding import auto_sharded, one_per_sample

# Normalised rewards carry a few roundings each; a sum below that much of its terms is rounding.
_NOISE_ROUNDINGS = 16


def gdpo_advantage(
    rewards: Any,
    num_generations: int,
    *,
    where: Any = None,
    reward_weights: Any = None,
    epsilon: Any = 1e-8,
    axis_name: Any = None,
) -> Float[jax.Array, " samples"]:
    r"""Normalise several rewards separately, then add them (group-decoupled normalisation).

    $$z_{ic} = \frac{r_{ic} - \mu_c}{\sigma_c + \epsilon}, \qquad
      A_i = \frac{\sum_c w_c z_{ic}}{\sigma_B + \epsilon}$$

    with $\mu_c$, $\sigma_c$ the mean and standard deviation of component $c$ in the group, and
    $\sigma_B$ that of the sums over the batch (both with Bessel's correction). Summed first, as
    `grpo_advantage` does, different combinations of rewards with the same sum become one. (The
    mean of the sums over the batch, which the paper subtracts, is 0, because that of every group
    is.)

    A component without signal in its group adds nothing; a group without any is exactly 0.

    Args:
        rewards: `[N, C]` (or `[N]` for one component), as in `grpo_advantage`.
        num_generations: K, at least 2; static.
        where: as in `grpo_advantage`; component by component if it is `[N, C]`.
        reward_weights: $w$, `[C]`, ones by default: applied after normalising.
        epsilon: added to both standard deviations; may be traced.
        axis_name: as in `grpo_advantage`, for $\sigma_B$.

    Returns:
        Advantages, `[N]`, sharded as the rewards are.

    Raises:
        ValueError: as `rloo_advantage`.
        TypeError: as `rloo_advantage`.

    References:
        https://arxiv.org/abs/2601.05242

    Example:
        >>> from twinkle_jax.advantage import gdpo_advantage
        >>> rewards = [[0.0, 5.0], [0.0, 5.0], [1.0, 5.0], [1.0, 5.0], [7.0, 5.0], [7.0, 5.0]]
        >>> gdpo_advantage(rewards, num_generations=6).shape, gdpo_advantage(rewards, 2).tolist()
        ((6,), [0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    """
    size = check_group_size(num_generations)
    values, mask, weights = check_rewards(rewards, where, reward_weights)
    check_groups(values.shape[0], size)
    layout = Layout(num_generations=size, axis_name=check_axis_name(axis_name))
    epsilon = check_coefficient("epsilon", epsilon, values)
    return _advantages(values, mask, weights, None, epsilon, layout=layout)


def segment_gdpo_advantage(
    rewards: Any,
    segment_ids: Any,
    num_segments: int,
    *,
    where: Any = None,
    reward_weights: Any = None,
    epsilon: Any = 1e-8,
    axis_name: Any = None,
) -> Float[jax.Array, " samples"]:
    """Compute GDPO advantages over the groups that `segment_ids` name.

    Args:
        rewards: as in `gdpo_advantage`, in any order.
        segment_ids: as in `segment_grpo_advantage`.
        num_segments: as in `segment_grpo_advantage`.
        where: as in `gdpo_advantage`.
        reward_weights: as in `gdpo_advantage`.
        epsilon: as in `gdpo_advantage`.
        axis_name: as in `segment_grpo_advantage`.

    Returns:
        Advantages, `[N]`; a segment with a single sample is 0.

    Raises:
        ValueError: as `segment_grpo_advantage`.
        TypeError: as `segment_grpo_advantage`.

    Example:
        >>> from twinkle_jax.advantage import segment_gdpo_advantage
        >>> segment_gdpo_advantage([[3.0, 1.0], [3.0, 1.0], [9.0, 0.0]], [0, 0, 1], 2).tolist()
        [0.0, 0.0, 0.0]
    """
    size = check_size("num_segments", num_segments)
    values, mask, weights = check_rewards(rewards, where, reward_weights)
    ids = check_segment_ids(segment_ids, values.shape[0], size)
    layout = Layout(num_segments=size, axis_name=check_axis_name(axis_name))
    epsilon = check_coefficient("epsilon", epsilon, values)
    return _advantages(values, mask, weights, ids, epsilon, layout=layout)


@functools.partial(jax.jit, static_argnames="layout")
@auto_sharded(one_per_sample)
def _advantages(
    rewards: Array,
    where: Array | None,
    reward_weights: Array | None,
    segment_ids: Array | None,
    epsilon: Array,
    *,
    layout: Layout,
) -> Array:
    dtype = compute_dtype(rewards.dtype)
    values = jax.lax.stop_gradient(rewards).astype(dtype)
    epsilon = jax.lax.stop_gradient(jnp.asarray(epsilon)).astype(dtype)
    num_samples = values.shape[0]
    if values.ndim == 1:
        values = values[:, None]
    weights = jnp.ones(values.shape[1], dtype)
    if reward_weights is not None:
        weights = jax.lax.stop_gradient(reward_weights).astype(dtype)
    cells = jnp.ones(values.shape, bool)
    if where is not None:
        cells = jnp.broadcast_to(where.reshape(num_samples, -1), values.shape)
    inside, groups = grouped(num_samples, None, segment_ids, layout)
    if inside is not None:
        cells = cells & inside[:, None]

    normalise = functools.partial(_normalised, groups=groups, epsilon=epsilon)
    terms = jax.vmap(normalise, in_axes=1, out_axes=1)(jnp.where(cells, values, 0), cells)
    terms = terms * weights[None, :]
    sums = jnp.sum(terms, axis=1)
    largest_sum = groups.largest(groups.split(jnp.abs(sums)))
    largest_terms = groups.largest(groups.split(jnp.sum(jnp.abs(terms), axis=1)))
    noise = largest_sum <= _NOISE_ROUNDINGS * jnp.finfo(dtype).eps * largest_terms
    sums = jnp.where(groups.back(noise), 0, sums)

    kept = jnp.any(cells, axis=1)
    everyone = moments(sums, kept, whole_batch(num_samples, layout.axis_name))
    return jnp.where(kept & everyone.has_signal, sums / (everyone.std + epsilon), 0)


def _normalised(values: Array, keep: Array, *, groups: Grouping, epsilon: Array) -> Array:
    """Standard scores of one component in its groups; 0 where left out or without signal."""
    samples = Samples(values, keep, groups, groups)
    own = moments(values, keep, groups)
    divisor = groups.back(jnp.where(own.has_signal, own.std + epsilon, 1))
    return samples.masked(samples.settled(own, samples.deviations(own) / divisor))
