"""Twinkle's side inputs: ragged lists of response tokens, put where the labels are."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float

from twinkle_jax.loss.masked_inputs import Mask, PerToken
from twinkle_jax.loss.twinkle.inputs.labels import Labels

SampleArray = Array | np.ndarray[Any, Any]
SampleValues = SampleArray | Sequence[SampleArray | Sequence[float] | float]
"""Numbers of samples: an array [batch, time], one number each, or a row of numbers each."""

Lengths = np.ndarray[Any, Any]


def aligned(
    name: str, data: SampleValues, labels: Labels, dtype: DTypeLike, *, per_sequence: bool = False
) -> PerToken:
    """Give one number a position from an array, or from rows as the sampler returns them.

    Args:
        name: what the caller calls `data`, for messages.
        data: an array [batch, time]; or for each sequence a row, with a number for each position,
            or for each labelled position only. With `per_sequence` also one number a sequence.
        labels: the labels of the batch.
        dtype: type of the result.
        per_sequence: whether one number may stand for a whole sequence.

    Returns:
        An array [batch, time]. Positions that no number was given for hold 0.

    Raises:
        ValueError: if the number of rows or the length of a row does not fit.
        TypeError: if `data` is neither an array nor rows, or its numbers are not real.
    """
    batch, time = labels.mask.shape
    if not isinstance(data, list | tuple) and getattr(data, "shape", ()) == ():
        raise TypeError(f"{name} must be an array or a list of rows, got {type(data).__name__}")
    if len(data) != batch:
        raise ValueError(f"{name} must have one row for each of {batch} sequences, got {len(data)}")
    rows, lengths = _rectangle(name, data, dtype, per_sequence)
    if rows.shape == (batch, time) and (lengths == time).all():
        return rows
    if per_sequence and (lengths == 1).all():
        return jnp.broadcast_to(rows[:, :1], (batch, time))
    _check_lengths(name, lengths, labels)
    return _scattered(rows, lengths, labels.mask)


def _rectangle(
    name: str, data: Any, dtype: DTypeLike, per_sequence: bool
) -> tuple[Float[Array, "batch width"], Lengths]:
    """Make one array of the rows, filled up on the right, and say how long each of them was."""
    if hasattr(data, "dtype"):
        rows = _numbers(name, data)
        if per_sequence and rows.ndim == 1:
            rows = rows[:, None]
        if rows.ndim != 2:
            raise ValueError(f"{name} must have a row for each sequence, got shape {rows.shape}")
        return jnp.asarray(rows, dtype), np.full(rows.shape[0], rows.shape[1])
    ragged = [_numbers(f"{name}[{index}]", row) for index, row in enumerate(data)]
    if per_sequence and all(row.size == 1 for row in ragged):
        ragged = [row.reshape(1) for row in ragged]
    for index, row in enumerate(ragged):
        if row.ndim != 1:
            raise ValueError(f"{name}[{index}] must be a row of numbers, got shape {row.shape}")
    lengths = np.asarray([row.size for row in ragged], int)
    filled = [(row, (0, int(lengths.max(initial=1)) - row.size)) for row in ragged]
    if all(isinstance(row, np.ndarray) for row in ragged):
        return jnp.asarray(np.stack([np.pad(*pair) for pair in filled]), dtype), lengths
    return jnp.stack([jnp.pad(jnp.asarray(row, dtype), width) for row, width in filled]), lengths


def _numbers(name: str, values: Any) -> Any:
    """Turn numbers into an array: a NumPy one where possible, which costs no compilation."""
    if not hasattr(values, "dtype"):
        traced = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(values))
        values = jnp.asarray(values) if traced else np.asarray(values, dtype=float)
    elif not isinstance(values, jax.Array):
        values = np.asarray(values)
    if not jnp.isdtype(values.dtype, ("integral", "real floating")):
        raise TypeError(f"{name} must be real numbers, got {values.dtype}")
    return values


def _check_lengths(name: str, lengths: Lengths, labels: Labels) -> None:
    time = labels.mask.shape[1]
    for index, length in enumerate(lengths):
        count = None
        if labels.known is not None:
            count = int((labels.known[index] != labels.ignore_index).sum())
        if length > time or (length < time and count not in (None, length)):
            tokens = "" if count is None else f"{count} numbers (one a labelled token) or "
            raise ValueError(
                f"{name}[{index}] must have {tokens}{time} numbers (one a position), got {length}"
            )


def _scattered(rows: Float[Array, "batch width"], lengths: Lengths, mask: Mask) -> PerToken:
    """Put the n-th number of a row at its n-th labelled position, unless it covers them all."""
    time = mask.shape[1]
    rows = jnp.pad(rows, ((0, 0), (0, time - rows.shape[1])))
    rank = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    spread = jnp.take_along_axis(rows, rank, axis=1)
    # A wrong length shows only here when labels are traced: it must not go unnoticed.
    fits = jnp.sum(mask, axis=1, keepdims=True) == lengths[:, None]
    spread = jnp.where(mask, jnp.where(fits, spread, jnp.nan), 0)
    return jnp.where(lengths[:, None] == time, rows, spread)
