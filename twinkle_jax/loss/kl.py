r"""Estimates of the divergence from a reference policy, from sampled tokens.

All three estimate $D_{KL}(\pi \,\|\, \pi_{ref})$ for tokens drawn from $\pi$, and are added to the
losses per token with a coefficient. Their gradients estimate different things.
"""

import jax
import jax.numpy as jnp

from twinkle_jax.loss.masked_inputs import Mask, PerToken, masked_inputs
from twinkle_jax.loss.ratio import bounded


def kl_k1(logprobs: PerToken, reference_logprobs: PerToken, mask: Mask) -> PerToken:
    r"""Estimate by the log-ratio itself: unbiased, may be negative.

    $$k_1 = \Delta, \qquad \Delta = \log \pi - \log \pi_{ref}$$

    On policy its gradient has mean zero, so it is useless as a loss; use it in the reward.

    Args:
        logprobs: $\log \pi$, under the policy being trained, in nats.
        reference_logprobs: $\log \pi_{ref}$, under a frozen policy, in nats; no gradient.
        mask: True where the policy chose the token. Padding may hold anything.

    Returns:
        Estimate per token in nats, zero where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-probability is not floating point, or the mask not boolean.

    References:
        [Approximating KL Divergence](http://joschu.net/blog/kl-approx.html) (Schulman, 2020)

    Example:
        >>> kl_k1(jnp.array([-1.0, -2.0]), jnp.array([-1.5, -1.0]), jnp.array([True, True]))
        Array([ 0.5, -1. ], dtype=float32)
    """
    return _log_ratio(logprobs, reference_logprobs, mask)


def kl_k2(logprobs: PerToken, reference_logprobs: PerToken, mask: Mask) -> PerToken:
    r"""Estimate by half the squared log-ratio: small bias, never negative.

    $$k_2 = \tfrac{1}{2} \Delta^2, \qquad \Delta = \log \pi - \log \pi_{ref}$$

    On policy its gradient is an unbiased estimate of the divergence's gradient.

    Args:
        logprobs: $\log \pi$, under the policy being trained, in nats.
        reference_logprobs: $\log \pi_{ref}$, under a frozen policy, in nats; no gradient.
        mask: True where the policy chose the token. Padding may hold anything.

    Returns:
        Estimate per token in nats, zero where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-probability is not floating point, or the mask not boolean.

    References:
        [Approximating KL Divergence](http://joschu.net/blog/kl-approx.html) (Schulman, 2020)

    Example:
        >>> kl_k2(jnp.array([-1.0, -2.0]), jnp.array([-1.5, -1.0]), jnp.array([True, True]))
        Array([0.125, 0.5  ], dtype=float32)
    """
    return jnp.square(_log_ratio(logprobs, reference_logprobs, mask)) / 2


def kl_k3(logprobs: PerToken, reference_logprobs: PerToken, mask: Mask) -> PerToken:
    r"""Estimate with a control variate: unbiased, never negative (GRPO's choice).

    $$k_3 = e^{-\Delta} + \Delta - 1, \qquad \Delta = \log \pi - \log \pi_{ref},
    \quad |\Delta| \le 20$$

    On policy its gradient is that of the reversed divergence, $D_{KL}(\pi_{ref} \,\|\, \pi)$.
    A token whose $\Delta$ lies beyond ±20 receives no gradient.

    Args:
        logprobs: $\log \pi$, under the policy being trained, in nats.
        reference_logprobs: $\log \pi_{ref}$, under a frozen policy, in nats; no gradient.
        mask: True where the policy chose the token. Padding may hold anything.

    Returns:
        Estimate per token in nats, zero where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-probability is not floating point, or the mask not boolean.

    References:
        [Approximating KL Divergence](http://joschu.net/blog/kl-approx.html) (Schulman, 2020);
        [DeepSeekMath](https://arxiv.org/abs/2402.03300) (Shao et al., 2024), GRPO, equation 4

    Example:
        >>> kl_k3(jnp.log(jnp.array([0.5])), jnp.log(jnp.array([0.5])), jnp.array([True]))
        Array([0.], dtype=float32)
    """
    log_ratio = bounded(_log_ratio(logprobs, reference_logprobs, mask))
    return jnp.exp(-log_ratio) + log_ratio - 1


def _log_ratio(logprobs: PerToken, reference_logprobs: PerToken, mask: Mask) -> PerToken:
    logprobs, reference_logprobs = masked_inputs(
        mask, logprobs=logprobs, reference_logprobs=reference_logprobs
    )
    return logprobs - jax.lax.stop_gradient(reference_logprobs)
