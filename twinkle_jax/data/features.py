"""Twinkle's inputs: dictionaries of ragged lists, made rectangular on the host.

Everything here is NumPy, so that lengths that were never seen before compile nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from twinkle_jax.data.batch import IGNORE

_PER_TOKEN = ("labels", "attention_mask", "position_ids")
_IMAGES = ("pixel_values", "pixel_values_videos", "images", "videos")
Row = np.ndarray[Any, Any]
LOSS_INPUTS = ("advantages", "old_logps", "ref_logps")


def read_features(
    inputs: Any, template: Any = None, *, vocab_size: int, labels_needed: bool
) -> list[dict[str, Row]]:
    """Check input features, and encode trajectories; each becomes a dictionary of rows.

    Without labels, every token is scored that follows another one.
    """
    if isinstance(inputs, Mapping):
        inputs = [inputs]
    if not isinstance(inputs, Sequence) or isinstance(inputs, str | bytes) or not len(inputs):
        raise ValueError(
            "expected inputs to be a list of input features, dictionaries with 'input_ids', "
            f"got {inputs!r}"
        )
    return [
        _read(f"inputs[{i}]", _encoded(f"inputs[{i}]", x, template), vocab_size, labels_needed)
        for i, x in enumerate(inputs)
    ]


def _encoded(name: str, item: Any, template: Any) -> Mapping[str, Any]:
    if isinstance(item, Mapping) and item.get("input_ids") is not None:
        return item
    if template is None:
        found = sorted(item) if isinstance(item, Mapping) else type(item).__name__
        raise ValueError(
            f"expected 'input_ids' in {name}, got {found}; a trajectory needs a template, "
            "which set_template takes"
        )
    encoded = getattr(template, "encode", template)(item)
    if not isinstance(encoded, Mapping) or encoded.get("input_ids") is None:
        raise ValueError(f"expected the template to give 'input_ids' for {name}, got {encoded!r}")
    return encoded


def _read(
    name: str, feature: Mapping[str, Any], vocab_size: int, labels_needed: bool
) -> dict[str, Row]:
    for key in _IMAGES:
        if feature.get(key) is not None:
            raise ValueError(f"{name} holds {key!r}, but the model reads text only")
    tokens = _integers(f"{name}['input_ids']", feature["input_ids"])
    if not tokens.size:
        raise ValueError(f"{name}['input_ids'] is empty")
    _in_vocabulary(f"{name}['input_ids']", tokens, vocab_size)
    row = {"input_ids": tokens}
    for key in _PER_TOKEN:
        if feature.get(key) is not None:
            row[key] = _integers(f"{name}[{key!r}]", feature[key])
            if row[key].shape != tokens.shape:
                raise ValueError(
                    f"expected {name}[{key!r}] as long as 'input_ids', {tokens.size}, "
                    f"got {row[key].size}"
                )
    if "labels" not in row:
        if labels_needed:
            raise ValueError(f"expected 'labels' in {name}, got {sorted(feature)}")
        row["labels"] = np.append(tokens[1:], IGNORE)
    if "attention_mask" in row:
        row["labels"] = np.where(row["attention_mask"] != 0, row["labels"], IGNORE)
    labels = row["labels"][row["labels"] != IGNORE]
    _in_vocabulary(f"{name}['labels']", labels, vocab_size)
    return row


def _integers(name: str, values: Any) -> Row:
    array = np.asarray(values)
    if array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array.ndim != 1:
        raise ValueError(f"expected {name} to be a list of integers, got shape {array.shape}")
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"expected {name} to be integers, got {array.dtype}")
    return array.astype(np.int32)


def _in_vocabulary(name: str, tokens: Row, vocab_size: int) -> None:
    beyond = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if beyond.size:
        raise ValueError(f"expected {name} in [0, {vocab_size}), got {int(beyond[0])}")


def align_loss_input(name: str, data: Any, features: list[dict[str, Row]]) -> list[Row] | None:
    """Give one number a position, from numbers of a sequence, its labels or its positions."""
    if data is None:
        return None
    rows = None if getattr(data, "ndim", 1) == 0 or not hasattr(data, "__len__") else len(data)
    if rows != len(features):
        got = "a number" if rows is None else str(rows)
        raise ValueError(f"expected {name} with one row for each of {len(features)}, got {got}")
    return [
        _aligned(f"{name}[{i}]", row, feature["labels"], per_sequence=name == "advantages")
        for i, (row, feature) in enumerate(zip(data, features, strict=True))
    ]


def _aligned(name: str, values: Any, labels: Row, *, per_sequence: bool) -> Row:
    row = np.asarray(values, np.float32)
    labelled = labels != IGNORE
    count = int(labelled.sum())
    if row.ndim > 1:
        raise ValueError(f"expected {name} to be a row of numbers, got shape {row.shape}")
    if per_sequence and row.size == 1:
        return np.full(labels.shape, row.reshape(()), np.float32)
    if row.shape == labels.shape:
        return row
    if row.size > labels.size and row.ndim == 1:
        return _without_padding(name, row, labels)
    if row.shape != (count,):
        raise ValueError(
            f"expected {name} with a number for each of {labels.size} positions or of {count} "
            f"labelled ones, got shape {row.shape}"
        )
    spread = np.zeros(labels.shape, np.float32)
    spread[labelled] = row
    return spread


def _without_padding(name: str, row: Row, labels: Row) -> Row:
    """Cut a row of `forward_only`, which is padded on the right with zeros."""
    if np.any(row[labels.size :]):
        raise ValueError(f"expected {name} with {labels.size} numbers, got {row.size}")
    return row[: labels.size]
