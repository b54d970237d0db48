"""Twinkle's input features: dictionaries of ragged lists, checked one by one on the host.

Everything here is NumPy, so that lengths that were never seen before compile nothing.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from twinkle_jax.data.batch import IGNORE
from twinkle_jax.data.integers import LARGEST, Row, cast_integers, read_integers
from twinkle_jax.data.packing import following_tokens, sequence_starts

Feature = dict[str, Row]
Inputs = Mapping[str, Any] | Sequence[Mapping[str, Any]]
Template = Callable[[Mapping[str, Any]], Mapping[str, Any]]

READ = ("input_ids", "labels", "attention_mask", "position_ids")
BESIDE = ("messages", "tools", "user_data", "length")  # a trajectory's own, which change nothing
_TEXT_ONLY = "the model reads text only"
_PACKED = "where another sequence begins, 'position_ids' start again at 0"
_ARGUMENT = "it is an argument of forward_backward"
_HINTS = {
    "segment_ids": _PACKED,
    "cu_seqlens": _PACKED,
    "completion_mask": "'labels' are -100 where there is no loss",
    "pixel_values": _TEXT_ONLY,
    "pixel_values_videos": _TEXT_ONLY,
    "images": _TEXT_ONLY,
    "videos": _TEXT_ONLY,
    "advantages": _ARGUMENT,
    "old_logps": _ARGUMENT,
    "ref_logps": _ARGUMENT,
}


def read_features(
    inputs: Inputs, template: Any = None, *, vocab_size: int, labels_needed: bool
) -> list[Feature]:
    """Check input features, and encode trajectories; each becomes a dictionary of rows.

    Args:
        inputs: input features, or trajectories for the template.
        template: an object with `encode`, or a function, from a trajectory to an input feature.
        vocab_size: token ids and labels are below it.
        labels_needed: whether to refuse features without labels. Otherwise every token is scored
            that follows another one of its sequence.

    Raises:
        ValueError: for unknown keys, lengths that differ, token ids outside the vocabulary.
        TypeError: for what is not integers.
    """
    features = []
    for i, item in enumerate(_listed(inputs)):
        name = f"inputs[{i}]"
        feature = _encoded(name, item, template)
        _check_keys(name, feature)
        features.append(_read(name, feature, vocab_size, labels_needed))
    return features


def _listed(inputs: Any) -> Sequence[Any]:
    if isinstance(inputs, Mapping):
        return [inputs]
    if not isinstance(inputs, Sequence) or isinstance(inputs, str | bytes) or not len(inputs):
        raise ValueError(
            "inputs must be a list of input features, dictionaries with 'input_ids', "
            f"got {inputs!r}"
        )
    return inputs


def _encoded(name: str, item: Any, template: Any) -> Mapping[str, Any]:
    if not isinstance(item, Mapping):
        raise TypeError(
            f"{name} must be a dictionary such as {{'input_ids': [5, 6, 7]}}, "
            f"got {type(item).__name__}"
        )
    if item.get("input_ids") is not None:
        return item
    if template is None:
        raise ValueError(
            f"{name} must have 'input_ids', got {sorted(item)}; a trajectory needs a template, "
            "which set_template takes"
        )
    encoded = getattr(template, "encode", template)(item)
    if not isinstance(encoded, Mapping) or encoded.get("input_ids") is None:
        raise ValueError(f"the template must give 'input_ids' for {name}, got {encoded!r}")
    return encoded


def _check_keys(name: str, feature: Mapping[str, Any]) -> None:
    """Refuse keys that nobody reads: what they mean would be left out without a word."""
    for key, value in feature.items():
        if value is None or key in READ or key in BESIDE:
            continue
        near = difflib.get_close_matches(str(key), READ, n=1)
        hint = _HINTS.get(key, f"did you mean {near[0]!r}?" if near else "")
        raise ValueError(
            f"{name} must have keys among {', '.join(READ)}, got {key!r}" + (hint and f": {hint}")
        )


def _read(name: str, feature: Mapping[str, Any], vocab_size: int, labels_needed: bool) -> Feature:
    tokens = _row(f"{name}['input_ids']", feature["input_ids"])
    if not tokens.size:
        raise ValueError(f"{name}['input_ids'] must have at least one token, got none")
    row = {"input_ids": cast_integers(f"{name}['input_ids']", tokens, 0, vocab_size - 1)}
    for key in READ[1:]:
        if feature.get(key) is not None:
            row[key] = _row(f"{name}[{key!r}]", feature[key], boolean=key == "attention_mask")
            if row[key].shape != tokens.shape:
                raise ValueError(
                    f"{name}[{key!r}] must be as long as 'input_ids', {tokens.size}, "
                    f"got {row[key].size}"
                )
    if "attention_mask" in row:
        row["attention_mask"] = cast_integers(
            f"{name}['attention_mask']", row["attention_mask"], 0, 1
        )
    kept = row.get("attention_mask", np.ones_like(row["input_ids"])) != 0
    starts = None
    if "position_ids" in row:
        place = f"{name}['position_ids']"
        row["position_ids"] = cast_integers(place, row["position_ids"], 0, LARGEST)
        starts = sequence_starts(place, row["position_ids"], kept)
        row["starts"] = starts
    if "labels" not in row:
        if labels_needed:
            raise ValueError(f"{name} must have 'labels', got {sorted(feature)}")
        row["labels"] = following_tokens(row["input_ids"], kept, starts)
    labels = np.where(kept, row["labels"], IGNORE)
    scored = labels != IGNORE
    cast_integers(f"{name}['labels']", labels[scored], 0, vocab_size - 1)
    row["labels"] = labels.astype(np.int32)
    return row


def _row(name: str, values: Any, *, boolean: bool = False) -> Row:
    if boolean and getattr(np.asarray(values), "dtype", None) == np.bool_:
        values = np.asarray(values).astype(np.int32)
    array = read_integers(name, values)
    if array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array.ndim != 1:
        raise ValueError(f"{name} must be a list of integers, got shape {array.shape}")
    return array
