"""Twinkle's input features on the host: checks, packed rows, per-token inputs of losses.

Everything here is NumPy, so that new lengths compile nothing. Packed sequences, whose positions
start again at 0, become separate rows, so attention, linear layers, losses that average over
sequences and dropout need no special case.
"""

import difflib
import functools
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike

from twinkle_jax.data.batch import LARGEST, NO_EXPERT, HostArray, cast_integers, read_integers
from twinkle_jax.data.trajectory import IGNORE

Feature = dict[str, HostArray]
Inputs = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Input features, or trajectories for a template to encode: one, or a list."""
PerSequence = Sequence[Any] | ArrayLike
"""Numbers for sequences: one each, or one for each of their labels or positions."""

LOSS_INPUTS = ("advantages", "old_logps", "ref_logps")
PER_TOKEN = ("labels", "attention_mask", "position_ids")
_READ = ("input_ids", *PER_TOKEN, "routed_experts")
_IGNORED = ("messages", "tools", "user_data", "length")  # a trajectory's own
_TEXT_ONLY = "the model reads text only"
_PACKED = "where another sequence begins, 'position_ids' start again at 0"
_ARGUMENT = "it is an argument of forward_backward"
_HINTS = {
    "segment_ids": _PACKED,
    "cu_seqlens": _PACKED,
    **dict.fromkeys(
        ("completion_mask", "loss_mask", "assistant_masks"),
        "'labels' are -100 where there is no loss",
    ),
    "attn_mask": "did you mean 'attention_mask'?",
    "pixel_values": _TEXT_ONLY,
    "pixel_values_videos": _TEXT_ONLY,
    "images": _TEXT_ONLY,
    "videos": _TEXT_ONLY,
    **dict.fromkeys(LOSS_INPUTS, _ARGUMENT),
}


class Piece(NamedTuple):
    """One sequence of a packed row, and its place there.

    Attributes:
        row: index of the input feature.
        columns: its columns there.
        feature: the input feature of the sequence alone.
    """

    row: int
    columns: slice
    feature: Feature


def read_features(
    inputs: Inputs,
    template: Any = None,
    *,
    vocab_size: int,
    labels_needed: bool,
    other_columns: bool = False,
) -> list[Feature]:
    """Check input features, and encode trajectories; each becomes a dictionary of arrays.

    Args:
        inputs: input features, or trajectories for the template.
        template: an object with `encode`, or a function, from a trajectory to an input feature.
        vocab_size: token ids and labels are below it.
        labels_needed: whether to refuse features without labels. Otherwise every token is scored
            that follows another one of its sequence.
        other_columns: whether features may have further keys, such as the columns of a data set;
            known keys that belong elsewhere, and those that are nearly one that is read, are still
            refused.

    Raises:
        ValueError: for unknown keys, lengths that differ, ids outside the vocabulary, and positions
            that neither count up nor start again at 0.
        TypeError: for items that are not dictionaries, and arrays that are not integers.
    """
    items: Any = [inputs] if isinstance(inputs, Mapping) else inputs
    if not isinstance(items, Sequence) or isinstance(items, str | bytes) or not len(items):
        raise ValueError(
            "inputs must be a list of input features, dictionaries with 'input_ids', "
            f"got {inputs!r}"
        )
    features = []
    for i, item in enumerate(items):
        name = f"inputs[{i}]"
        feature = _encode(name, item, template)
        _check_keys(name, feature, other_columns)
        features.append(_read(name, feature, vocab_size, labels_needed))
    return features


def _encode(name: str, item: Any, template: Any) -> Mapping[str, Any]:
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


def _check_keys(name: str, feature: Mapping[str, Any], other_columns: bool) -> None:
    """Refuse keys that are not read, instead of ignoring them."""
    for key, value in feature.items():
        if value is None or key in _READ or key in _IGNORED:
            continue
        # A column of a data set may be called 'label', but hardly 'atention_mask'.
        near = _misspelt(str(key), 0.92 if other_columns else 0.6)
        if other_columns and not near and key not in _HINTS:
            continue
        hint = _HINTS.get(key, f"did you mean {near!r}?" if near else "")
        raise ValueError(
            f"{name} must have keys among {', '.join(_READ)}, got {key!r}" + (hint and f": {hint}")
        )


@functools.cache  # every row has the same keys
def _misspelt(key: str, cutoff: float) -> str:
    """Find the key that is read and looks like this one; empty if there is none."""
    return "".join(difflib.get_close_matches(key, _READ, n=1, cutoff=cutoff))


def _read(name: str, feature: Mapping[str, Any], vocab_size: int, labels_needed: bool) -> Feature:
    tokens = _row(f"{name}['input_ids']", feature["input_ids"])
    if not tokens.size:
        raise ValueError(f"{name}['input_ids'] must have at least one token, got none")
    row = {"input_ids": cast_integers(f"{name}['input_ids']", tokens, 0, vocab_size - 1)}
    for key in PER_TOKEN:
        if feature.get(key) is not None:
            row[key] = _row(f"{name}[{key!r}]", feature[key], boolean=key == "attention_mask")
            if row[key].shape != tokens.shape:
                raise ValueError(
                    f"{name}[{key!r}] must be as long as 'input_ids', {tokens.size}, "
                    f"got {row[key].size}"
                )
    if "attention_mask" in row:
        place = f"{name}['attention_mask']"
        row["attention_mask"] = cast_integers(place, row["attention_mask"], 0, 1)
    kept = row.get("attention_mask", np.ones_like(row["input_ids"])) != 0
    if "position_ids" in row:
        place = f"{name}['position_ids']"
        row["position_ids"] = cast_integers(place, row["position_ids"], 0, LARGEST)
        row["starts"] = _sequence_starts(place, row["position_ids"], kept)
    if "labels" not in row:
        if labels_needed:
            raise ValueError(f"{name} must have 'labels', got {sorted(feature)}")
        row["labels"] = _following_tokens(row["input_ids"], kept, row.get("starts"))
    labels = np.where(kept, row["labels"], IGNORE)
    cast_integers(f"{name}['labels']", labels[labels != IGNORE], 0, vocab_size - 1)
    row["labels"] = labels.astype(np.int32)
    _check_shift(f"{name}['labels']", row["input_ids"], row["labels"])
    if feature.get("routed_experts") is not None:
        row["routed_experts"] = _experts(f"{name}['routed_experts']", feature, len(tokens))
    return row


def _check_shift(name: str, tokens: HostArray, labels: HostArray) -> None:
    """Refuse labels as transformers' models take them, each the token at its own position."""
    at = np.flatnonzero(labels[:-1] != IGNORE)
    if len(at) < 2 or (labels[at] != tokens[at]).any() or (labels[at] == tokens[at + 1]).all():
        return
    raise ValueError(
        f"{name} must be the token that follows each position, got the tokens at the positions "
        "themselves: shift them by one to the left"
    )


