"""Twinkle's face of the estimators: stateless objects that are called with rewards."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax

from twinkle_jax.advantage.inputs.arrays import ArrayLike
from twinkle_jax.advantage.inputs.missing import split_missing
from twinkle_jax.advantage.inputs.settings import Scale, check_scale
from twinkle_jax.advantage.per_completion.keywords import accepted, parameters

ESTIMATORS: dict[str, type["Advantage"]] = {}
"""What `get_advantage` finds, by name."""


class Advantage(abc.ABC):
    """The base of all estimators; subclass it and write `__call__` to add one of your own.

    With a name, `class HalvedAdvantage(Advantage, name="halved")`, `get_advantage` finds it.

    Example:
        >>> from twinkle_jax.advantage import Advantage, grpo_advantage
        >>> class HalvedAdvantage(Advantage):
        ...     def __call__(self, rewards, num_generations=1, scale="group", **kwargs):
        ...         return 0.5 * grpo_advantage(rewards, num_generations, scale)
        >>> HalvedAdvantage()([0.0, 1.0], num_generations=2, scale="none").tolist()
        [-0.25, 0.25]
    """

    def __init_subclass__(cls, *, name: str | None = None, **kwargs: Any) -> None:
        """Enter the class under its name, if it has one."""
        super().__init_subclass__(**kwargs)
        if name is not None:
            ESTIMATORS[name] = cls

    @abc.abstractmethod
    def __call__(
        self,
        rewards: ArrayLike,
        num_generations: int = 1,
        scale: Scale = "group",
        **kwargs: Any,
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
class FunctionAdvantage(Advantage):
    """The base of our own estimators: a function, called with Twinkle's signature."""

    function: ClassVar[Callable[..., jax.Array]]

    def __call__(
        self,
        rewards: ArrayLike,
        num_generations: int = 1,
        scale: Scale = "group",
        **kwargs: Any,
    ) -> jax.Array:
        """Call the function of the same name.

        Args:
            rewards: as in the function; None in a list is left out and gets 0.
            num_generations: K; most functions refuse the default, which is Twinkle's.
            scale: `'group'`, `'batch'` or `'none'`. Where the formula itself says what it divides
                by, it is checked, so that estimators can be swapped, and without effect.
            **kwargs: `where`, `reward_weights` and what the function takes besides.
                Hyper-parameters of other estimators are ignored.

        Returns:
            Advantages, `[N]`.

        Raises:
            TypeError: an unknown keyword, a missing one, or data that would be dropped.
            ValueError: as the function.
        """
        function = type(self).function
        kwargs = accepted(type(self).__name__, function, kwargs, others=_functions())
        if "scale" in parameters(function):
            kwargs["scale"] = scale
        check_scale(scale)
        rewards, where = split_missing(rewards, kwargs.pop("where", None))
        return function(rewards, num_generations=num_generations, where=where, **kwargs)


def _functions() -> dict[str, Callable[..., jax.Array]]:
    """The functions behind the classes, by the names of the classes."""
    return {
        kind.__name__: kind.function
        for kind in ESTIMATORS.values()
        if issubclass(kind, FunctionAdvantage)
    }


def get_advantage(name: str) -> Advantage:
    """Return an estimator by its name: `'grpo'`, `'rloo'`, `'maxrl'`, ...

    Args:
        name: the name, in lower case; an unknown one raises with the list of all.

    Returns:
        An instance, which is called with rewards.

    Raises:
        ValueError: an unknown name; the message lists the known ones.

    Example:
        >>> from twinkle_jax.advantage import get_advantage
        >>> get_advantage("rloo")
        RLOOAdvantage()
        >>> get_advantage("maxrl")([1.0, 0.0], num_generations=2).tolist()
        [1.0, -1.0]
    """
    if not isinstance(name, str) or name not in ESTIMATORS:
        names = ", ".join(map(repr, sorted(ESTIMATORS)))
        raise ValueError(f"name must be one of {names}, got {name!r}")
    return ESTIMATORS[name]()
