"""What the verbs are given besides inputs: numbers for the loss, a teacher, a task."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from twinkle_jax.data import PerSequence
from twinkle_jax.data.features import LOSS_INPUTS


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
    """Return a teacher's log-probabilities and their tokens: the largest ones of its logits."""
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
