"""Twinkle's face of the estimators: stateless objects that are called with rewards."""

import abc
import dataclasses
from typing import Any

import jax

from twinkle_jax.advantage._grpo import grpo_advantage
from twinkle_jax.advantage._keywords import accepted
from twinkle_jax.advantage._rewards import split_missing
from twinkle_jax.advantage._rloo import rloo_advantage
from twinkle_jax.advantage._settings import Scale


class Advantage(abc.ABC):
    """The base of all estimators; subclass it and write `__call__` to add one of your own.

    Example:
        >>> from twinkle_jax.advantage import Advantage, grpo_advantage
        >>> class HalvedAdvantage(Advantage):
        ...     def __call__(self, rewards, num_generations=1, scale="group", **kwargs):
        ...         return 0.5 * grpo_advantage(rewards, num_generations, scale)
        >>> HalvedAdvantage()([0.0, 1.0], num_generations=2, scale="none").tolist()
        [-0.25, 0.25]
    """

    @abc.abstractmethod
    def __call__(
        self, rewards: Any, num_generations: int = 1, scale: Scale = "group", **kwargs: Any
    ) -> jax.Array:
        """Turn rewards into advantages.

        Args:
            rewards: a list, tuple, NumPy or JAX array, or PyTorch tensor, `[N]` or `[N, C]`, the
                samples of a prompt next to each other.
            num_generations: samples per prompt.
            scale: `'group'`, `'batch'` or `'none'`.
            **kwargs: what the estimator takes besides.

        Returns:
            Advantages, `[N]`.
        """


@dataclasses.dataclass(frozen=True)
class GRPOAdvantage(Advantage):
    """`grpo_advantage` with Twinkle's signature; None in a list of rewards means "missing".

    Example:
        >>> from twinkle_jax import GRPOAdvantage
        >>> GRPOAdvantage()([0.0, 1.0, None, 3.0], num_generations=2, scale="none").tolist()
        [-0.5, 0.5, 0.0, 0.0]
    """

    def __call__(
        self, rewards: Any, num_generations: int = 1, scale: Scale = "group", **kwargs: Any
    ) -> jax.Array:
        """Call `grpo_advantage`.

        Args:
            rewards: as in `grpo_advantage`; None in a list is left out and gets 0.
            num_generations: K.
            scale: `'group'`, `'batch'` or `'none'`.
            **kwargs: `where`, `reward_weights`, `epsilon` and `axis_name` as in `grpo_advantage`.
                Hyper-parameters of other estimators are ignored, so that estimators can be swapped.

        Returns:
            Advantages, `[N]`.

        Raises:
            TypeError: an unknown keyword, or data that this estimator would drop.
            ValueError: as `grpo_advantage`.
        """
        return _call(grpo_advantage, self, rewards, num_generations, scale, kwargs)


@dataclasses.dataclass(frozen=True)
class RLOOAdvantage(Advantage):
    """`rloo_advantage` with Twinkle's signature; None in a list of rewards means "missing".

    Example:
        >>> from twinkle_jax import RLOOAdvantage
        >>> RLOOAdvantage()([0.0, 1.0, 2.0, 4.0], num_generations=2, scale="none").tolist()
        [-1.0, 1.0, -2.0, 2.0]
    """

    def __call__(
        self, rewards: Any, num_generations: int = 1, scale: Scale = "group", **kwargs: Any
    ) -> jax.Array:
        """Call `rloo_advantage`.

        Args:
            rewards: as in `rloo_advantage`; None in a list is left out and gets 0.
            num_generations: K, at least 2 (the default is Twinkle's, and raises).
            scale: `'group'`, `'batch'` or `'none'`.
            **kwargs: as in `GRPOAdvantage`.

        Returns:
            Advantages, `[N]`.

        Raises:
            TypeError: an unknown keyword, or data that this estimator would drop.
            ValueError: as `rloo_advantage`.
        """
        return _call(rloo_advantage, self, rewards, num_generations, scale, kwargs)


def _call(
    function: Any,
    estimator: Advantage,
    rewards: Any,
    num_generations: int,
    scale: Scale,
    kwargs: dict[str, Any],
) -> jax.Array:
    if kwargs:
        kwargs = accepted(type(estimator).__name__, kwargs)
    rewards, where = split_missing(rewards, kwargs.pop("where", None))
    result: jax.Array = function(rewards, num_generations, scale, where=where, **kwargs)
    return result
