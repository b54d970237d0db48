"""What to log about a policy step. Nothing here has a gradient, and nothing depends on it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from twinkle_jax.loss.masked_inputs import (
    Advantages,
    Mask,
    PerToken,
    Scalar,
    checked_mask,
    masked_advantages,
    masked_inputs,
)
from twinkle_jax.loss.ratio import bounded, clip_bounds
from twinkle_jax.loss.reduction import token_mean


class PolicyMetrics(NamedTuple):
    """Facts about one policy step, over the tokens kept."""

    clip_fraction_low: Float[Array, ""]
    """Share of tokens whose ratio fell below the clip range and lost their gradient."""
    clip_fraction_high: Float[Array, ""]
    """Share of tokens whose ratio rose above the clip range and lost their gradient."""
    approximate_kl: Float[Array, ""]
    """Estimate (k3) of the divergence of the trained policy from the behaviour policy, in nats."""
    entropy: Float[Array, ""] | None
    """Mean entropy of the policy, in nats; None where entropies are not given."""
    ratio_min: Float[Array, ""]
    """Smallest importance ratio; 1 if no token is kept."""
    ratio_max: Float[Array, ""]
    """Largest importance ratio; 1 if no token is kept."""


def policy_metrics(
    log_ratio: PerToken,
    advantages: Advantages | None,
    mask: Mask,
    *,
    epsilon: Scalar = 0.2,
    epsilon_high: Scalar | None = None,
    entropies: PerToken | None = None,
    denominator: Scalar | None = None,
) -> PolicyMetrics:
    r"""Summarise a policy step for the log.

    $$\text{low} = \overline{[r_t < 1-\epsilon,\ A_t < 0]}, \quad
    \text{high} = \overline{[r_t > 1+\epsilon_{high},\ A_t > 0]}, \quad
    \text{KL} = \overline{r_t - 1 - \log r_t}$$

    with a bar for the mean over the tokens kept. The means of micro-batches add up when the
    `denominator` of the whole batch is passed.

    Args:
        log_ratio: $\log r_t$ from `token_log_ratio` or `sequence_log_ratio`.
        advantages: $A$, one a sequence or one a token; None to count clips of either sign.
        mask: True where the policy chose the token. Padding may hold anything.
        epsilon: how far the ratio may fall below 1.
        epsilon_high: how far it may rise above 1; `epsilon` if None.
        entropies: entropy of the policy at each token, in nats.
        denominator: the tokens kept in the whole batch; those in `mask` if None.

    Returns:
        The metrics, without gradient; fractions, divergence and entropy are 0 if nothing is kept.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if an array is not floating point, or the mask not boolean.

    References:
        [Proximal Policy Optimization](https://arxiv.org/abs/1707.06347) (Schulman et al., 2017);
        [Approximating KL Divergence](http://joschu.net/blog/kl-approx.html) (Schulman, 2020)

    Example:
        >>> log_ratio, mask = jnp.log(jnp.array([2.0, 0.5])), jnp.array([True, True])
        >>> metrics = policy_metrics(log_ratio, jnp.array(1.0), mask)
        >>> print(metrics.clip_fraction_low, metrics.clip_fraction_high, metrics.ratio_max)
        0.0 0.5 2.0
    """
    mask = checked_mask(mask)
    (log_ratio,) = masked_inputs(mask, log_ratio=log_ratio)
    log_ratio = jax.lax.stop_gradient(bounded(log_ratio))
    ratio = jnp.exp(log_ratio)
    low, high = clip_bounds(epsilon, epsilon_high, ratio.dtype)
    below, above = ratio < low, ratio > high
    if advantages is not None:
        advantages = masked_advantages(advantages, mask, ratio.dtype)
        below, above = below & (advantages < 0), above & (advantages > 0)

    if entropies is not None:
        (entropies,) = masked_inputs(mask, entropies=entropies)

    def mean(values: PerToken) -> Float[Array, ""]:
        return token_mean(values.astype(ratio.dtype), mask, denominator=denominator)

    nothing = ~jnp.any(mask)
    return PolicyMetrics(
        clip_fraction_low=mean(below),
        clip_fraction_high=mean(above),
        approximate_kl=mean(ratio - 1 - log_ratio),
        entropy=None if entropies is None else jax.lax.stop_gradient(mean(entropies)),
        ratio_min=jnp.where(nothing, 1, jnp.min(ratio, where=mask, initial=jnp.inf)),
        ratio_max=jnp.where(nothing, 1, jnp.max(ratio, where=mask, initial=-jnp.inf)),
    )
