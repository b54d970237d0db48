"""REINFORCE++: reward-to-go per token, normalised over all tokens of the batch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage.estimate import auto_sharded, like_first
from twinkle_jax.advantage.inputs import (
    ArrayLike,
    AxisName,
    Scalar,
    check_axis_name,
    check_coefficient,
    check_tokens,
    common_dtype,
)
from twinkle_jax.advantage.per_token.rewards_and_returns import discounted_sum, whiten


def reinforce_plus_plus_advantage(
    rewards: ArrayLike,
    *,
    where: ArrayLike | None = None,
    gamma: Scalar = 1.0,
    epsilon: Scalar = 1e-8,
    axis_name: AxisName | None = None,
) -> Float[jax.Array, "*batch time"]:
    r"""Normalise the reward-to-go of every token over the batch (REINFORCE++).

    $$G_t = r_t + \gamma\, G_{t'}, \qquad A_t = \frac{G_t - \bar G}{\sigma_G + \epsilon}$$

    with $t'$ the next token that is kept, and mean and standard deviation (Bessel-corrected) over
    all tokens kept. Rewards are per token: `kl_in_token_reward` puts the reward of a
    completion on its last token and subtracts a penalty from all of them.

    Args:
        rewards: one for each token, `[..., time]`, as in `discounted_returns`.
        where: True = keep, as `rewards`: the tokens that the policy chose.
        gamma: the discount per token; may be traced.
        epsilon: added to the standard deviation; may be traced.
        axis_name: as in `gae_advantage`.

    Returns:
        Advantages, `[..., time]`, 0 where masked, sharded as the rewards are; all exactly 0 where
        the returns are equal up to rounding.

    Raises:
        ValueError: an invalid shape; NaN or infinity in host data.
        TypeError: an argument of the wrong type.

    References:
        https://arxiv.org/abs/2501.03262

    Example:
        >>> from twinkle_jax.advantage import reinforce_plus_plus_advantage
        >>> rewards = [[2.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
        >>> where = [[True, False, False], [False, False, True]]
        >>> reinforce_plus_plus_advantage(rewards, where=where, epsilon=0.0)[0, 1:].tolist()
        [0.0, 0.0]
    """
    return _checked(rewards, "where", where, gamma=gamma, epsilon=epsilon, axis_name=axis_name)


@dataclasses.dataclass(frozen=True)
class ReinforcePlusPlusAdvantage:
    """`reinforce_plus_plus_advantage` as an object, called as `GAEAdvantage` is, without values.

    Args:
        gamma: the discount per token.

    Example:
        >>> from twinkle_jax.advantage import ReinforcePlusPlusAdvantage
        >>> ReinforcePlusPlusAdvantage()([[0.0, 0.0, 3.0], [0.0, 0.0, 3.0]]).tolist()
        [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """

    gamma: Scalar = 1.0

    def __call__(self, rewards: ArrayLike, *, masks: ArrayLike | None = None) -> jax.Array:
        """Call `reinforce_plus_plus_advantage`.

        Args:
            rewards: one for each token, `[..., time]`.
            masks: True = keep, as `rewards`.

        Returns:
            Advantages, `[..., time]`, 0 where masked.

        Raises:
            ValueError: as `reinforce_plus_plus_advantage`.
            TypeError: as `reinforce_plus_plus_advantage`.
        """
        return _checked(rewards, "masks", masks, gamma=self.gamma)


def _checked(
    rewards: ArrayLike,
    mask_name: str,
    mask: ArrayLike | None,
    *,
    gamma: Scalar,
    epsilon: Scalar = 1e-8,
    axis_name: AxisName | None = None,
) -> Array:
    """Check, convert, call the compiled core; errors name the mask as the user did."""
    (values,), keep = check_tokens({"rewards": rewards}, mask_name, mask)
    return _reinforce_plus_plus(
        values,
        keep,
        check_coefficient("gamma", gamma, values),
        check_coefficient("epsilon", epsilon, values),
        axis_name=check_axis_name(axis_name),
    )


@functools.partial(jax.jit, static_argnames="axis_name")
@auto_sharded(like_first)
def _reinforce_plus_plus(
    rewards: Array,
    where: Array | None,
    gamma: Array,
    epsilon: Array,
    *,
    axis_name: AxisName | None,
) -> Array:
    dtype = common_dtype(rewards)
    rewards = jax.lax.stop_gradient(rewards).astype(dtype)
    gamma, epsilon = (jax.lax.stop_gradient(jnp.asarray(x)).astype(dtype) for x in (gamma, epsilon))
    if where is not None:
        rewards = jnp.where(where, rewards, 0)
    returns = discounted_sum(rewards, gamma, where)
    if where is not None:
        returns = jnp.where(where, returns, 0)
    return whiten(returns, where, epsilon, correction=1, axis_name=axis_name)
