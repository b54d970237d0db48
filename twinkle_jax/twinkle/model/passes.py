"""Forward and backward passes of a policy: features in, scores or accumulated gradients out."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

from twinkle_jax.data import Inputs, PerSequence
from twinkle_jax.data.batch import Batch, HostArray, micro_batches
from twinkle_jax.data.features import (
    LOSS_INPUTS,
    Feature,
    Piece,
    align_loss_input,
    align_teacher,
    read_features,
    split_packed,
    write_pieces,
)
from twinkle_jax.loss import GKDLoss
from twinkle_jax.model.decoder.sharding import batch_sharding
from twinkle_jax.training.gradient import StepSummary, add_summaries, grad_step
from twinkle_jax.training.score import score_batch
from twinkle_jax.twinkle.model.group import OptimizerGroup
from twinkle_jax.twinkle.model.policy import AdapterPolicy


class Pass(NamedTuple):
    """What `calculate_loss` is of.

    Attributes:
        features: the rows.
        pieces: their sequences.
        outputs: scores [rows, time].
    """

    features: list[Feature]
    pieces: list[Piece]
    outputs: dict[str, np.ndarray]


def score(
    policy: AdapterPolicy,
    group: OptimizerGroup,
    inputs: Inputs,
    *,
    use_adapter: bool,
    micro_batch_size: int | None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """Score the labels of inputs, without gradients; the options are those of `score_batch`."""
    features, pieces = _read(policy, group, inputs, labels_needed=False)
    outputs: dict[str, np.ndarray] = {}
    done = 0
    for batch, count in _micro_batches(policy, pieces, {}, micro_batch_size):
        scores = score_batch(
            group.state.params if use_adapter else {},
            batch,
            policy.config,
            frozen=group.frozen,
            compute_dtype=policy.dtype,
            mesh=policy.mesh,
            **options,
        )
        for name, values in scores._asdict().items():
            if values is not None:
                shape = _shape(features) + values.shape[2:]
                out = outputs.setdefault(name, np.zeros(shape, np.float32))
                write_pieces(out, np.asarray(values), pieces[done : done + count])
        done += count
    group.last_pass = Pass(features, pieces, outputs)
    group.show(False, features, outputs)
    return outputs


def loss_of_last_pass(group: OptimizerGroup, loss_inputs: dict[str, Any]) -> float:
    """Compute the loss of what `score` scored last."""
    if group.last_pass is None:
        raise ValueError("inputs must have been scored first: call forward_only")
    features, pieces, outputs = group.last_pass
    if isinstance(group.loss, GKDLoss) or (
        group.loss.require_entropy and "entropies" not in outputs
    ):
        raise ValueError(
            f"{type(group.loss).__name__} must be computed by forward_backward: "
            "it needs more than log-probabilities"
        )
    aligned = {name: align_loss_input(name, x, features, pieces) for name, x in loss_inputs.items()}
    ((batch, count),) = micro_batches([p.feature for p in pieces], aligned, None)
    scores = {}
    for name in ("logps", "entropies"):
        if name in outputs:
            scores[name] = np.zeros(batch.tokens.shape, np.float32)
            for row, piece in zip(scores[name], pieces, strict=False):
                values = outputs[name][piece.row, piece.columns]
                row[: len(values)] = values
    arrays = {
        k: x[:count] for k, x in batch._asdict().items() if k in loss_inputs and x is not None
    }
    with jax.numpy_dtype_promotion("standard"):
        output = group.loss(
            {"labels": batch.labels[:count]},
            {name: x[:count] for name, x in scores.items()},
            **arrays,
        )
    loss = float(output.loss / (output.num_tokens or 1))
    group.losses.append(loss)
    return loss


def accumulate(
    policy: AdapterPolicy,
    group: OptimizerGroup,
    inputs: Inputs,
    loss_inputs: dict[str, Any],
    teacher: tuple[Any, Any] | None,
    *,
    micro_batch_size: int | None,
    temperature: float,
) -> Float[Array, ""]:
    """Add the gradient of the loss to the accumulated gradients; return the loss."""
    features, pieces = _read(policy, group, inputs, labels_needed=True)
    aligned: dict[str, Any] = {
        name: align_loss_input(name, x, features, pieces) for name, x in loss_inputs.items()
    }
    if (teacher is None) == isinstance(group.loss, GKDLoss):
        raise ValueError(
            "teacher_logits or teacher_topk_logprobs must be given with GKDLoss and with no "
            f"other loss, got {type(group.loss).__name__}"
        )
    if teacher is not None:
        aligned |= align_teacher(*teacher, features, pieces)
    total: StepSummary | None = None
    logps = np.zeros(_shape(features), np.float32) if group.metrics[True] else None
    done = 0
    for batch, count in _micro_batches(policy, pieces, aligned, micro_batch_size):
        group.state, summary = grad_step(
            group.state,
            batch,
            policy.config,
            group.loss,
            frozen=group.frozen,
            temperature=temperature,
            key=policy.key if group.lora is not None and group.lora.lora_dropout else None,
            compute_dtype=policy.dtype,
            remat=policy.remat,
            mesh=policy.mesh,
        )
        if logps is not None and summary.logps is not None:
            write_pieces(logps, np.asarray(summary.logps), pieces[done : done + count])
        done += count
        total = summary if total is None else add_summaries(total, summary)
    assert total is not None
    group.cur_step += 1
    group.add_summary(total)
    outputs = {"loss": total.loss} | ({} if logps is None else {"logps": logps})
    facts: dict[str, Any] = {
        "lr": group.learning_rate,
        "step": group.cur_step,
        "grad_norm": group.gradient_norm,
        "gradient_accumulation_steps": group.gradient_accumulation_steps,
        **{name: values for name, values in loss_inputs.items() if values is not None},
    }
    group.show(True, features, outputs, **facts)
    return total.loss


def read_loss_inputs(
    advantages: PerSequence | None,
    old_logps: PerSequence | None,
    ref_logps: PerSequence | None,
    ref_outputs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Name what a loss is given besides outputs; `ref_outputs` hold the `ref_logps`."""
    if ref_outputs is not None:
        if ref_logps is not None:
            raise ValueError("ref_logps must be left out with ref_outputs, got both")
        ref_logps = ref_outputs["logps"]
    return dict(zip(LOSS_INPUTS, (advantages, old_logps, ref_logps), strict=True))


