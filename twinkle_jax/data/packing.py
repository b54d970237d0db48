"""Rows that hold several sequences, taken apart, so that each is computed as it is alone.

Twinkle and transformers tell packed sequences apart by their positions, which start again at 0.
On the host they become rows of their own: attention, linear layers, losses that average over
sequences and the noise of dropout then need not know that they came together.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from twinkle_jax.data.batch import IGNORE
from twinkle_jax.data.integers import Row


class Piece(NamedTuple):
    """One sequence, and where it came from.

    Attributes:
        row: number of the input feature.
        columns: its columns there.
        feature: the input feature of the sequence alone.
    """

    row: int
    columns: slice
    feature: dict[str, Row]


def sequence_starts(name: str, positions: Row, kept: Row) -> Row:
    """Find the tokens where another sequence begins: their position is 0.

    Raises:
        ValueError: if positions neither count up by 1 nor start again.
    """
    starts = np.zeros(positions.shape, bool)
    columns = np.flatnonzero(kept)
    before, here = positions[columns[:-1]], positions[columns[1:]]
    jumps = (here != before + 1) & (here != 0)
    if jumps.any():
        at = np.flatnonzero(jumps)[0]
        raise ValueError(
            f"{name} must count up by 1, or start again at 0 where another sequence begins, "
            f"got {here[at]} after {before[at]}"
        )
    starts[columns[1:][here == 0]] = True
    return starts


def following_tokens(tokens: Row, kept: Row, starts: Row | None) -> Row:
    """Label each token with the one that follows it in its sequence; −100 where none does."""
    columns = np.flatnonzero(kept)
    labels = np.full(tokens.shape, IGNORE, np.int32)
    labels[columns[:-1]] = tokens[columns[1:]]
    if starts is not None:
        labels[columns[:-1][starts[columns[1:]]]] = IGNORE
    return labels


def split_packed(features: list[dict[str, Row]]) -> list[Piece]:
    """Take rows apart where another sequence starts; all columns of a row go to one of its pieces.

    Positions that only count from 0 are dropped: that is what a decoder does without them.
    """
    pieces = []
    for row, feature in enumerate(features):
        arrays = {key: values for key, values in feature.items() if key != "starts"}
        size = len(arrays["input_ids"])
        starts = feature.get("starts", np.zeros(size, bool))
        bounds = [0, *(int(start) for start in np.flatnonzero(starts)), size]
        for begin, end in pairwise(bounds):
            columns = slice(begin, end)
            piece = {key: values[columns] for key, values in arrays.items()}
            if _counts_from_zero(piece):
                del piece["position_ids"]
            pieces.append(Piece(row, columns, piece))
    return pieces


def write_pieces(out: Row, values: Row, pieces: list[Piece]) -> None:
    """Write what was computed for sequences where they came from."""
    for piece, row in zip(pieces, values, strict=False):
        columns = piece.columns
        out[piece.row, columns] = row[: columns.stop - columns.start]


def _counts_from_zero(feature: dict[str, Row]) -> bool:
    if "position_ids" not in feature:
        return False
    positions = feature["position_ids"]
    if "attention_mask" in feature:
        positions = positions[feature["attention_mask"] != 0]
    return bool(np.array_equal(positions, np.arange(len(positions))))
