"""Masks that leave out tokens or sequences that have moved too far from the behaviour policy."""

import jax
import jax.numpy as jnp

from twinkle_jax.loss.masked_inputs import (
    Advantages,
    Coefficient,
    Mask,
    PerToken,
    masked_advantages,
    masked_inputs,
)

SMALLEST_COMPLEMENT = 1e-8  # 1 - probability, so that its logarithm is finite


def total_variation_mask(
    logprobs: PerToken,
    behaviour_logprobs: PerToken,
    advantages: Advantages,
    mask: Mask,
    *,
    delta: Coefficient = 0.15,
    delta_high: Coefficient | None = None,
) -> Mask:
    r"""Keep tokens whose probability has not moved too far in the direction of the advantage.

    $$\text{dropped:}\quad \pi_t - \mu_t > \delta_{high} \text{ if } A_t > 0, \qquad
    \mu_t - \pi_t > \delta \text{ otherwise}$$

    $|\pi_t - \mu_t|$ is the total variation of the two policies if all other tokens are taken as
    one. Unlike a clipped ratio, it lets rare tokens move and restrains frequent ones. Apply the
    result to the unclipped surrogate, and reduce with the original `mask`: a dropped token adds 0
    and still counts.

    Args:
        logprobs: $\log \pi$, under the policy being trained, in nats.
        behaviour_logprobs: $\log \mu$, under the policy that drew the tokens.
        advantages: $A$, one a sequence or one a token.
        mask: True where the policy chose the token. Padding may hold anything.
        delta: how far a probability may fall.
        delta_high: how far it may rise; `delta` if None.

    Returns:
        True where the token counts; False where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-probability is not floating point, or the mask not boolean.

    References:
        [Rethinking the Trust Region in LLM Reinforcement
        Learning](https://arxiv.org/abs/2602.04879) (Qi et al., 2026), DPPO

    Example:
        >>> new, old = jnp.log(jnp.array([0.75, 0.75])), jnp.log(jnp.array([0.5, 0.5]))
        >>> total_variation_mask(new, old, jnp.array([1.0, -1.0]), jnp.array([True, True]))
        Array([False,  True], dtype=bool)
    """
    new, old, rising = _inputs(logprobs, behaviour_logprobs, advantages, mask)
    rise = jnp.exp(new) - jnp.exp(old)
    return _kept(rise, jnp.abs(rise), rising, mask, delta, delta_high)


def binary_kl_mask(
    logprobs: PerToken,
    behaviour_logprobs: PerToken,
    advantages: Advantages,
    mask: Mask,
    *,
    delta: Coefficient = 0.05,
    delta_high: Coefficient | None = None,
) -> Mask:
    r"""Keep tokens whose divergence is small, or that moved against the advantage.

    $$\text{dropped:}\quad D_t > \delta_{high},\ \pi_t > \mu_t \text{ if } A_t > 0, \qquad
    D_t > \delta,\ \pi_t < \mu_t \text{ otherwise}$$
    $$D_t = \mu_t \log \frac{\mu_t}{\pi_t} + (1-\mu_t) \log \frac{1-\mu_t}{1-\pi_t}$$

    $D_t$ is the divergence of the two policies if all other tokens are taken as one. Use it like
    `total_variation_mask`.

    Args:
        logprobs: $\log \pi$, under the policy being trained, in nats.
        behaviour_logprobs: $\log \mu$, under the policy that drew the tokens.
        advantages: $A$, one a sequence or one a token.
        mask: True where the policy chose the token. Padding may hold anything.
        delta: the largest divergence of a token whose probability fell, in nats.
        delta_high: the largest one of a token whose probability rose; `delta` if None.

    Returns:
        True where the token counts; False where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-probability is not floating point, or the mask not boolean.

    References:
        [Rethinking the Trust Region in LLM Reinforcement
        Learning](https://arxiv.org/abs/2602.04879) (Qi et al., 2026), DPPO

    Example:
        >>> new, old = jnp.log(jnp.array([0.75, 0.75])), jnp.log(jnp.array([0.5, 0.5]))
        >>> binary_kl_mask(new, old, jnp.array([1.0, -1.0]), jnp.array([True, True]))
        Array([False,  True], dtype=bool)
    """
    new, old, rising = _inputs(logprobs, behaviour_logprobs, advantages, mask)
    others = jnp.log(_complement(old) / _complement(new))
    divergence = jnp.exp(old) * (old - new) + _complement(old) * others
    return _kept(new - old, divergence, rising, mask, delta, delta_high)


