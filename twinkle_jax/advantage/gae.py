"""GAE over tokens, with a critic, and over the turns of episodes, with the mean of the group."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage.estimate import auto_sharded, like_first
from twinkle_jax.advantage.group_statistics import group_statistics
from twinkle_jax.advantage.grpo import grpo_advantage
from twinkle_jax.advantage.inputs import (
    ArrayLike,
    AxisName,
    Scalar,
    Scale,
    check_axis_name,
    check_coefficient,
    check_flag,
    check_per_row,
    check_size,
    check_tokens,
    common_dtype,
)
from twinkle_jax.advantage.rewards_and_returns import discounted_returns, discounted_sum, whiten


class GAE(NamedTuple):
    """Advantages and the returns that a critic is trained on; see `gae_advantage`.

    Example:
        >>> from twinkle_jax.advantage import gae_advantage
        >>> gae_advantage([[1.0, 1.0]], [[0.0, 0.0]], gae_lambda=1.0, normalize=False).returns
        Array([[2., 1.]], dtype=float32)
    """

    advantages: Float[jax.Array, "*batch time"]
    returns: Float[jax.Array, "*batch time"]


def gae_advantage(
    rewards: ArrayLike,
    values: ArrayLike,
    *,
    where: ArrayLike | None = None,
    gamma: Scalar = 1.0,
    gae_lambda: Scalar = 0.95,
    normalize: bool = True,
    bootstrap_values: ArrayLike | None = None,
    epsilon: Scalar = 1e-8,
    axis_name: AxisName | None = None,
) -> GAE:
    r"""Estimate advantages over time (generalised advantage estimation).

    $$\delta_t = r_t + \gamma V_{t'} - V_t, \qquad A_t = \delta_t + \gamma \lambda A_{t'}, \qquad
      G_t = A_t + V_t$$

    with $t'$ the next step that is kept: the recursion skips masked steps. After the last one
    come $V_{end}$ and an advantage of 0. Normalised, $A$ has mean 0 and (population) standard
    deviation 1 over all steps kept; $G$ is never normalised. No gradient flows through either.

    Computed as one parallel scan, of the returns: $G_t = r_t + \gamma Y_{t'}$ with
    $Y_t = \lambda G_t + (1 - \lambda) V_t$.

    Args:
        rewards: one for each step, `[..., time]`: a list, an array, a tracer or a PyTorch tensor.
            Computed in float32 (float64 stays, with x64 on).
        values: $V$, as `rewards`: what the critic expects from each step on.
        where: True = keep, as `rewards`: the steps that the policy took. The rest may hold
            anything.
        gamma: the discount per step; may be traced.
        gae_lambda: $\lambda$, from 0 (low variance) to 1 (low bias); may be traced.
        normalize: whether to normalise the advantages; static.
        bootstrap_values: $V_{end}$, `[...]`, for sequences that were cut off; 0 by default.
        epsilon: added to the standard deviation; may be traced.
        axis_name: the `shard_map` or `vmap` axis (or a tuple of them) that the batch lies on, for
            normalising. Under `jit` with sharded arrays statistics are global anyway.

    Returns:
        `(advantages, returns)`, both `[..., time]`, 0 where masked, sharded as the rewards are.
        Advantages that are all equal, up to the rounding of the numbers they are computed from,
        normalise to exactly 0.

    Raises:
        ValueError: an invalid shape; NaN or infinity in host data.
        TypeError: an argument of the wrong type.

    References:
        https://arxiv.org/abs/1506.02438

    Example:
        >>> from twinkle_jax.advantage import gae_advantage
        >>> advantages, returns = gae_advantage(
        ...     [[0.0, 0.0, 1.0]], [[0.5, 0.5, 0.5]], gae_lambda=0.5, normalize=False
        ... )
        >>> advantages.tolist(), returns.tolist()
        ([[0.125, 0.25, 0.5]], [[0.625, 0.75, 1.0]])
    """
    return _checked_gae(
        rewards,
        values,
        "where",
        where,
        gamma=gamma,
        gae_lambda=gae_lambda,
        normalize=normalize,
        bootstrap_values=bootstrap_values,
        epsilon=epsilon,
        axis_name=axis_name,
    )


@dataclasses.dataclass(frozen=True)
class GAEAdvantage:
    """`gae_advantage` with Twinkle's signature.

    Args:
        gamma: as in `gae_advantage`.
        gae_lambda: as in `gae_advantage`.
        normalize: as in `gae_advantage`, unless a call overrides it.

    Example:
        >>> from twinkle_jax.advantage import GAEAdvantage
        >>> estimator = GAEAdvantage(gae_lambda=0.5, normalize=False)
        >>> advantages, returns = estimator([[0.0, 0.0, 1.0]], [[0.5, 0.5, 0.5]])
        >>> advantages.tolist(), returns.tolist()
        ([[0.125, 0.25, 0.5]], [[0.625, 0.75, 1.0]])
    """

    gamma: Scalar = 1.0
    gae_lambda: Scalar = 0.95
    normalize: bool = True

    def __call__(
        self,
        rewards: ArrayLike,
        values: ArrayLike,
        *,
        masks: ArrayLike | None = None,
        normalize: bool | None = None,
    ) -> GAE:
        """Call `gae_advantage`.

        Args:
            rewards: as in `gae_advantage`.
            values: as in `gae_advantage`.
            masks: `where` of `gae_advantage`.
            normalize: overrides that of the object, unless it is None.

        Returns:
            `(advantages, returns)`, both `[..., time]`, 0 where masked.

        Raises:
            ValueError: as `gae_advantage`.
            TypeError: as `gae_advantage`.
        """
        return _checked_gae(
            rewards,
            values,
            "masks",
            masks,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
            normalize=self.normalize if normalize is None else normalize,
        )


def _checked_gae(
    rewards: ArrayLike,
    values: ArrayLike,
    mask_name: str,
    mask: ArrayLike | None,
    *,
    gamma: Scalar,
    gae_lambda: Scalar,
    normalize: bool,
    bootstrap_values: ArrayLike | None = None,
    epsilon: Scalar = 1e-8,
    axis_name: AxisName | None = None,
) -> GAE:
    """Check, convert, call the compiled core; errors name the mask as the user did."""
    tokens = {"rewards": rewards, "values": values}
    (earned, critic), keep = check_tokens(tokens, mask_name, mask)
    last = bootstrap_values
    if last is not None:
        last = check_per_row("bootstrap_values", last, "rewards", earned.shape)
    beside = earned, critic, last
    return _gae(
        earned,
        critic,
        keep,
        last,
        check_coefficient("gamma", gamma, *beside),
        check_coefficient("gae_lambda", gae_lambda, *beside),
        check_coefficient("epsilon", epsilon, *beside),
        normalize=check_flag("normalize", normalize),
        axis_name=check_axis_name(axis_name),
    )


@functools.partial(jax.jit, static_argnames=("normalize", "axis_name"))
@auto_sharded(like_first)
def _gae(
    rewards: Array,
    values: Array,
    where: Array | None,
    last: Array | None,
    gamma: Array,
    gae_lambda: Array,
    epsilon: Array,
    *,
    normalize: bool,
    axis_name: AxisName | None,
) -> GAE:
    dtype = common_dtype(rewards, values, last)
    rewards, values = (jax.lax.stop_gradient(x).astype(dtype) for x in (rewards, values))
    gamma, gae_lambda, epsilon = (
        jax.lax.stop_gradient(jnp.asarray(x)).astype(dtype) for x in (gamma, gae_lambda, epsilon)
    )
    if where is not None:
        rewards, values = jnp.where(where, rewards, 0), jnp.where(where, values, 0)
    if last is None:
        last = jnp.zeros_like(values[..., -1])
    last = jax.lax.stop_gradient(last).astype(dtype)

    # The lambda-return of the next step that is kept; a masked step repeats it.
    mixed = gae_lambda * rewards + (1 - gae_lambda) * values
    ahead = discounted_sum(mixed, gamma * gae_lambda, where, last)
    ahead = jnp.concatenate([ahead[..., 1:], last[..., None]], axis=-1)
    returns = rewards + gamma * ahead
    if where is not None:
        returns = jnp.where(where, returns, 0)
    advantages = returns - values
    if normalize:
        sizes = jnp.maximum(jnp.abs(returns), jnp.maximum(jnp.abs(values), jnp.abs(rewards)))
        advantages = whiten(
            advantages, where, epsilon, correction=0, axis_name=axis_name, operands=sizes
        )
    return GAE(advantages, returns)


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
@auto_sharded(like_first)
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
        num_generations: episodes of each prompt, at least 2; static. (With 1 there is no group, and
            the result is that of `grpo_advantage` on $R$.)
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
