"""Advantages and log-probabilities beside input features, aligned with their positions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from twinkle_jax.data.batch import IGNORE
from twinkle_jax.data.integers import Row
from twinkle_jax.data.packing import Piece

LOSS_INPUTS = ("advantages", "old_logps", "ref_logps")
PerSequence = Sequence[Any] | ArrayLike


def align_loss_input(
    name: str, data: PerSequence | None, features: list[dict[str, Row]], pieces: list[Piece]
) -> list[Row] | None:
    """Give one number a position, from numbers of a sequence, its labels or its positions.

    Args:
        name: `"advantages"`, which may be one number a row, or log-probabilities.
        data: one entry for each input feature, or for each sequence where rows are packed.
        features: the input features.
        pieces: their sequences.

    Returns:
        A row for each sequence; None if there is nothing to align.
    """
    if data is None:
        return None
    given: Any = data
    count = None if getattr(given, "ndim", 1) == 0 or not hasattr(given, "__len__") else len(given)
    if count == len(features):
        rows = [_align(f"{name}[{i}]", x, f, name) for i, (x, f) in _zip(given, features)]
        return [rows[piece.row][piece.columns] for piece in pieces]
    if count == len(pieces):
        sequences = [piece.feature for piece in pieces]
        return [_align(f"{name}[{i}]", x, f, name) for i, (x, f) in _zip(given, sequences)]
    got = "a number" if count is None else str(count)
    packed = f" or each of {len(pieces)} sequences" if len(pieces) != len(features) else ""
    raise ValueError(f"{name} must have one row for each of {len(features)}{packed}, got {got}")


def _zip(data: Any, features: list[dict[str, Row]]) -> Any:
    return enumerate(zip(data, features, strict=True))


def _align(place: str, values: Any, feature: dict[str, Row], name: str) -> Row:
    row, labels = np.asarray(values, np.float32), feature["labels"]
    labelled = labels != IGNORE
    count = int(labelled.sum())
    if row.ndim > 1:
        raise ValueError(f"{place} must be a row of numbers, got shape {row.shape}")
    if name == "advantages" and row.size == 1:
        return np.full(labels.shape, row.reshape(()), np.float32)
    if row.shape == labels.shape:
        return row
    if row.ndim == 1 and row.size > labels.size:
        return _without_padding(place, row, labels)
    if row.shape != (count,):
        raise ValueError(
            f"{place} must have a number for each of {labels.size} positions or of {count} "
            f"labelled ones, got shape {row.shape}"
        )
    spread = np.zeros(labels.shape, np.float32)
    spread[labelled] = row
    return spread


def _without_padding(place: str, row: Row, labels: Row) -> Row:
    """Cut a row of `forward_only`, which is padded on the right with zeros."""
    if np.any(row[labels.size :]):
        raise ValueError(f"{place} must have {labels.size} numbers, got {row.size}")
    return row[: labels.size]