def _experts(name: str, feature: Mapping[str, Any], size: int) -> HostArray:
    """Read the experts of each token, and fill up with no expert."""
    experts = cast_integers(name, read_integers(name, feature["routed_experts"]))
    if experts.ndim != 3 or experts[size:].any():  # `forward_only` adds zeros
        raise ValueError(
            f"{name} must have the shape [{size}, layers, chosen], got {experts.shape}"
        )
    return np.pad(
        experts[:size],
        [(0, max(size - len(experts), 0)), (0, 0), (0, 0)],
        constant_values=NO_EXPERT,
    )


def _row(name: str, values: Any, *, boolean: bool = False) -> HostArray:
    if boolean and np.asarray(values).dtype == np.bool_:
        values = np.asarray(values).astype(np.int32)
    array = read_integers(name, values)
    if array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array.ndim != 1:
        raise ValueError(f"{name} must be a list of integers, got shape {array.shape}")
    return array


def _sequence_starts(name: str, positions: HostArray, kept: HostArray) -> HostArray:
    """Find the tokens where another sequence begins: their position is 0."""
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


def _following_tokens(tokens: HostArray, kept: HostArray, starts: HostArray | None) -> HostArray:
    """Label each token with the one that follows it in its sequence; −100 where none does."""
    columns = np.flatnonzero(kept)
    labels = np.full(tokens.shape, IGNORE, np.int32)
    labels[columns[:-1]] = tokens[columns[1:]]
    if starts is not None:
        labels[columns[:-1][starts[columns[1:]]]] = IGNORE
    return labels


