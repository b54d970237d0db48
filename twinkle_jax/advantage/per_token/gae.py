"""GAE: advantages over time from rewards and the values of a critic."""

import dataclasses

from twinkle_jax.advantage.inputs.arrays import ArrayLike, Scalar
from twinkle_jax.advantage.inputs.settings import AxisName
from twinkle_jax.advantage.per_token.lambda_returns import GAE, estimate_gae


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

    with $t'$ the next step that is kept: the recursion skips masked steps. Behind the last one
    stand $V_{end}$ and an advantage of 0. Normalised, $A$ has mean 0 and (population) standard
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
            normalising. Under `jit` with sharded arrays that is over all of them anyway.

    Returns:
        `(advantages, returns)`, both `[..., time]`, 0 where masked, sharded as the rewards are.
        Advantages that are all equal, up to the rounding of what they are made of, normalise to
        exactly 0.

    Raises:
        ValueError: a shape that does not fit; NaN or infinity in host data.
        TypeError: a type that does not fit.

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
    return estimate_gae(
        rewards,
        values,
        ("where", where),
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
        gamma: the discount per step.
        gae_lambda: from 0 (low variance) to 1 (low bias).
        normalize: whether to normalise the advantages over all steps kept.

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
            rewards: one for each step, `[..., time]`.
            values: as `rewards`.
            masks: True = keep, as `rewards`.
            normalize: overrides that of the object, unless it is None.

        Returns:
            `(advantages, returns)`, both `[..., time]`, 0 where masked.

        Raises:
            ValueError: as `gae_advantage`.
            TypeError: as `gae_advantage`.
        """
        return estimate_gae(
            rewards,
            values,
            ("masks", masks),
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
            normalize=self.normalize if normalize is None else normalize,
        )
