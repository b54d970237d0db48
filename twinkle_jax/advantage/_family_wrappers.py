"""Twinkle's face of the rest of the family: objects that can be swapped for `GRPOAdvantage`."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax

from twinkle_jax.advantage._dgpo import dgpo_advantage
from twinkle_jax.advantage._gdpo import gdpo_advantage
from twinkle_jax.advantage._keywords import accepted
from twinkle_jax.advantage._maxrl import maxrl_advantage
from twinkle_jax.advantage._mc_grpo import mc_grpo_advantage
from twinkle_jax.advantage._opo import opo_advantage
from twinkle_jax.advantage._pass_at_k import pass_at_k_advantage
from twinkle_jax.advantage._pkpo import pkpo_advantage
from twinkle_jax.advantage._reinforce_plus_plus_baseline import (
    reinforce_plus_plus_baseline_advantage,
)
from twinkle_jax.advantage._remax import remax_advantage
from twinkle_jax.advantage._rewards import split_missing
from twinkle_jax.advantage._settings import Scale, check_scale
from twinkle_jax.advantage._wrappers import Advantage


@dataclasses.dataclass(frozen=True)
class FixedScaleAdvantage(Advantage):
    """The base of estimators whose formula says what they divide by: `scale` changes nothing."""

    function: ClassVar[Callable[..., jax.Array]]
    needs: ClassVar[tuple[str, ...]] = ()
    takes: ClassVar[tuple[str, ...]] = ()

    def __call__(
        self, rewards: Any, num_generations: int = 1, scale: Scale = "group", **kwargs: Any
    ) -> jax.Array:
        """Call the function of the same name.

        Args:
            rewards: as in the function; None in a list is left out and gets 0.
            num_generations: K.
            scale: checked, so that estimators can be swapped, and without effect.
            **kwargs: `where`, `reward_weights` and what the function takes besides.
                Hyper-parameters of other estimators are ignored.

        Returns:
            Advantages, `[N]`.

        Raises:
            TypeError: an unknown keyword, a missing one, or data that would be dropped.
            ValueError: as the function.
        """
        name = type(self).__name__
        check_scale(scale)
        own = ("where", "reward_weights", *self.needs, *self.takes)
        kwargs = accepted(name, kwargs, own)
        for needed in self.needs:
            if needed not in kwargs:
                raise TypeError(f"{name} needs {needed}=")
        rewards, where = split_missing(rewards, kwargs.pop("where", None))
        function = type(self).function
        return function(rewards, num_generations=num_generations, where=where, **kwargs)


@dataclasses.dataclass(frozen=True)
class ReMaxAdvantage(FixedScaleAdvantage):
    """`remax_advantage` with Twinkle's signature; needs `greedy_rewards=`, `[P]`.

    Example:
        >>> from twinkle_jax.advantage import ReMaxAdvantage
        >>> ReMaxAdvantage()([1.0, 0.0, None, 4.0], 2, greedy_rewards=[0.5, 3.0]).tolist()
        [0.5, -0.5, 0.0, 1.0]
    """

    function = staticmethod(remax_advantage)
    needs = ("greedy_rewards",)


@dataclasses.dataclass(frozen=True)
class OPOAdvantage(FixedScaleAdvantage):
    """`opo_advantage` with Twinkle's signature; needs `lengths=`, tokens per completion.

    Example:
        >>> from twinkle_jax.advantage import OPOAdvantage
        >>> OPOAdvantage()([0.0, 1.0], num_generations=2, lengths=[30, 10]).tolist()
        [-0.25, 0.75]
    """

    function = staticmethod(opo_advantage)
    needs = ("lengths",)


@dataclasses.dataclass(frozen=True)
class MaxRLAdvantage(FixedScaleAdvantage):
    """`maxrl_advantage` with Twinkle's signature; takes `epsilon=`.

    Example:
        >>> from twinkle_jax.advantage import MaxRLAdvantage
        >>> MaxRLAdvantage()([1.0, 0.0, 0.0, 0.0], num_generations=4).tolist()
        [3.0, -1.0, -1.0, -1.0]
    """

    function = staticmethod(maxrl_advantage)
    takes = ("epsilon",)


@dataclasses.dataclass(frozen=True)
class DGPOAdvantage(FixedScaleAdvantage):
    """`dgpo_advantage` with Twinkle's signature; takes `epsilon=`.

    Example:
        >>> from twinkle_jax.advantage import DGPOAdvantage
        >>> DGPOAdvantage()([0.0, 3.0], num_generations=2).tolist()
        [-1.0, 1.0]
    """

    function = staticmethod(dgpo_advantage)
    takes = ("epsilon",)


@dataclasses.dataclass(frozen=True)
class MCGRPOAdvantage(FixedScaleAdvantage):
    """`mc_grpo_advantage` with Twinkle's signature; takes `epsilon=`.

    Example:
        >>> from twinkle_jax.advantage import MCGRPOAdvantage
        >>> MCGRPOAdvantage()([0.0, 2.0, 6.0], num_generations=3, epsilon=0.0).tolist()
        [-1.0, 0.0, 2.0]
    """

    function = staticmethod(mc_grpo_advantage)
    takes = ("epsilon",)


@dataclasses.dataclass(frozen=True)
class GDPOAdvantage(FixedScaleAdvantage):
    """`gdpo_advantage` with Twinkle's signature; takes `epsilon=` and `axis_name=`.

    Example:
        >>> from twinkle_jax.advantage import GDPOAdvantage
        >>> GDPOAdvantage()([[0.0, 1.0], [0.0, 1.0]], num_generations=2).tolist()
        [0.0, 0.0]
    """

    function = staticmethod(gdpo_advantage)
    takes = ("epsilon", "axis_name")


@dataclasses.dataclass(frozen=True)
class PassAtKAdvantage(FixedScaleAdvantage):
    """`pass_at_k_advantage` with Twinkle's signature; needs `k=`, takes `threshold=`.

    Example:
        >>> from twinkle_jax.advantage import PassAtKAdvantage
        >>> PassAtKAdvantage()([1.0, 0.0, 0.0, 1.0], num_generations=4, k=1).round(4).tolist()
        [1.0, -1.0, -1.0, 1.0]
    """

    function = staticmethod(pass_at_k_advantage)
    needs = ("k",)
    takes = ("threshold",)


@dataclasses.dataclass(frozen=True)
class PKPOAdvantage(FixedScaleAdvantage):
    """`pkpo_advantage` with Twinkle's signature; needs `k=`, takes `baseline=`.

    Example:
        >>> from twinkle_jax.advantage import PKPOAdvantage
        >>> PKPOAdvantage()([8.0, 11.0, 2.0, 5.0], num_generations=4, k=2).tolist()
        [0.0, 1.0, -0.5, -0.5]
    """

    function = staticmethod(pkpo_advantage)
    needs = ("k",)
    takes = ("baseline",)


@dataclasses.dataclass(frozen=True)
class ReinforcePlusPlusBaselineAdvantage(FixedScaleAdvantage):
    """`reinforce_plus_plus_baseline_advantage` with Twinkle's signature; needs `lengths=`.

    Example:
        >>> from twinkle_jax.advantage import ReinforcePlusPlusBaselineAdvantage
        >>> estimator = ReinforcePlusPlusBaselineAdvantage()
        >>> estimator([0.0, 4.0, 7.0, 7.0], num_generations=2, lengths=[1, 1, 1, 6]).tolist()
        [-2.0, 2.0, 0.0, 0.0]
    """

    function = staticmethod(reinforce_plus_plus_baseline_advantage)
    needs = ("lengths",)
    takes = ("epsilon", "axis_name")
