"""Loss of a critic (value function)."""

import jax
import jax.numpy as jnp

from twinkle_jax.loss.masked_inputs import Coefficient, Mask, PerToken, masked_inputs


def clipped_value_loss(
    values: PerToken,
    behaviour_values: PerToken,
    returns: PerToken,
    mask: Mask,
    *,
    epsilon: Coefficient = 0.2,
) -> PerToken:
    r"""Squared error of a critic that may not move far in one step (PPO).

    $$\ell_t = \tfrac{1}{2} \max\left((V_t - R_t)^2,\
    (\bar V_t + \mathrm{clip}(V_t - \bar V_t, -\epsilon, \epsilon) - R_t)^2\right)$$

    The clip is not in the paper, but in the first implementation of PPO.

    Args:
        values: $V$, predicted by the critic being trained, in units of reward.
        behaviour_values: $\bar V$, predicted when the tokens were drawn; no gradient.
        returns: $R$, what the critic should predict; no gradient.
        mask: True where the policy chose the token. Padding may hold anything.
        epsilon: how far a value may move from `behaviour_values`, in units of reward.

    Returns:
        Loss per token, zero where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if an array is not floating point, or the mask not boolean.

    References:
        [Proximal Policy Optimization](https://arxiv.org/abs/1707.06347) (Schulman et al., 2017);
        [Implementation Matters in Deep Policy Gradients](https://arxiv.org/abs/2005.12729)
        (Engstrom et al., 2020)

    Example:
        >>> values, returns = jnp.array([1.0, 2.0]), jnp.array([0.0, 3.0])
        >>> clipped_value_loss(values, jnp.array([1.0, 1.0]), returns, values > 0, epsilon=0.5)
        Array([0.5  , 1.125], dtype=float32)
    """
    values, behaviour_values, returns = masked_inputs(
        mask, values=values, behaviour_values=behaviour_values, returns=returns
    )
    behaviour_values, returns = jax.lax.stop_gradient((behaviour_values, returns))
    reach = jnp.asarray(epsilon, values.dtype)
    step = values - behaviour_values
    error = jnp.square(values - returns)
    held_back = jnp.square(behaviour_values + jnp.clip(step, -reach, reach) - returns)
    # Inside the range both errors are the same up to rounding, which must not stop the gradient.
    # Negated, so that NaN counts as clipped and stays visible.
    clipped = ~(jnp.abs(step) <= reach) & ~(held_back <= error)
    return jnp.where(clipped, held_back, error) / 2
