"""Which keyword arguments an estimator takes, ignores, or refuses with a suggestion.

Estimators can be swapped without touching the call, so a hyper-parameter of another estimator is
ignored. Data is never ignored: a mask that nobody applies would change what is learnt. Which is
which, the signatures of the functions say: hyper-parameters are keyword-only, data is not.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from twinkle_jax.advantage.per_token.gae import GAEAdvantage

_CALL = ("rewards", "num_generations", "scale")  # what every estimator is called with

# What other systems call these, or what somebody may have in mind.
_INSTEAD = {
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


@functools.cache
def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name."""
    return inspect.signature(function).parameters


def accepted(
    estimator: str,
    function: Callable[..., Any],
    kwargs: dict[str, Any],
    *,
    others: Mapping[str, Callable[..., Any]],
) -> dict[str, Any]:
    """Keep what `function` takes, drop hyper-parameters of others, refuse the rest by name."""
    own = {name: p for name, p in parameters(function).items() if name not in _CALL}
    settings = {*parameters(GAEAdvantage)}.union(*map(_settings, others.values()))
    for name in kwargs:
        if name not in own and name not in settings:
            hint = _hint(name, tuple(own), others)
            raise TypeError(f"{estimator} got an unexpected keyword argument {name!r}; {hint}")
    for name, parameter in own.items():
        if parameter.default is parameter.empty and name not in kwargs:
            raise TypeError(f"{estimator} needs {name}=")
    return {name: value for name, value in kwargs.items() if name in own}


def _settings(function: Callable[..., Any]) -> set[str]:
    return {name for name, p in parameters(function).items() if p.kind is p.KEYWORD_ONLY}


def _hint(name: str, own: tuple[str, ...], others: Mapping[str, Callable[..., Any]]) -> str:
    takers = [other for other, function in others.items() if name in parameters(function)]
    if takers:
        return f"use {' or '.join(takers)}, which take{'s' * (len(takers) == 1)} {name}"
    close = difflib.get_close_matches(name, [*own, "num_generations", "scale"], n=1)
    hint = _INSTEAD.get(name) or (f"{close[0]}=" if close else "")
    return f"use {hint}" if hint else f"it takes {', '.join(own)}"
