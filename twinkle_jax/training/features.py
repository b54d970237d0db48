"""Scores and gradients of input features: rows of any length, which may be packed sequences."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from twinkle_jax.data import Batch, Inputs, Piece
from twinkle_jax.data.batch import micro_batches
from twinkle_jax.data.features import (
    LOSS_INPUTS,
    PER_TOKEN,
    align_loss_input,
    align_teacher,
    read_features,
    split_packed,
    write_pieces,
)
from twinkle_jax.data.rows import to_lists
from twinkle_jax.loss import GKDLoss, Loss
from twinkle_jax.model import DecoderConfig, Params
from twinkle_jax.model.decoder.sharding import batch_sharding
from twinkle_jax.sampler.sizes import check_count
from twinkle_jax.training.gradient import StepSummary, grad_step
from twinkle_jax.training.packing import assign_lines
from twinkle_jax.training.score import score_batch
from twinkle_jax.training.state import TrainState

_LOSS_INPUTS = (*LOSS_INPUTS, "sampler_logps")


class FeatureRows(NamedTuple):
    """Checked input features, and the sequences that are packed in them.

    Attributes:
        features: the rows, with NumPy arrays.
        pieces: their sequences: one a row, or several where `position_ids` start again at 0.

    Example:
        >>> feature = {"input_ids": [5, 6, 7], "position_ids": [0, 1, 0]}
        >>> rows = FeatureRows.read([feature], vocab_size=8)
        >>> rows.shape, [piece.feature["labels"].tolist() for piece in rows.pieces]
        ((1, 3), [[6, -100], [-100]])
    """

    features: list[dict[str, Any]]
    pieces: list[Piece]

    @classmethod
    def read(
        cls, inputs: Inputs, template: Any = None, *, vocab_size: int, labels_needed: bool = False
    ) -> "FeatureRows":
        """Check input features, and encode trajectories.

        Args:
            inputs: dictionaries with `input_ids`, and perhaps `labels`, `attention_mask`,
                `position_ids` and `routed_experts`, the experts of its tokens in each layer,
                [time, layers, chosen], where there may be fewer than tokens; or trajectories. Other
                columns of a data set are not read.
            template: what encodes trajectories.
            vocab_size: token ids and labels are below it.
            labels_needed: whether to refuse features without labels. Otherwise every token is a
                label that follows another one of its sequence.

        Raises:
            ValueError: for keys that are other arguments, or nearly one of the above, lengths that
                differ, or ids outside the vocabulary.
            TypeError: for arrays that are not integers.
        """
        features = read_features(
            inputs,
            template,
            vocab_size=vocab_size,
            labels_needed=labels_needed,
            other_columns=True,
        )
        return cls(features, split_packed(features))

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and length of the longest."""
        return len(self.features), max(len(feature["labels"]) for feature in self.features)

    def align(self, loss_inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Align advantages and log-probabilities with the positions of each sequence."""
        if unknown := sorted(loss_inputs.keys() - _LOSS_INPUTS):
            raise ValueError(
                f"loss_inputs must have keys among {', '.join(_LOSS_INPUTS)}, got {unknown}"
            )
        return {
            name: align_loss_input(name, values, self.features, self.pieces)
            for name, values in loss_inputs.items()
        }

    def batches(
        self,
        loss_inputs: Mapping[str, Any],
        size: int | None = None,
        mesh: Mesh | None = None,
    ) -> Iterator[tuple[Batch, list[Piece]]]:
        """Cut the sequences into micro-batches of a few shapes, spread over a mesh.

        Args:
            loss_inputs: from `align`.
            size: sequences at a time; None for all.
            mesh: devices; None for one.

        Yields:
            A micro-batch and its sequences; further rows are padding.
        """
        multiples = {}
        if mesh is not None:
            multiples["row_multiple"] = mesh.shape["data"] * mesh.shape["fsdp"]
            multiples["time_multiple"] = mesh.shape["tensor"]
        done = 0
        sequences = [piece.feature for piece in self.pieces]
        for batch, count in micro_batches(sequences, loss_inputs, size, **multiples):
            placed = batch if mesh is None else jax.device_put(batch, batch_sharding(mesh))
            yield placed, self.pieces[done : done + count]
            done += count

    def write(
        self, outputs: dict[str, np.ndarray], name: str, values: Any, pieces: list[Piece]
    ) -> None:
        """Write values of sequences, [sequences, time, ...], to their positions in the rows."""
        shape = self.shape + values.shape[2:]
        kind = values.dtype if np.issubdtype(values.dtype, np.integer) else np.float32
        write_pieces(outputs.setdefault(name, np.zeros(shape, kind)), np.asarray(values), pieces)


def score_features(
    params: Params,
    rows: FeatureRows,
    config: DecoderConfig,
    *,
    micro_batch_size: int | None = None,
    mesh: Mesh | None = None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """Score the labels of input features, without gradients.

    Args:
        params: as for [`score_batch`][twinkle_jax.training.score_batch].
        rows: to score.
        config: the decoder.
        micro_batch_size: sequences at a time; None for all.
        mesh: of the parameters; None for one device.
        options: of `score_batch`.

    Returns:
        `logps` [rows, time], padded with zeros on the right, and `entropies`, `logits` and
        `routing` if the options ask for them.
    """
    outputs: dict[str, np.ndarray] = {}
    for batch, pieces in rows.batches({}, micro_batch_size, mesh):
        scores = score_batch(params, batch, config, mesh=mesh, **options)
        for name, values in scores._asdict().items():
            if values is not None:
                rows.write(outputs, name, values, pieces)
    return outputs


def grad_features(
    state: TrainState,
    rows: FeatureRows,
    config: DecoderConfig,
    loss_fn: Loss,
    *,
    loss_inputs: Mapping[str, Any],
    teacher: tuple[Any, Any] | None = None,
    micro_batch_size: int | None = None,
    mesh: Mesh | None = None,
    **options: Any,
) -> Iterator[tuple[TrainState, StepSummary, list[Piece]]]:
    """Accumulate the gradient of a loss over input features, a micro-batch at a time.

    Args:
        state: donated: use the yielded one instead.
        rows: to train on.
        config: the decoder.
        loss_fn: the loss.
        loss_inputs: `advantages`, `old_logps`, `ref_logps` and `sampler_logps`, one a row, a
            sequence, a label or a position.
        teacher: for `GKDLoss`, log-probabilities [rows, time, k] and their tokens; of these, the
            `topk` of the loss count.
        micro_batch_size: sequences at a time, an even number for a loss of pairs; None for all.
        mesh: of the state; None for one device.
        options: of [`grad_step`][twinkle_jax.training.grad_step].

    Yields:
        The state, the summary of a micro-batch, and its sequences.

    Raises:
        ValueError: if a teacher is missing for `GKDLoss` or given to another loss, the length of an
            input does not fit, an input is unknown, or sequences are not pairs for a loss of pairs.
    """
    aligned = rows.align(loss_inputs)
    loss_name = type(loss_fn).__name__
    if teacher is None and isinstance(loss_fn, GKDLoss):
        raise ValueError(
            f"{loss_name} must have a teacher, such as teacher_logits or teacher_topk_logprobs of "
            "forward_backward, got None"
        )
    if teacher is not None:
        if not isinstance(loss_fn, GKDLoss):
            raise ValueError(
                f"teacher, such as teacher_logits, must be None for {loss_name}, got one: it is "
                "for GKDLoss"
            )
        aligned |= align_teacher(*teacher, rows.features, rows.pieces, loss_fn.topk)
    if getattr(loss_fn, "divides_by", None) == "pairs":
        # Padding would become the other half of a last row.
        _check_even("rows", "number of sequences", len(rows.pieces), loss_name)
        _check_even("micro_batch_size", "number", micro_batch_size, loss_name)
    for batch, pieces in rows.batches(aligned, micro_batch_size, mesh):
        state, summary = grad_step(state, batch, config, loss_fn, mesh=mesh, **options)
        yield state, summary, pieces


def _check_even(name: str, unit: str, count: int | None, loss_name: str) -> None:
    if count is not None and count % 2:
        raise ValueError(
            f"{name} must be an even {unit} for {loss_name}, chosen, rejected, chosen, …, "
            f"got {count}"
        )


def loss_of_scores(
    loss_fn: Loss, rows: FeatureRows, outputs: Mapping[str, np.ndarray], loss_inputs: Any
) -> float:
    """Compute a loss from what `score_features` returned, without a gradient.

    Args:
        loss_fn: the loss.
        rows: that were scored.
        outputs: their scores.
        loss_inputs: as for `grad_features`.

    Raises:
        ValueError: if the loss needs more than these outputs.
    """
    if isinstance(loss_fn, GKDLoss) or (loss_fn.require_entropy and "entropies" not in outputs):
        raise ValueError(
            f"{type(loss_fn).__name__} must be computed by forward_backward: "
            "it needs more than log-probabilities"
        )
    ((batch, pieces),) = rows.batches(rows.align(loss_inputs))
    count = len(pieces)
    scores = {}
    for name in outputs.keys() & {"logps", "entropies"}:
        scores[name] = np.zeros(batch.tokens.shape, np.float32)
        for row, piece in zip(scores[name], pieces, strict=False):
            values = outputs[name][piece.row, piece.columns]
            row[: len(values)] = values
    aligned = {k: x for k, x in batch._asdict().items() if k in loss_inputs and x is not None}
    with jax.numpy_dtype_promotion("standard"):
        output = loss_fn(
            {"labels": batch.labels[:count]},
            {name: x[:count] for name, x in scores.items()},
            **{name: x[:count] for name, x in aligned.items()},
        )
    return float(output.loss / (output.num_tokens or 1))


def pack_features(
    rows: Iterable[Mapping[str, Any]], max_length: int = 2048, *, buffer: int | None = None
) -> Iterator[dict[str, Any]]:
    """Pack rows of a data set into longer rows, the longest first, so that there is little padding.

    `position_ids` start again at 0 with each row, and the functions that train compute each as it
    is alone. Runs do not need this: they pack the batches of their updates. Not for losses of
    pairs: a chosen row and its rejected one would no longer follow each other.

    Args:
        rows: with `input_ids`, and any other columns. Rows with `position_ids` keep them, and so
            may be packed already.
        max_length: tokens of a packed row; a longer row stays alone.
        buffer: rows to choose from at a time, for a stream; the last packed row of each waits for
            the next ones. None for all rows.

    Yields:
        A packed row. Lists and arrays of numbers are concatenated; other columns are lists of their
        values.

    Raises:
        ValueError: if `max_length` or `buffer` is less than 1, rows have different columns, columns
            of other lengths than their tokens, or `position_ids` that do not start at 0.
        TypeError: if a row has no `input_ids`, or `max_length` or `buffer` is no integer.

    Example:
        >>> rows = [{"input_ids": [5], "n": 1}, {"input_ids": [6, 7], "n": 2}]
        >>> list(pack_features(rows))
        [{'input_ids': [6, 7, 5], 'n': [2, 1], 'position_ids': [0, 1, 0]}]
    """
    for name, value in (("max_length", max_length), ("buffer", buffer)):
        if value is not None:
            check_count(name, value)
    remaining: list[Mapping[str, Any]] = []
    unread = iter(rows)
    while batch := list(itertools.islice(unread, buffer)):
        for row in batch:
            _check_columns(row)
        remaining += batch
        lengths = np.asarray([len(row["input_ids"]) for row in remaining], np.int32)
        lines = assign_lines(np.minimum(lengths, max_length), max_length)
        yield from (_joined([remaining[i] for i in line]) for line in lines[:-1])
        remaining = [remaining[i] for i in lines[-1]]
    if remaining:
        yield _joined(remaining)


def _check_columns(row: Mapping[str, Any]) -> None:
    """Refuse a row whose columns would be shifted against those of the rows packed with it."""
    if not isinstance(row, Mapping) or "input_ids" not in row:
        raise TypeError(f"rows must have 'input_ids', got {row!r}")
    tokens = len(row["input_ids"])
    for key in PER_TOKEN:
        if row.get(key) is not None and len(row[key]) != tokens:
            raise ValueError(
                f"rows must have {key!r} for each of their tokens, {tokens}, got {len(row[key])}"
            )


def _joined(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    packed: dict[str, Any] = {}
    for row in rows:
        if row.keys() != rows[0].keys():
            raise ValueError(f"rows must have the same columns, got {[*rows[0]]} and {[*row]}")
    for key in rows[0]:
        values = [to_lists(row[key]) for row in rows]
        firsts = [x[:1] if isinstance(x, list) else [None] for x in values]
        numbers = any(firsts) and all(isinstance(x, int | float) for y in firsts for x in y)
        packed[key] = list(itertools.chain.from_iterable(values)) if numbers else values
    positions = itertools.chain.from_iterable(map(_positions, rows))
    return packed | {"position_ids": list(positions)}


def _positions(row: Mapping[str, Any]) -> list[int]:
    """Return the positions of a row, counted in its tokens alone where it has none."""
    mask = row.get("attention_mask")
    kept = np.ones(len(row["input_ids"]), int) if mask is None else np.asarray(mask, int)
    positions = row.get("position_ids")
    if positions is None:
        return np.maximum(np.cumsum(kept) - 1, 0).tolist()
    positions = to_lists(positions)
    if len(positions) != len(kept) or any(np.asarray(positions)[kept != 0][:1] != 0):
        raise ValueError(
            f"position_ids of a row must start at 0, one for each of its {len(kept)} tokens, "
            f"got {positions[:8]}"
        )
    return positions
