"""Check what some estimators take beside rewards: lengths, greedy rewards, k, coefficients."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from twinkle_jax.advantage.inputs.arrays import HostOrDevice, as_numbers
from twinkle_jax.advantage.inputs.settings import check_coefficient, check_subset_size


class Rewards(NamedTuple):
    """What the rest must fit: rewards and mask, already checked, and the size of a group."""

    values: HostOrDevice
    where: HostOrDevice | None
    group_size: int


def check_sample_data(data: Mapping[str, Any], rewards: Rewards) -> dict[str, Any]:
    """Check each argument by its name; what has no check of its own is a coefficient."""
    return {
        name: _CHECKS[name](value, rewards)
        if name in _CHECKS
        else check_coefficient(name, value, rewards.values)
        for name, value in data.items()
    }


def _lengths(lengths: Any, rewards: Rewards) -> HostOrDevice:
    """Return tokens per sample, `[N]`; host data must not be negative."""
    tokens = as_numbers("lengths", lengths)
    expected = rewards.values.shape[:1]
    if tokens.shape != expected:
        raise ValueError(
            f"lengths must have shape {expected}, the tokens of each sample, got {tokens.shape}"
        )
    if isinstance(tokens, np.ndarray):
        bad = np.logical_or(~np.isfinite(tokens), tokens < 0)
        _refuse("lengths must be finite and not negative", tokens, bad, rewards.where)
    return tokens


def _greedy_rewards(greedy_rewards: Any, rewards: Rewards) -> HostOrDevice:
    """Return the greedy reward of each prompt, `[P]`, or `[P, C]` beside rewards `[N, C]`."""
    greedy = as_numbers("greedy_rewards", greedy_rewards)
    shape = rewards.values.shape
    expected = (shape[0] // rewards.group_size, *shape[1:])
    if greedy.shape != expected:
        raise ValueError(
            f"greedy_rewards must have shape {expected}, one greedy completion for each prompt, "
            f"for rewards of shape {shape} and num_generations={rewards.group_size}, "
            f"got {greedy.shape}"
        )
    if isinstance(greedy, np.ndarray):
        bad = ~np.isfinite(greedy).reshape(len(greedy), -1).all(axis=1)
        _refuse("greedy_rewards must be finite", greedy, bad, rewards.where)
    return greedy


def _refuse(
    promise: str,
    values: np.ndarray[Any, np.dtype[Any]],
    bad: Any,
    where: HostOrDevice | None,
) -> None:
    """Raise for the first bad row that belongs to a sample which is kept, as far as is seen."""
    if isinstance(where, jax.core.Tracer):
        return
    if where is not None:
        bad = bad & np.asarray(where).reshape(len(bad), -1).any(axis=1)
    if bad.any():
        place = int(np.argmax(bad))
        raise ValueError(f"{promise}, got {values[place]} at index {place}")


_CHECKS: Mapping[str, Callable[[Any, Rewards], HostOrDevice]] = {
    "lengths": _lengths,
    "greedy_rewards": _greedy_rewards,
    "k": lambda k, rewards: check_subset_size(k, rewards.group_size, rewards.values),
}
