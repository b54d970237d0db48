"""Losses of supervised fine-tuning: cross entropy, and dynamic fine-tuning."""

import jax
import jax.numpy as jnp

from twinkle_jax.loss.masked_inputs import Mask, PerToken, masked_inputs


def cross_entropy(logprobs: PerToken, mask: Mask) -> PerToken:
    r"""Loss of supervised fine-tuning: the negative log-probability.

    $$\ell_t = -\log \pi(a_t \mid s_t)$$

    Args:
        logprobs: $\log \pi$ of the tokens to learn, in nats.
        mask: True where a token is to be learned. Padding may hold anything.

    Returns:
        Loss per token in nats, zero where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if `logprobs` is not floating point, or the mask not boolean.

    References:
        [Training language models to follow instructions](https://arxiv.org/abs/2203.02155)
        (Ouyang et al., 2022), supervised fine-tuning

    Example:
        >>> cross_entropy(jnp.array([-1.0, -2.0]), jnp.array([True, False]))
        Array([1., 0.], dtype=float32)
    """
    (logprobs,) = masked_inputs(mask, logprobs=logprobs)
    return jnp.where(mask, -logprobs, 0)


def dynamic_fine_tuning(logprobs: PerToken, mask: Mask) -> PerToken:
    r"""Loss of dynamic fine-tuning: cross entropy weighted by the probability of the token.

    $$\ell_t = -\mathrm{sg}[\pi(a_t \mid s_t)]\, \log \pi(a_t \mid s_t)$$

    with sg a stopped gradient.

    Args:
        logprobs: $\log \pi$ of the tokens to learn, in nats.
        mask: True where a token is to be learned. Padding may hold anything.

    Returns:
        Loss per token in nats, zero where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if `logprobs` is not floating point, or the mask not boolean.

    References:
        [On the Generalization of SFT](https://arxiv.org/abs/2508.05629) (Wu et al., 2025), DFT

    Example:
        >>> print(dynamic_fine_tuning(jnp.log(jnp.array([0.5])), jnp.array([True]))[0])
        0.3465736
    """
    (logprobs,) = masked_inputs(mask, logprobs=logprobs)
    return jnp.where(mask, -jax.lax.stop_gradient(jnp.exp(logprobs)) * logprobs, 0)
