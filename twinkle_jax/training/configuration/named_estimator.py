"""Any estimator of advantages by its name, and the data that it needs besides rewards."""

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from twinkle_jax.advantage import Advantage, ReinforcePlusPlusAdvantage, get_advantage
from twinkle_jax.advantage.inputs.settings import Scale
from twinkle_jax.advantage.per_completion.estimator import ESTIMATORS, FunctionAdvantage

_OVER_TIME = "reinforce_plus_plus"
_DATA = ("lengths", "greedy_rewards")  # what the loop has for those that ask for it
_CALL = ("self", "rewards", "num_generations", "scale", "where")


class Estimator(NamedTuple):
    """An estimator with its settings.

    Attributes:
        function: of rewards; called with Twinkle's signature unless it works per token.
        options: hyper-parameters.
        needs: names of the data that it takes besides rewards.
    """

    function: Advantage | ReinforcePlusPlusAdvantage
    options: Mapping[str, Any] = MappingProxyType({})
    needs: tuple[str, ...] = ()

    @property
    def needs_greedy_rewards(self) -> bool:
        """Whether rewards of the most probable completions are needed."""
        return "greedy_rewards" in self.needs


def make_estimator(name: str, options: Mapping[str, Any]) -> Estimator:
    """Find an estimator.

    Args:
        name: what `get_advantage` finds, or `reinforce_plus_plus`.
        options: its hyper-parameters: `k` of `pass_at_k` and `pkpo`, `epsilon`, ...

    Returns:
        The estimator.

    Raises:
        ValueError: if there is none of that name, it has no such option, or one is missing.
    """
    if name == _OVER_TIME:
        own = {"gamma": 1.0}
        _check_options(name, options, allowed=own, needed=())
        return Estimator(ReinforcePlusPlusAdvantage(**(own | dict(options))))
    if name not in ESTIMATORS:
        known = ", ".join(sorted([*ESTIMATORS, _OVER_TIME]))
        raise ValueError(f"update.advantage must be one of {known}, got {name!r}")
    function = get_advantage(name)
    parameters = _parameters(function)
    needed = [x for x, p in parameters.items() if p.default is p.empty and x not in _DATA]
    allowed = [x for x in parameters if x not in (*_DATA, "reward_weights", "axis_name")]
    _check_options(name, options, allowed=allowed, needed=needed)
    return Estimator(function, dict(options), tuple(x for x in _DATA if x in parameters))


def _parameters(function: Advantage) -> dict[str, inspect.Parameter]:
    """Give what an estimator takes besides what every one takes."""
    behind = type(function).function if isinstance(function, FunctionAdvantage) else function
    found = inspect.signature(behind).parameters
    named = {x: p for x, p in found.items() if p.kind is not p.VAR_KEYWORD}
    return {x: p for x, p in named.items() if x not in _CALL}


def _check_options(name: str, options: Mapping[str, Any], *, allowed: Any, needed: Any) -> None:
    for option in options:
        if option not in allowed:
            raise ValueError(
                f"update.advantage_options must be some of {', '.join(allowed) or 'none'} "
                f"for {name}, got {option!r}"
            )
    for option in needed:
        if option not in options:
            raise ValueError(
                f"update.advantage_options must have {option!r} for {name}, got {dict(options)}"
            )


def estimate(
    estimator: Estimator,
    rewards: np.ndarray[Any, Any],
    num_samples: int,
    scale: Scale,
    *,
    where: np.ndarray[Any, Any] | None,
    lengths: np.ndarray[Any, Any],
    greedy_rewards: np.ndarray[Any, Any] | None,
    mask: Bool[Array, "rows time"],
) -> jax.Array:
    """Estimate advantages.

    Args:
        estimator: how.
        rewards: one a completion, those of a prompt next to each other.
        num_samples: completions a prompt.
        scale: what advantages are divided by, for estimators that have a scale.
        where: completions that count; None for all.
        lengths: tokens of each completion.
        greedy_rewards: one a prompt, where the estimator needs them.
        mask: True for tokens of completions.

    Returns:
        One advantage a completion, or one a token of `mask`.
    """
    if isinstance(estimator.function, ReinforcePlusPlusAdvantage):
        kept = mask if where is None else mask & jnp.asarray(where)[:, None]
        last = jnp.arange(mask.shape[1])[None, :] == jnp.asarray(lengths)[:, None] - 1
        given = jnp.where(last, jnp.asarray(rewards)[:, None], 0)
        return estimator.function(given, masks=kept)
    data = {"lengths": lengths, "greedy_rewards": greedy_rewards}
    wanted = {name: data[name] for name in estimator.needs}
    return estimator.function(
        rewards, num_samples, scale, where=where, **wanted, **estimator.options
    )
