"""Twinkle's face of the estimators over time, which are called with an array per token."""

import dataclasses
from typing import Any

import jax

from twinkle_jax.advantage._gae import GAE, estimate_gae
from twinkle_jax.advantage._reinforce_plus_plus import estimate_reinforce_plus_plus


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

    gamma: Any = 1.0
    gae_lambda: Any = 0.95
    normalize: bool = True

    def __call__(
        self, rewards: Any, values: Any, *, masks: Any = None, normalize: bool | None = None
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

    gamma: Any = 1.0

    def __call__(self, rewards: Any, *, masks: Any = None) -> jax.Array:
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
        return estimate_reinforce_plus_plus(rewards, ("masks", masks), gamma=self.gamma)
