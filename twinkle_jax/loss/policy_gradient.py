"""The plain policy gradient, of REINFORCE and A2C."""

import jax.numpy as jnp

from twinkle_jax.loss.masked_inputs import (
    Advantages,
    Mask,
    PerToken,
    masked_advantages,
    masked_inputs,
)


def policy_gradient(logprobs: PerToken, advantages: Advantages, mask: Mask) -> PerToken:
    r"""Loss of REINFORCE and A2C: the advantage times the log-probability.

    $$\ell_t = -A_t \log \pi(a_t \mid s_t)$$

    Its gradient is the policy gradient when the tokens were drawn from the policy being trained.

    Args:
        logprobs: $\log \pi$, under the policy being trained, in nats.
        advantages: $A$, one a sequence or one a token; receives no gradient.
        mask: True where the policy chose the token. Padding may hold anything.

    Returns:
        Loss per token, zero where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if `logprobs` is not floating point, or the mask not boolean.

    References:
        [REINFORCE](https://doi.org/10.1007/BF00992696) (Williams, 1992);
        [A3C](https://arxiv.org/abs/1602.01783) (Mnih et al., 2016)

    Example:
        >>> logprobs, mask = jnp.array([[-1.0, -2.0]]), jnp.array([[True, True]])
        >>> policy_gradient(logprobs, jnp.array([0.5]), mask)
        Array([[0.5, 1. ]], dtype=float32)
    """
    (logprobs,) = masked_inputs(mask, logprobs=logprobs)
    return jnp.where(mask, -masked_advantages(advantages, mask, logprobs.dtype) * logprobs, 0)
