"""The objects with Twinkle's signature: stateless, called with rewards, found by name.

Estimators can be swapped without touching the call, so a hyper-parameter of another estimator is
ignored. Data is never ignored: without a mask that was passed, training would
learn from the wrong samples. In signatures hyper-parameters are keyword-only, data is not.
"""

import abc
import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax

from twinkle_jax.advantage.estimate import check_where
from twinkle_jax.advantage.inputs import ArrayLike, Scale, as_array, check_scale

ESTIMATORS: dict[str, type["Advantage"]] = {}
"""The classes that `get_advantage` knows, by name."""

_EVERY_CALL = ("self", "rewards", "num_generations", "scale", "where")
_DATA = ("lengths", "greedy_rewards")
_OVER_TIME = {"gamma", "gae_lambda", "normalize"}  # hyper-parameters of estimators per token

# Names from other libraries, and what to write here instead.
_SUGGESTIONS = {
    "mask": "where= (True = keep)",
    "masks": "where= (True = keep)",
    "completion_mask": "where= (True = keep), one entry a sample",
    "loss_mask": "where= (True = keep), one entry a sample",
    "values": "GAEAdvantage, which takes values",
    "weights": "reward_weights=",
    "eps": "epsilon=",
    "group_size": "num_generations=",
    "num_samples": "num_generations=",
} | dict.fromkeys(
    ("segment_ids", "num_segments", "group_ids", "index"),
    "segment_grpo_advantage or another of the segment_* functions",
)


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
        """Register the class under its name, if it has one."""
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
            **kwargs: further arguments of the estimator.

        Returns:
            Advantages, `[N]`.
        """

    @property
    def needs(self) -> tuple[str, ...]:
        """Which of `lengths` and `greedy_rewards` a call needs besides rewards.

        Example:
            >>> from twinkle_jax.advantage import get_advantage
            >>> get_advantage("opo").needs, get_advantage("grpo").needs
            (('lengths',), ())
        """
        return tuple(name for name in _DATA if name in _parameters(self._signature()))

    @property
    def hyper_parameters(self) -> dict[str, bool]:
        """Its hyper-parameters by name; True for required ones.

        Example:
            >>> from twinkle_jax.advantage import get_advantage
            >>> get_advantage("pass_at_k").hyper_parameters
            {'k': True, 'threshold': False}
        """
        others = (*_EVERY_CALL, *_DATA, "reward_weights", "axis_name")
        return {
            name: parameter.default is parameter.empty
            for name, parameter in _parameters(self._signature()).items()
            if name not in others and parameter.kind is not parameter.VAR_KEYWORD
        }

    def _signature(self) -> Callable[..., jax.Array]:
        """The function whose parameters are those of a call."""
        return type(self).__call__


@dataclasses.dataclass(frozen=True)
class FunctionAdvantage(Advantage):
    """The base of the built-in estimators: a function, called with Twinkle's signature."""

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
            num_generations: K; the default is Twinkle's, and most estimators need at least 2.
            scale: `'group'`, `'batch'` or `'none'`. If the formula of the estimator fixes what it
                divides by, `scale` has no effect, so that estimators can be swapped.
            **kwargs: `where`, `reward_weights` and further arguments of the function.
                Hyper-parameters of other estimators are ignored.

        Returns:
            Advantages, `[N]`.

        Raises:
            TypeError: an unknown keyword, a missing one, or data that would be dropped.
            ValueError: as the function.
        """
        function = type(self).function
        kwargs = _accepted(type(self), kwargs)
        if "scale" in _parameters(function):
            kwargs["scale"] = scale
        check_scale(scale)
        rewards, where = _split_missing(rewards, kwargs.pop("where", None))
        return function(rewards, num_generations=num_generations, where=where, **kwargs)

    def _signature(self) -> Callable[..., jax.Array]:
        return type(self).function


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


@functools.cache
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _accepted(estimator: type[FunctionAdvantage], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keep arguments of its function, drop hyper-parameters of others, raise for the rest."""
    parameters = _parameters(estimator.function)
    takes = [name for name in parameters if name not in ("rewards", "num_generations", "scale")]
    others = [kind for kind in ESTIMATORS.values() if issubclass(kind, FunctionAdvantage)]
    for name in kwargs:
        if name in takes or name in _OVER_TIME:
            continue
        takers = [kind for kind in others if name in _parameters(kind.function)]
        if any(
            _parameters(k.function)[name].kind is inspect.Parameter.KEYWORD_ONLY for k in takers
        ):
            continue
        hint = _hint(name, takes, [kind.__name__ for kind in takers])
        raise TypeError(f"{estimator.__name__} got an unexpected keyword argument {name!r}; {hint}")
    for name in takes:
        if parameters[name].default is inspect.Parameter.empty and name not in kwargs:
            raise TypeError(f"{estimator.__name__} needs {name}=")
    return {name: value for name, value in kwargs.items() if name in takes}


def _hint(name: str, takes: list[str], takers: list[str]) -> str:
    """Suggest what to write instead of a keyword that is not accepted."""
    if takers:
        return f"use {' or '.join(takers)}, which take{'s' * (len(takers) == 1)} {name}"
    close = difflib.get_close_matches(name, [*takes, "num_generations", "scale"], n=1)
    suggestion = _SUGGESTIONS.get(name) or (f"{close[0]}=" if close else "")
    return f"use {suggestion}" if suggestion else f"it takes {', '.join(takes)}"


def _split_missing(rewards: Any, where: Any) -> tuple[Any, Any]:
    """Replace None in a (nested) list by 0, and mask it."""
    if not isinstance(rewards, list | tuple) or not any(map(_holds_none, rewards)):
        return rewards, where
    rows = [row for row in rewards if isinstance(row, list | tuple)]
    blank = [None] * len(rows[0]) if rows else None  # a sample with none of its components
    cells = [blank if row is None else row for row in rewards]
    filled = [_map_row(row, lambda r: 0.0 if r is None else r) for row in cells]
    present = as_array("rewards", [_map_row(row, lambda r: r is not None) for row in cells])
    if where is None:
        return filled, present
    mask = check_where(where, present.shape)
    if mask.ndim < present.ndim:
        mask = mask[:, None]
    return filled, mask & present


def _holds_none(row: Any) -> bool:
    return row is None or (isinstance(row, list | tuple) and any(r is None for r in row))


def _map_row(row: Any, change: Callable[[Any], Any]) -> Any:
    return [change(r) for r in row] if isinstance(row, list | tuple) else change(row)