def _inputs(
    logprobs: PerToken, behaviour_logprobs: PerToken, advantages: Advantages, mask: Mask
) -> tuple[PerToken, PerToken, Mask]:
    new, old = masked_inputs(mask, logprobs=logprobs, behaviour_logprobs=behaviour_logprobs)
    rising = masked_advantages(advantages, mask, new.dtype) > 0
    return jax.lax.stop_gradient(new), jax.lax.stop_gradient(old), rising


def _complement(logprobs: PerToken) -> PerToken:
    """Return the probability of all other tokens."""
    return jnp.maximum(-jnp.expm1(logprobs), SMALLEST_COMPLEMENT)


def _kept(
    rise: PerToken,
    distance: PerToken,
    rising: Mask,
    mask: Mask,
    delta: Coefficient,
    delta_high: Coefficient | None,
) -> Mask:
    low = jnp.asarray(delta, distance.dtype)
    high = low if delta_high is None else jnp.asarray(delta_high, distance.dtype)
    too_far = jnp.where(rising, (rise > 0) & (distance > high), (rise < 0) & (distance > low))
    return mask & ~too_far


def off_policy_sequence_mask(
    logprobs: PerToken,
    sampler_logprobs: PerToken,
    advantages: Advantages,
    mask: Mask,
    *,
    delta: Coefficient,
) -> Mask:
    r"""Drop off-policy sequences with a negative advantage (DeepSeek-V3.2).

    $$\text{dropped:}\quad A < 0 \ \text{ and }\
    \frac{1}{T} \sum_{t=1}^{T} \log \frac{\mu_t}{\pi_t} > \delta$$

    The divergence covers the updates since the rollout as well as the mismatch of sampler and
    trainer. Apply the result to the losses per token, and reduce with the original `mask`: a
    dropped token adds 0 and still counts.

    Args:
        logprobs: $\log \pi$, under the policy being trained, in nats.
        sampler_logprobs: $\log \mu$, as the sampler reported them, in nats.
        advantages: $A$, one a sequence or one a token (then each token goes by its own).
        mask: True where the policy chose the token. Padding may hold anything.
        delta: the largest divergence of a sequence with a negative advantage, in nats per token.

    Returns:
        True where the token counts; False where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-probability is not floating point, or the mask not boolean.

    References:
        [DeepSeek-V3.2](https://arxiv.org/abs/2512.02556) (DeepSeek-AI, 2025), section 3.1

    Example:
        >>> new, sampler = jnp.full((2, 2), -2.0), jnp.full((2, 2), -1.0)
        >>> mask, advantages = jnp.ones((2, 2), bool), jnp.array([1.0, -1.0])
        >>> off_policy_sequence_mask(new, sampler, advantages, mask, delta=0.5)
        Array([[ True,  True],
               [False, False]], dtype=bool)
    """
    new, sampler = masked_inputs(mask, logprobs=logprobs, sampler_logprobs=sampler_logprobs)
    negative = masked_advantages(advantages, mask, new.dtype) < 0
    length = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True, dtype=new.dtype), 1)
    divergence = jnp.sum(jax.lax.stop_gradient(sampler - new), axis=-1, keepdims=True) / length
    return mask & ~(negative & (divergence > jnp.asarray(delta, new.dtype)))
