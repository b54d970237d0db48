"""The loss of CISPO: importance weights are clipped, no token loses its gradient."""

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
from twinkle_jax.loss.ratio import bounded, clip_bounds


def clipped_importance_surrogate(
    log_ratio: PerToken,
    logprobs: PerToken,
    advantages: Advantages,
    mask: Mask,
    *,
    epsilon: Scalar | None = None,
    epsilon_high: Scalar = 0.2,
) -> PerToken:
    r"""Loss of CISPO: every token keeps its gradient, only its weight is clipped.

    $$\ell_t = -\mathrm{sg}\left[\mathrm{clip}(r_t, 1-\epsilon, 1+\epsilon_{high})\right]
    A_t \log \pi(a_t \mid s_t)$$

    with sg a stopped gradient. The cap of the weight, $1 + \epsilon_{high}$, differs from author to
    author: Twinkle's default is 1.2, ScaleRL uses 5 (`epsilon_high=4`), and in TRL `epsilon_high`
    is the cap itself.

    Args:
        log_ratio: $\log r_t$ from `token_log_ratio`; receives no gradient.
        logprobs: $\log \pi$, under the policy being trained, in nats.
        advantages: $A$, one a sequence or one a token; receives no gradient.
        mask: True where the policy chose the token. Padding may hold anything.
        epsilon: how far the weight may fall below 1; None, the usual choice, for no lower bound.
        epsilon_high: how far the weight may rise above 1.

    Returns:
        Loss per token, zero where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if an array is not floating point, or the mask not boolean.

    References:
        [MiniMax-M1](https://arxiv.org/abs/2506.13585) (MiniMax, 2025), CISPO;
        [The Art of Scaling Reinforcement Learning Compute for LLMs](https://arxiv.org/abs/2510.13786)
        (Khatri et al., 2025), ScaleRL

    Example:
        >>> log_ratio, logprobs = jnp.log(jnp.array([2.0, 0.5])), jnp.array([-1.0, -1.0])
        >>> clipped_importance_surrogate(
        ...     log_ratio, logprobs, jnp.array(1.0), jnp.array([True, True]), epsilon_high=0.25
        ... )
        Array([1.25, 0.5 ], dtype=float32)
    """
    log_ratio, logprobs = masked_inputs(mask, log_ratio=log_ratio, logprobs=logprobs)
    advantages = masked_advantages(advantages, mask, logprobs.dtype)
    low, high = clip_bounds(1.0 if epsilon is None else epsilon, epsilon_high, logprobs.dtype)
    weights = jax.lax.stop_gradient(jnp.clip(jnp.exp(bounded(log_ratio)), low, high))
    return jnp.where(mask, -weights * advantages * logprobs, 0)
