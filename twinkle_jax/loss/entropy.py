"""The entropy bonus, and the mask of tokens with high entropy."""

import jax.numpy as jnp

from twinkle_jax.loss.masked_inputs import Coefficient, Mask, PerToken, masked_inputs


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
    ascending = jnp.sort(jnp.where(mask, entropies, jnp.inf), axis=None)
    count = jnp.sum(mask)
    # Tokens besides the highest one; the first entry of `ascending` to keep follows from it.
    others = jnp.floor(jnp.asarray(fraction, entropies.dtype) * (count - 1).astype(entropies.dtype))
    threshold = ascending[jnp.clip(count - 1 - others.astype(count.dtype), 0, entropies.size - 1)]
    return mask & (entropies >= threshold)
