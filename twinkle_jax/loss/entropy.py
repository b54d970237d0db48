"""A reward for staying undecided."""

import jax.numpy as jnp

from twinkle_jax.loss.masked_inputs import Mask, PerToken, Scalar, masked_inputs


def entropy_bonus(entropies: PerToken, mask: Mask, *, coefficient: Scalar) -> PerToken:
    r"""Loss that pays for entropy, to be added to the losses per token.

    $$\ell_t = -c\, H(\pi(\cdot \mid s_t))$$

    See [A3C](https://arxiv.org/abs/1602.01783).

    Args:
        entropies: $H$, entropy of the policy at each token, in nats; gradients flow through it.
        mask: True where the policy chose the token. Padding may hold anything.
        coefficient: $c$; 0.01 and less are usual.

    Returns:
        Loss per token, zero where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if `entropies` is not floating point, or the mask not boolean.

    Example:
        >>> entropy_bonus(jnp.array([2.0, 9.0]), jnp.array([True, False]), coefficient=0.25)
        Array([-0.5,  0. ], dtype=float32)
    """
    (entropies,) = masked_inputs(mask, entropies=entropies)
    return jnp.where(mask, -jnp.asarray(coefficient, entropies.dtype) * entropies, 0)
