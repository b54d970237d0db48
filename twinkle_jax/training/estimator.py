"""Estimators of advantages by name, called with the data that they need."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from twinkle_jax.advantage import (
    ESTIMATORS,
    Advantage,
    ReinforcePlusPlusAdvantage,
    Scale,
    get_advantage,
)

_OVER_TIME = "reinforce_plus_plus"


class Estimator(NamedTuple):
    """An estimator with its settings.

    Attributes:
        function: of rewards; called with Twinkle's signature unless it works per token.
        options: hyper-parameters.
    """

    function: Advantage | ReinforcePlusPlusAdvantage
    options: Mapping[str, Any] = MappingProxyType({})

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the data that it takes besides rewards."""
        return self.function.needs if isinstance(self.function, Advantage) else ()

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
        ValueError: for an unknown name, an unknown option, or a missing one.
    """
    if name == _OVER_TIME:
        _check_options(name, options, {"gamma": False})
        return Estimator(ReinforcePlusPlusAdvantage(**options))
    if name not in ESTIMATORS:
        known = ", ".join(sorted([*ESTIMATORS, _OVER_TIME]))
        raise ValueError(f"update.advantage must be one of {known}, got {name!r}")
    function = get_advantage(name)
    _check_options(name, options, function.hyper_parameters)
    return Estimator(function, dict(options))


def _check_options(name: str, options: Mapping[str, Any], known: Mapping[str, bool]) -> None:
    """Raise for unknown options and for required ones that are missing."""
    for option in options:
        if option not in known:
            raise ValueError(
                f"update.advantage_options must be some of {', '.join(known) or 'none'} "
                f"for {name}, got {option!r}"
            )
    for option, needed in known.items():
        if needed and option not in options:
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
        estimator: to call.
        rewards: one a completion, those of a prompt next to each other.
        num_samples: completions a prompt.
        scale: what advantages are divided by, for estimators that have a scale.
        where: True = keep, one a completion; None for all.
        lengths: tokens of each completion.
        greedy_rewards: one a prompt, where the estimator needs them.
        mask: True for tokens that the policy chose.

    Returns:
        One advantage a completion, or one a token of `mask`.
    """
    if isinstance(estimator.function, ReinforcePlusPlusAdvantage):
        kept = mask if where is None else mask & jnp.asarray(where)[:, None]
        # Chosen tokens from each one on: 1 at the last, which gets the reward.
        remaining = jnp.cumsum(mask[:, ::-1], axis=1, dtype=jnp.int32)[:, ::-1]
        last = mask & (remaining == 1)
        at_last_token = jnp.where(last, jnp.asarray(rewards)[:, None], 0)
        return estimator.function(at_last_token, masks=kept)
    data = {"lengths": lengths, "greedy_rewards": greedy_rewards}
    needed = {name: data[name] for name in estimator.needs}
    return estimator.function(
        rewards, num_samples, scale, where=where, **needed, **estimator.options
    )
