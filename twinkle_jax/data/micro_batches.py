"""Ragged rows as rectangular batches, padded to buckets, a few rows at a time."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from twinkle_jax.data.batch import IGNORE, Batch
from twinkle_jax.data.buckets import bucket_size
from twinkle_jax.data.integers import Row

SMALLEST_TIME = 16


def micro_batches(
    features: list[dict[str, Row]],
    loss_inputs: Mapping[str, list[Row] | None],
    size: int | None,
    *,
    row_multiple: int = 1,
    time_multiple: int = 1,
) -> Iterator[tuple[Batch, int]]:
    """Cut rows into micro-batches, each padded to a bucket; also say how many rows are real.

    Args:
        features: checked input features.
        loss_inputs: numbers for each position that the loss needs, by their name in a batch.
        size: rows of a micro-batch; None for all.
        row_multiple: what the number of rows is a multiple of: the devices that they are spread
            over.
        time_multiple: the same for the padded length.
    """
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(f"micro_batch_size must be a positive int or None, got {size!r}")
    rows = bucket_size(len(features)) if size is None else size
    rows = -(-rows // row_multiple) * row_multiple
    for start in range(0, len(features), rows):
        part = slice(start, start + rows)
        batch = make_batch(
            features[part],
            {name: x if x is None else x[part] for name, x in loss_inputs.items()},
            rows=rows,
            multiple=time_multiple,
        )
        yield batch, len(features[part])


def make_batch(
    features: list[dict[str, Row]],
    loss_inputs: Mapping[str, list[Row] | None],
    *,
    rows: int,
    multiple: int = 1,
) -> Batch:
    """Pad features on the right to a bucket of the time axis, and add rows that only fill up."""
    longest = max(len(feature["input_ids"]) for feature in features)
    shape = (rows, bucket_size(longest, smallest=SMALLEST_TIME, multiple=multiple))

    def pad(values: list[Row], fill: int, dtype: Any = np.int32) -> Row:
        out = np.full(shape, fill, dtype)
        for i, row in enumerate(values):
            out[i, : len(row)] = row
        return out

    positions, mask = _positions(features), _mask(features)
    arrays: dict[str, Any] = {
        "tokens": pad([feature["input_ids"] for feature in features], 0),
        "labels": pad([feature["labels"] for feature in features], IGNORE),
        "mask": None if mask is None else pad(mask, 0) != 0,
        "rows": np.arange(rows) < len(features),
        "positions": None if positions is None else pad(positions, 0),
    }
    for name, values in loss_inputs.items():
        arrays[name] = None if values is None else pad(values, 0, np.float32)
    return Batch(**arrays)


def _positions(features: list[dict[str, Row]]) -> list[Row] | None:
    """Give the positions of all rows, if one has its own."""
    if not any("position_ids" in feature for feature in features):
        return None
    return [f.get("position_ids", _counted(f)) for f in features]


def _mask(features: list[dict[str, Row]]) -> list[Row] | None:
    """Give the masks of all rows, if one has padding before a token: behind, it needs none."""
    if not any(np.any(np.diff(feature.get("attention_mask", [])) > 0) for feature in features):
        return None
    return [f.get("attention_mask", np.ones_like(f["labels"])) for f in features]


def _counted(feature: dict[str, Row]) -> Row:
    """Count the tokens of a row from 0, without its padding."""
    kept = feature.get("attention_mask", np.ones_like(feature["input_ids"]))
    return np.maximum(np.cumsum(kept) - 1, 0).astype(np.int32)
