"""DPO, SimPO, CPO and ORPO under Twinkle's names."""

import numpy as np
import pytest

from tests.loss.targets import DATA, LABELS, LOGITS, LOGPS, MASK, REFERENCE, value_and_gradient
from twinkle_jax.loss import CPOLoss, DPOLoss, ORPOLoss, SimPOLoss


def test_forms_of_the_reference():
    value = DPOLoss()({"labels": LABELS}, {"logps": LOGPS}, **REFERENCE).loss
    rows = [row[keep].tolist() for row, keep in zip(DATA["ref_logps"], MASK, strict=True)]
    sums = np.where(MASK, DATA["ref_logps"], 0).sum(axis=1)
    for given in (
        {"ref_logps": rows},
        {"ref_logps": DATA["ref_logps"].tolist()},
        {"ref_outputs": {"logps": DATA["ref_logps"]}},
        {"ref_outputs": {"logps": DATA["ref_logps"].tolist()}},
        {"ref_chosen_logps": sums[0::2], "ref_rejected_logps": sums[1::2]},
    ):
        other = DPOLoss()({"labels": LABELS}, {"logps": LOGPS}, **given).loss
        np.testing.assert_allclose(other, value, rtol=1e-6)
    value, gradient = value_and_gradient(DPOLoss(), "logps")
    assert value == 0
    assert not gradient.any()


def test_preferred_tokens_rise():
    _, gradient = value_and_gradient(DPOLoss(), "logps", **REFERENCE)
    assert (np.asarray(gradient)[0::2][MASK[0::2]] < 0).all()
    assert (np.asarray(gradient)[1::2][MASK[1::2]] > 0).all()


@pytest.mark.parametrize("of", ["logps", "logits"])
def test_losses_without_reference_match_float64(of):
    logps = LOGPS.astype(float)
    if of == "logits":
        z = LOGITS.astype(float)
        z -= np.log(np.exp(z).sum(-1, keepdims=True))
        logps = np.take_along_axis(z, np.maximum(LABELS, 0)[..., None], -1)[..., 0]
    sums, counts = np.where(MASK, logps, 0).sum(1), MASK.sum(1)
    means = sums / counts

    def log_sigmoid(x):
        return -np.log1p(np.exp(-x))

    def log_odds(x):
        return np.log(np.exp(x) / (1 - np.exp(x)))

    nll = -sums[0::2].sum() / counts[0::2].sum()
    margins = {name: x[0::2] - x[1::2] for name, x in {"sum": sums, "mean": means}.items()}
    odds = log_odds(means[0::2]) - log_odds(means[1::2])
    for loss_fn, desired in [
        (SimPOLoss(2.0, 1.0), -log_sigmoid(2 * margins["mean"] - 1).mean()),
        (CPOLoss(0.3, 0.5), -log_sigmoid(0.3 * margins["sum"]).mean() + 0.5 * nll),
        (ORPOLoss(0.25), nll - 0.25 * log_sigmoid(odds).mean()),
    ]:
        value = loss_fn({"labels": LABELS}, {of: DATA[of]}).loss
        np.testing.assert_allclose(value, desired, rtol=1e-5)


@pytest.mark.parametrize("loss_fn", [SimPOLoss(), CPOLoss(), ORPOLoss()])
def test_without_reference_the_preferred_tokens_rise(loss_fn):
    _, gradient = value_and_gradient(loss_fn, "logps")
    assert (np.asarray(gradient)[0::2][MASK[0::2]] < 0).all()
    assert (np.asarray(gradient)[1::2][MASK[1::2]] > 0).all()


def test_errors():
    for loss_fn in (DPOLoss(), SimPOLoss(), CPOLoss(), ORPOLoss()):
        with pytest.raises(ValueError, match="even number of rows"):
            loss_fn({"labels": LABELS[:3]}, {"logps": LOGPS[:3]})
    sums = {"ref_chosen_logps": LOGPS[:, 0], "ref_rejected_logps": LOGPS[:2, 0]}
    with pytest.raises(ValueError, match=r"^ref_chosen_logps"):
        DPOLoss()({"labels": LABELS}, {"logps": LOGPS}, **sums)
