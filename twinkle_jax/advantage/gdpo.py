"""GDPO: every reward component is normalised in its group before they are added up."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage.estimate import estimate, in_rows, in_segments
from twinkle_jax.advantage.estimators import FunctionAdvantage
from twinkle_jax.advantage.groups import Samples
from twinkle_jax.advantage.inputs import ArrayLike, AxisName, Scalar

# Each normalised reward carries a few roundings; a sum this small beside its terms is rounding.
_NOISE_ROUNDINGS = 16


def gdpo_advantage(
    rewards: ArrayLike,
    num_generations: int,
    *,
    where: ArrayLike | None = None,
    reward_weights: ArrayLike | None = None,
    epsilon: Scalar = 1e-8,
    axis_name: AxisName | None = None,
) -> Float[jax.Array, " samples"]:
    r"""Normalise several rewards separately, then add them (group-decoupled normalisation).

    $$z_{ic} = \frac{r_{ic} - \mu_c}{\sigma_c + \epsilon}, \qquad
      A_i = \frac{\sum_c w_c z_{ic}}{\sigma_B + \epsilon}$$

    with $\mu_c$, $\sigma_c$ the mean and standard deviation of component $c$ in the group, and
    $\sigma_B$ that of the sums over the batch (both with Bessel's correction). Summed first, as
    `grpo_advantage` does, different combinations of rewards with the same sum become one. (The
    paper also subtracts the mean of the sums over the batch, which is 0 since it is 0 in every
    group.)

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
        GDPO, https://arxiv.org/abs/2601.05242

    Example:
        >>> from twinkle_jax.advantage import gdpo_advantage
        >>> rewards = [[0.0, 5.0], [0.0, 5.0], [1.0, 5.0], [1.0, 5.0], [7.0, 5.0], [7.0, 5.0]]
        >>> gdpo_advantage(rewards, num_generations=6).shape, gdpo_advantage(rewards, 2).tolist()
        ((6,), [0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    """
    grouped = in_rows(rewards, num_generations, where, reward_weights, axis_name, epsilon=epsilon)
    return estimate(grouped, formula=_gdpo, components_apart=True)


def segment_gdpo_advantage(
    rewards: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int,
    *,
    where: ArrayLike | None = None,
    reward_weights: ArrayLike | None = None,
    epsilon: Scalar = 1e-8,
    axis_name: AxisName | None = None,
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

    References:
        GDPO, https://arxiv.org/abs/2601.05242

    Example:
        >>> from twinkle_jax.advantage import segment_gdpo_advantage
        >>> segment_gdpo_advantage([[3.0, 1.0], [3.0, 1.0], [9.0, 0.0]], [0, 0, 1], 2).tolist()
        [0.0, 0.0, 0.0]
    """
    grouped = in_segments(
        rewards, segment_ids, num_segments, where, reward_weights, axis_name, epsilon=epsilon
    )
    return estimate(grouped, formula=_gdpo, components_apart=True)


@dataclasses.dataclass(frozen=True)
class GDPOAdvantage(FunctionAdvantage, name="gdpo"):
    """`gdpo_advantage` with Twinkle's signature; takes `epsilon=` and `axis_name=`.

    Example:
        >>> from twinkle_jax.advantage import GDPOAdvantage
        >>> GDPOAdvantage()([[0.0, 1.0], [0.0, 1.0]], num_generations=2).tolist()
        [0.0, 0.0]
    """

    function = staticmethod(gdpo_advantage)


def _gdpo(samples: Samples, epsilon: Array, reward_weights: Array | None = None) -> Array:
    groups, cells = samples.groups, samples.where
    assert cells is not None

    def standard_scores(values: Array, where: Array) -> Array:
        component = Samples(values, where, groups, samples.batch)
        divisor = jnp.where(component.has_signal, component.std + epsilon, 1)
        scores = component.deviations() / component.each(divisor)
        return component.masked(component.zero_without_signal(scores))

    terms = jax.vmap(standard_scores, in_axes=1, out_axes=1)(samples.values, cells)
    if reward_weights is not None:
        terms = terms * reward_weights[None, :]
    sums = jnp.sum(terms, axis=1)
    # Components that cancel leave rounding, which is no signal.
    largest_sum = groups.largest(jnp.abs(sums))
    largest_terms = groups.largest(jnp.sum(jnp.abs(terms), axis=1))
    noise = largest_sum <= _NOISE_ROUNDINGS * jnp.finfo(sums.dtype).eps * largest_terms
    sums = jnp.where(groups.each(noise), 0, sums)
    batch = Samples(sums, jnp.any(cells, axis=1), samples.batch, samples.batch)
    return jnp.where(batch.has_signal, sums / (batch.std + epsilon), 0)
