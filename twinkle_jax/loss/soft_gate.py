"""The loss of SAPO: a soft gate in place of a clip."""

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
from twinkle_jax.loss.ratio import bounded


def soft_gate_surrogate(
    log_ratio: PerToken,
    advantages: Advantages,
    mask: Mask,
    *,
    tau_pos: Scalar = 1.0,
    tau_neg: Scalar = 1.0,
) -> PerToken:
    r"""Loss of SAPO: a sigmoid that fades out where PPO would clip.

    $$\ell_t = -\frac{4}{\tau}\,\sigma\left(\tau (r_t - 1)\right) A_t, \qquad
    \tau = \tau_{pos} \text{ if } A_t > 0 \text{ else } \tau_{neg}$$

    At $r_t = 1$ the gradient is that of the plain policy gradient. The paper takes
    $\tau_{neg} > \tau_{pos}$.

    Args:
        log_ratio: $\log r_t$ from `token_log_ratio`.
        advantages: $A$, one a sequence or one a token; receives no gradient.
        mask: True where the policy chose the token. Padding may hold anything.
        tau_pos: steepness of the gate for positive advantages, above 0.
        tau_neg: steepness of the gate for the others, above 0.

    Returns:
        Loss per token, zero where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if `log_ratio` is not floating point, or the mask not boolean.

    References:
        [Soft Adaptive Policy Optimization](https://arxiv.org/abs/2511.20347) (Gao et al., 2025)

    Example:
        >>> soft_gate_surrogate(jnp.zeros(2), jnp.array([1.0, -0.5]), jnp.array([True, True]))
        Array([-2.,  1.], dtype=float32)
    """
    (log_ratio,) = masked_inputs(mask, log_ratio=log_ratio)
    advantages = masked_advantages(advantages, mask, log_ratio.dtype)
    tau = jnp.where(
        advantages > 0, jnp.asarray(tau_pos, log_ratio.dtype), jnp.asarray(tau_neg, log_ratio.dtype)
    )
    gate = 4 / tau * jax.nn.sigmoid(tau * (jnp.exp(bounded(log_ratio)) - 1))
    return jnp.where(mask, -gate * advantages, 0)
