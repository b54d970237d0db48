"""Advantages of the turns of episodes: GAE over turns, with the group's mean for a critic."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage.gae import gae_advantage
from twinkle_jax.advantage.group_statistics import group_statistics
from twinkle_jax.advantage.grpo import grpo_advantage
from twinkle_jax.advantage.inputs import (
    ArrayLike,
    Scalar,
    Scale,
    check_coefficient,
    check_size,
    check_tokens,
)
from twinkle_jax.advantage.rewards_and_returns import discounted_returns


def turn_returns(
    rewards: ArrayLike,
    num_generations: int,
    *,
    where: ArrayLike | None = None,
    gamma: Scalar = 1.0,
    gae_lambda: Scalar = 1.0,
) -> Float[jax.Array, "samples turns"]:
    r"""Estimate what each turn of an episode was worth: $\lambda$-returns over turns.

    $$R_k = r_k + \gamma \left[\lambda R_{k+1} + (1 - \lambda) V_{k+1}\right], \qquad
      V_k = \operatorname{mean}_j G^j_k, \qquad G^j_k = \sum_{l \ge k} \gamma^{l-k} r^j_l$$

    There is no critic: the value $V_k$ is the mean return from turn $k$ on of those episodes of the
    group that have such a turn, the episode itself among them. After the last turn, $R$ and $V$
    are 0. With $\lambda = 1$ it is the discounted return. A smaller $\lambda$ gives later rewards
    less weight: less variance, and more bias, since $V_k$ depends on the number of the turn and not
    on the state of the episode.

    Args:
        rewards: `[samples, turns]`, episodes of a prompt next to each other.
        num_generations: episodes of each prompt; static.
        where: True = keep, as `rewards`: turns that took place. The rest may hold anything.
        gamma: the discount per turn; may be traced.
        gae_lambda: $\lambda$, from 0 to 1; may be traced.

    Returns:
        $R$, `[samples, turns]`, 0 where masked; any estimator may compare its columns.

    Raises:
        ValueError: an invalid shape; NaN or infinity in host data.
        TypeError: an argument of the wrong type.

    References:
        https://arxiv.org/abs/1506.02438

    Example:
        >>> from twinkle_jax.advantage import turn_returns
        >>> turn_returns([[0.0, 1.0], [0.0, 0.0]], 2).tolist()
        [[1.0, 1.0], [0.0, 0.0]]
        >>> turn_returns([[0.0, 1.0], [0.0, 0.0]], 2, gae_lambda=0.5).tolist()
        [[0.75, 1.0], [0.25, 0.0]]
    """
    (earned,), keep = check_tokens({"rewards": rewards}, "where", where)
    size = check_size("num_generations", num_generations)
    if earned.ndim != 2 or earned.shape[0] % size:
        raise ValueError(
            f"rewards must be [samples, turns], samples a multiple of {size}, got {earned.shape}"
        )
    gamma = check_coefficient("gamma", gamma, earned)
    gae_lambda = check_coefficient("gae_lambda", gae_lambda, earned)
    keep = jnp.ones(earned.shape, bool) if keep is None else jnp.asarray(keep)
    return _turn_returns(jnp.asarray(earned), keep, gamma, gae_lambda, num_generations=size)


@functools.partial(jax.jit, static_argnames="num_generations")
def _turn_returns(
    rewards: Array, where: Array, gamma: Array, gae_lambda: Array, *, num_generations: int
) -> Array:
    returns = discounted_returns(rewards, where=where, gamma=gamma)
    means = jax.vmap(
        lambda column, kept: group_statistics(column, num_generations, where=kept).mean, 1, 1
    )(returns, where)
    values = jnp.repeat(means, num_generations, axis=0)
    return gae_advantage(
        rewards, values, where=where, gamma=gamma, gae_lambda=gae_lambda, normalize=False
    ).returns


def turn_gae_advantage(
    rewards: ArrayLike,
    num_generations: int,
    scale: Scale = "none",
    *,
    where: ArrayLike | None = None,
    gamma: Scalar = 1.0,
    gae_lambda: Scalar = 0.95,
    epsilon: Scalar = 1e-8,
) -> Float[jax.Array, "samples turns"]:
    r"""Estimate the advantage of each turn of an episode (GAE over turns), without a critic.

    $$\delta_k = r_k + \gamma V_{k+1} - V_k, \qquad A_k = \sum_{l \ge 0} (\gamma\lambda)^l
      \delta_{k+l} = R_k - V_k$$

    with $V$ and $R$ of `turn_returns`: turns take the place of steps, and the mean of the group
    that of a critic. Since $V_k$ is also the mean of the group's $R_k$, $A$ is the GRPO advantage
    of $R$, turn by turn, and sums to 0 over a group. It is computed this way, so equal returns
    give exactly 0. With $\lambda = 1$, $A_k = G_k - V_k$.

    Args:
        rewards: `[samples, turns]`, episodes of a prompt next to each other.
        num_generations: episodes of each prompt; static.
        scale: what each turn's advantages are divided by, as for `grpo_advantage`; static.
        where: True = keep, as `rewards`: turns that took place. The rest may hold anything.
        gamma: the discount per turn; may be traced.
        gae_lambda: $\lambda$, from 0 to 1; may be traced.
        epsilon: added to standard deviations; may be traced.

    Returns:
        Advantages, `[samples, turns]`, 0 where masked, and for a turn that only one episode of its
        group has.

    Raises:
        ValueError: an invalid shape; NaN or infinity in host data.
        TypeError: an argument of the wrong type.

    References:
        https://arxiv.org/abs/1506.02438

    Example:
        >>> from twinkle_jax.advantage import turn_gae_advantage
        >>> turn_gae_advantage([[0.0, 1.0], [0.0, 0.0]], 2, gae_lambda=0.5).tolist()
        [[0.25, 0.5], [-0.25, -0.5]]
    """
    returns = turn_returns(
        rewards, num_generations, where=where, gamma=gamma, gae_lambda=gae_lambda
    )
    keep = jnp.ones(returns.shape, bool) if where is None else jnp.asarray(where)
    return jax.vmap(
        lambda column, kept: grpo_advantage(
            column, num_generations, scale, where=kept, epsilon=epsilon
        ),
        1,
        1,
    )(returns, keep)