def split_packed(features: list[Feature]) -> list[Piece]:
    """Split packed rows into their sequences; every column belongs to one of them.

    Positions that count from 0 are dropped: they are a decoder's default.
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


def _counts_from_zero(feature: Feature) -> bool:
    if "position_ids" not in feature:
        return False
    positions = feature["position_ids"]
    if "attention_mask" in feature:
        positions = positions[feature["attention_mask"] != 0]
    return bool(np.array_equal(positions, np.arange(len(positions))))


def write_pieces(out: HostArray, values: HostArray, pieces: list[Piece]) -> None:
    """Write results of sequences to their rows and columns."""
    for piece, row in zip(pieces, values, strict=False):
        columns = piece.columns
        out[piece.row, columns] = row[: columns.stop - columns.start]


def align_loss_input(
    name: str, data: PerSequence | None, features: list[Feature], pieces: list[Piece]
) -> list[HostArray] | None:
    """Spread the numbers that a loss needs over positions; return a row for each sequence.

    `data` has an entry for each input feature, or for each sequence where rows are packed: a number
    for each label, for each position, or for each position and the padding that `forward_only`
    adds. `"advantages"` may be one number a sequence.
    """
    if data is None:
        return None
    entries: Any = data
    unsized = getattr(entries, "ndim", 1) == 0 or not hasattr(entries, "__len__")
    count = None if unsized else len(entries)
    if count == len(features):
        rows = [_align(name, i, x, features[i]) for i, x in enumerate(entries)]
        return [rows[piece.row][piece.columns] for piece in pieces]
    if count == len(pieces):
        return [_align(name, i, x, pieces[i].feature) for i, x in enumerate(entries)]
    got = "a number" if count is None else str(count)
    packed = f" or each of {len(pieces)} sequences" if len(pieces) != len(features) else ""
    raise ValueError(f"{name} must have one row for each of {len(features)}{packed}, got {got}")


def align_teacher(
    logprobs: Any,
    tokens: Any,
    features: list[Feature],
    pieces: list[Piece],
    count: int | None = None,
) -> dict[str, list[HostArray]]:
    """Split a teacher's likely tokens into the sequences of a batch; keep the `count` likeliest.

    `logprobs` and their `tokens` have for each input feature a row of at least its positions, with
    k numbers at each.

    Returns:
        `teacher_logprobs` and `teacher_tokens`, each with an array [time, k] for each sequence.

    Raises:
        ValueError: if a row is too short, or the two differ in shape.
    """
    aligned: dict[str, list[HostArray]] = {"teacher_logprobs": [], "teacher_tokens": []}
    for name, values in (("teacher_logprobs", logprobs), ("teacher_tokens", tokens)):
        if len(values) != len(features):
            raise ValueError(f"{name} must have a row for each of {len(features)}")
        for piece in pieces:
            row = np.asarray(values[piece.row])
            size = len(features[piece.row]["labels"])
            if row.ndim != 2 or len(row) < size:
                raise ValueError(
                    f"{name}[{piece.row}] must have the shape ({size}, k), got {row.shape}"
                )
            aligned[name].append(row[:size][piece.columns])
    shapes = [{row.shape[1] for row in rows} for rows in aligned.values()]
    if shapes[0] != shapes[1] or len(shapes[0]) != 1:
        raise ValueError(f"teacher_tokens must have the shape of teacher_logprobs, got {shapes}")
    if count is not None:
        for i, row in enumerate(aligned["teacher_logprobs"]):
            kept, places = largest_logits(row, count)
            aligned["teacher_logprobs"][i] = kept
            aligned["teacher_tokens"][i] = np.take_along_axis(
                aligned["teacher_tokens"][i], places, axis=-1
            )
    return aligned


def largest_logits(logits: Any, count: int | None = None) -> tuple[HostArray, HostArray]:
    """Find the likely tokens of a teacher, for [`GKDLoss`][twinkle_jax.loss.GKDLoss].

    Args:
        logits: [..., vocabulary]. A constant added to those of a position changes nothing.
        count: how many tokens of each position; None for all.

    Returns:
        Logits, the largest first, and their tokens, [..., count] each: the `teacher` of
        [`grad_features`][twinkle_jax.training.grad_features].

    Raises:
        ValueError: if `count` is below 1.

    Example:
        >>> logits, tokens = largest_logits([[0.0, 3.0, 1.0, 2.0]], 2)
        >>> logits.tolist(), tokens.tolist()
        ([[3.0, 2.0]], [[1, 3]])
    """
    if count is not None and count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    values = np.asarray(logits, np.float32)
    order = np.argsort(-values, axis=-1, kind="stable")[..., :count].astype(np.int32)
    return np.take_along_axis(values, order, axis=-1), order


def _align(name: str, index: int, values: Any, feature: Feature) -> HostArray:
    labels, place = feature["labels"], f"{name}[{index}]"
    if values is None or (isinstance(values, list | tuple) and any(x is None for x in values)):
        raise TypeError(f"{place} must be numbers, got None")  # which NumPy would make NaN
    row, labelled = np.asarray(values, np.float32), labels != IGNORE
    if row.ndim > 1:
        raise ValueError(f"{place} must be a row of numbers, got shape {row.shape}")
    if name == "advantages" and row.size == 1:
        return np.full(labels.shape, row.reshape(()), np.float32)
    if row.shape == labels.shape:
        return row
    if row.ndim == 1 and row.size > labels.size:
        # A row of `forward_only`, which is padded on the right with zeros.
        if np.any(row[labels.size :]):
            raise ValueError(f"{place} must have {labels.size} numbers, got {row.size}")
        return row[: labels.size]
    if row.shape != (labelled.sum(),):
        raise ValueError(
            f"{place} must have a number for each of {labels.size} positions or of "
            f"{labelled.sum()} labelled ones, got shape {row.shape}"
        )
    spread = np.zeros(labels.shape, np.float32)
    spread[labelled] = row
    return spread
