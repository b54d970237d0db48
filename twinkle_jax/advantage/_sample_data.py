"""What some estimators need beside the rewards, checked like them: lengths, greedy rewards."""

from typing import Any

import jax
import numpy as np

from twinkle_jax.advantage._rewards import HostOrDevice, as_numbers


def check_lengths(lengths: Any, num_samples: int, mask: HostOrDevice | None) -> HostOrDevice:
    """Return tokens per sample, `[N]`; host data must not be negative."""
    tokens = as_numbers("lengths", lengths)
    if tokens.shape != (num_samples,):
        raise ValueError(
            f"lengths must have shape {(num_samples,)}, the tokens of each sample, "
            f"got {tokens.shape}"
        )
    if isinstance(tokens, np.ndarray):
        bad = ~np.isfinite(tokens) | (tokens < 0)
        if bad.any() and not isinstance(mask, jax.core.Tracer):
            bad &= _in_use(mask, num_samples)
            if bad.any():
                place = int(np.argmax(bad))
                raise ValueError(
                    f"lengths must be finite and not negative, got {tokens[place]} at index {place}"
                )
    return tokens


def check_greedy_rewards(
    greedy_rewards: Any, rewards: HostOrDevice, num_generations: int, mask: HostOrDevice | None
) -> HostOrDevice:
    """Return the greedy reward of each prompt, `[P]`, or `[P, C]` beside rewards `[N, C]`."""
    greedy = as_numbers("greedy_rewards", greedy_rewards)
    num_groups = rewards.shape[0] // num_generations
    expected = (num_groups, *rewards.shape[1:])
    if greedy.shape != expected:
        raise ValueError(
            f"greedy_rewards must have shape {expected}, one greedy completion for each prompt, "
            f"for rewards of shape {rewards.shape} and num_generations={num_generations}, "
            f"got {greedy.shape}"
        )
    if isinstance(greedy, np.ndarray):
        bad = ~np.isfinite(greedy).reshape(num_groups, -1).all(axis=1)
        if bad.any() and not isinstance(mask, jax.core.Tracer):
            bad &= _in_use(mask, num_groups)
            if bad.any():
                place = int(np.argmax(bad))
                raise ValueError(
                    f"greedy_rewards must be finite, got {greedy[place]} at index {place}"
                )
    return greedy


def _in_use(mask: HostOrDevice | None, rows: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Tell the rows of data that some sample which is kept belongs to."""
    keep = np.ones(rows, bool) if mask is None else np.asarray(mask)
    return np.asarray(keep.reshape(rows, -1).any(axis=1))
