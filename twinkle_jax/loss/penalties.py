r"""KL penalties towards a reference policy, and the entropy bonus.

The estimators k1, k2 and k3 of $D_{KL}(\pi \,\|\, \pi_{ref})$ take tokens drawn from $\pi$, and are
added to the losses per token with a coefficient. Their gradients estimate different things.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from twinkle_jax.loss.per_token import Coefficient, Mask, PerToken, masked_inputs
from twinkle_jax.loss.surrogate import bounded


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
        logprobs: as in `kl_k1`.
        reference_logprobs: as in `kl_k1`.
        mask: as in `kl_k1`.

    Returns:
        Estimate per token in nats, zero where masked out.

    Raises:
        ValueError: as `kl_k1`.
        TypeError: as `kl_k1`.

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
        logprobs: as in `kl_k1`.
        reference_logprobs: as in `kl_k1`.
        mask: as in `kl_k1`.

    Returns:
        Estimate per token in nats, zero where masked out.

    Raises:
        ValueError: as `kl_k1`.
        TypeError: as `kl_k1`.

    References:
        [Approximating KL Divergence](http://joschu.net/blog/kl-approx.html) (Schulman, 2020);
        [DeepSeekMath](https://arxiv.org/abs/2402.03300) (Shao et al., 2024), GRPO, equation 4

    Example:
        >>> kl_k3(jnp.log(jnp.array([0.5])), jnp.log(jnp.array([0.5])), jnp.array([True]))
        Array([0.], dtype=float32)
    """
    log_ratio = bounded(_log_ratio(logprobs, reference_logprobs, mask))
    # exp(x) - 1 would lose the small divergences of most steps in rounding.
    return jnp.expm1(-log_ratio) + log_ratio


def _log_ratio(logprobs: PerToken, reference_logprobs: PerToken, mask: Mask) -> PerToken:
    logprobs, reference_logprobs = masked_inputs(
        mask, logprobs=logprobs, reference_logprobs=reference_logprobs
    )
    return logprobs - jax.lax.stop_gradient(reference_logprobs)


def entropy_bonus(entropies: PerToken, mask: Mask, *, coefficient: Coefficient) -> PerToken:
    r"""Reward entropy: a loss to be added to the losses per token.

    $$\ell_t = -c\, H(\pi(\cdot \mid s_t))$$

    Args:
        entropies: $H$, entropy of the policy at each token, in nats; gradients flow through it.
        mask: True where the policy chose the token. Padding may hold anything.
        coefficient: $c$; 0.01 or less is usual.

    Returns:
        Loss per token, zero where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if `entropies` is not floating point, or the mask not boolean.

    References:
        [A3C](https://arxiv.org/abs/1602.01783) (Mnih et al., 2016)

    Example:
        >>> entropy_bonus(jnp.array([2.0, 9.0]), jnp.array([True, False]), coefficient=0.25)
        Array([-0.5,  0. ], dtype=float32)
    """
    (entropies,) = masked_inputs(mask, entropies=entropies)
    return jnp.where(mask, -jnp.asarray(coefficient, entropies.dtype) * entropies, 0)


def top_entropy_mask(entropies: PerToken, mask: Mask, *, fraction: Coefficient = 0.2) -> Mask:
    r"""Keep the tokens at which the policy has the highest entropy.

    $$\text{kept:}\quad H_t \ge \tau, \qquad
    \tau \text{ the } (1 - \rho)\text{-quantile of the entropies in the mask}$$

    Of $n$ tokens these are the $1 + \lfloor \rho (n - 1) \rfloor$ with the highest entropy, and
    ties with the last of them. The quantile is over all of `mask`, so call it on the batch, not on
    a micro-batch. Apply the result to the losses per token, and reduce with the original `mask`: a
    dropped token adds 0 and still counts.

    Args:
        entropies: $H$, entropy of the policy at each token, in nats.
        mask: True where the policy chose the token. Padding may hold anything.
        fraction: $\rho$, the share of tokens to keep, in [0, 1].

    Returns:
        True where the token counts; False where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if `entropies` is not floating point, or the mask not boolean.

    References:
        [Beyond the 80/20 Rule](https://arxiv.org/abs/2506.01939) (Wang et al., 2025)

    Example:
        >>> entropies = jnp.array([0.5, 3.0, 1.0, 2.0, 9.0])
        >>> top_entropy_mask(entropies, jnp.arange(5) < 4, fraction=0.5)
        Array([False,  True, False,  True, False], dtype=bool)
    """
    (entropies,) = masked_inputs(mask, entropies=entropies)
    if entropies.size == 0:
        return mask
    ascending = jnp.sort(_on_all_devices(jnp.where(mask, entropies, jnp.inf)), axis=None)
    count = jnp.sum(mask)
    # Tokens besides the highest one; the first entry of `ascending` to keep follows from it.
    others = jnp.floor(jnp.asarray(fraction, entropies.dtype) * (count - 1).astype(entropies.dtype))
    threshold = ascending[jnp.clip(count - 1 - others.astype(count.dtype), 0, entropies.size - 1)]
    return mask & (entropies >= threshold)


def _on_all_devices(values: PerToken) -> PerToken:
    """Gather what is spread over explicit axes of a mesh, along which JAX refuses to sort."""
    sharding = jax.typeof(values).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return values
    gathered: PerToken = jax.sharding.reshard(values, NamedSharding(sharding.mesh, PartitionSpec()))
    return gathered