def read_teacher(
    output: Mapping[str, Any] | None, logits: Any, logprobs: Any, indices: Any, topk: int | None
) -> tuple[Any, Any] | None:
    """Give a teacher's log-probabilities and their tokens, of logits the largest ones."""
    if output is not None:
        if any(x is not None for x in (logits, logprobs, indices)):
            raise ValueError("teacher_output must be the only teacher, got another one too")
        named = {name.removeprefix("teacher_"): x for name, x in output.items()}
        logits, logprobs = named.get("logits"), named.get("topk_logprobs")
        indices, topk = named.get("topk_indices"), output.get("topk", topk)
    if logprobs is not None and indices is not None:
        return logprobs, indices
    if logits is None:
        return None
    values = np.asarray(logits, np.float32)
    # A constant added to a position's logits changes no distribution over them.
    order = np.argsort(-values, axis=-1, kind="stable")[..., :topk].astype(np.int32)
    return np.take_along_axis(values, order, axis=-1), order


def check_task(task: str) -> None:
    """Refuse what is no language model's pass."""
    if task not in ("causal_lm", "fused_lm_ce"):
        raise ValueError(f"task must be 'causal_lm', got {task!r}; see docs/from_twinkle.md")


def _read(
    policy: AdapterPolicy, group: OptimizerGroup, inputs: Inputs, *, labels_needed: bool
) -> tuple[list[Feature], list[Piece]]:
    features = read_features(
        inputs,
        group.template,
        vocab_size=policy.config.vocab_size,
        labels_needed=labels_needed,
        other_columns=True,
    )
    return features, split_packed(features)


def _shape(features: list[Feature]) -> tuple[int, ...]:
    return len(features), max(len(feature["labels"]) for feature in features)


def _micro_batches(
    policy: AdapterPolicy,
    pieces: list[Piece],
    loss_inputs: dict[str, list[HostArray] | None],
    size: int | None,
) -> Iterator[tuple[Batch, int]]:
    """Cut into micro-batches; on a mesh, spread the rows of each over it."""
    sequences = [piece.feature for piece in pieces]
    if policy.mesh is None:
        yield from micro_batches(sequences, loss_inputs, size)
        return
    devices = policy.mesh.shape["data"] * policy.mesh.shape["fsdp"]
    for batch, count in micro_batches(
        sequences,
        loss_inputs,
        size,
        row_multiple=devices,
        time_multiple=policy.mesh.shape["tensor"],
    ):
        yield jax.device_put(batch, batch_sharding(policy.mesh)), count
