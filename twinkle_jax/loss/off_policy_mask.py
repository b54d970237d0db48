"""The mask of DeepSeek-V3.2: no lesson from failures that the policy would hardly produce."""

import jax
import jax.numpy as jnp

from twinkle_jax.loss.masked_inputs import (
    Advantages,
    Mask,
    PerToken,
    Scalar,
    masked_advantages,
    masked_inputs,
)


def off_policy_sequence_mask(
    logprobs: PerToken,
    sampler_logprobs: PerToken,
    advantages: Advantages,
    mask: Mask,
    *,
    delta: Scalar,
) -> Mask:
    r"""Drop sequences with a negative advantage that have become unlikely.

    $$\text{dropped:}\quad A < 0 \ \text{ and }\
    \frac{1}{T} \sum_{t=1}^{T} \log \frac{\mu_t}{\pi_t} > \delta$$

    The divergence holds both what updates since the rollout have changed and how the sampler's
    probabilities differ from the trainer's. Apply it to the losses per token, and reduce with the
    whole `mask`: a dropped token adds 0 and still counts.

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
