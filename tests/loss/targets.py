"""Losses with a target (labels, a reference, a teacher, returns), and recorded data for them."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from twinkle_jax.loss import (
    ChunkedCrossEntropyLoss,
    CPOLoss,
    CrossEntropyLoss,
    DPOLoss,
    GKDLoss,
    LigerFusedLinearCrossEntropyLoss,
    ORPOLoss,
    PPOValueLoss,
    SimPOLoss,
)

GOLDEN = json.loads(
    (pathlib.Path(__file__).parents[1] / "golden" / "supervised_loss_cases.json").read_text()
)
DATA = {
    name: np.asarray(values, int if name in ("labels", "teacher_topk_indices") else np.float32)
    for name, values in GOLDEN["data"].items()
}
LABELS, LOGPS, LOGITS = DATA["labels"], DATA["logps"], DATA["logits"]
DATA["values"] = LOGPS
MASK = LABELS != -100
TEACHER = {"teacher_logits": DATA["teacher_logits"]}
REFERENCE = {"ref_logps": DATA["ref_logps"]}
CRITIC = {"old_values": DATA["ref_logps"], "returns": LOGPS - DATA["ref_logps"]}
TARGET_LOSSES = {
    "cross_entropy": (CrossEntropyLoss(), "logps", {}),
    "dft": (CrossEntropyLoss(dft=True), "logps", {}),
    "chunked": (ChunkedCrossEntropyLoss(3), "logits", {}),
    "liger": (LigerFusedLinearCrossEntropyLoss(reduction="mean"), "logps", {}),
    "dpo": (DPOLoss(), "logps", REFERENCE),
    "dpo_hinge": (DPOLoss(loss_type="hinge"), "logps", REFERENCE),
    "simpo": (SimPOLoss(), "logps", {}),
    "cpo": (CPOLoss(), "logits", {}),
    "orpo": (ORPOLoss(), "logps", {}),
    "gkd": (GKDLoss(chunk_size=3), "logits", TEACHER),
    "ppo_value": (PPOValueLoss(), "values", CRITIC),
}


def value_and_gradient(loss_fn, of, labels=LABELS, data=DATA, **arguments):
    def loss(x):
        return loss_fn({"labels": labels}, {of: x}, **arguments).loss

    return jax.value_and_grad(loss)(jnp.asarray(data[of]))
