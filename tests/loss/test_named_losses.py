"""Losses by name, by class, as objects and as functions; and what each of them divides by."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.loss.cases import POLICY_LOSSES, call, random_batch
from twinkle_jax import loss as losses
from twinkle_jax.loss import LOSSES, GRPOLoss, LossOutput, PPOLoss, get_loss

BATCH = random_batch(81)
INPUTS = {"labels": jnp.where(BATCH.mask, 7, -100)}
OUTPUTS = {"logps": BATCH.logprobs}


def test_every_loss_has_a_name():
    classes = {name for name in losses.__all__ if name.endswith("Loss")} - {"Loss", "PolicyLoss"}
    assert {type(get_loss(name)).__name__ for name in LOSSES} == classes
    assert all(type(get_loss(name)).__name__ == name for name in classes)


def test_names_classes_and_objects():
    assert get_loss("grpo", epsilon=0.1) == get_loss(GRPOLoss, epsilon=0.1) == GRPOLoss(0.1)
    assert get_loss("PPOLoss") == PPOLoss()
    loss_fn = GRPOLoss(0.3)
    assert get_loss(loss_fn) is loss_fn


def test_errors():
    with pytest.raises(ValueError, match=r"^loss"):
        get_loss("gropo")
    for wrong in (3, None, int, {"loss": "grpo"}):
        with pytest.raises(TypeError, match=r"^loss"):
            get_loss(wrong)
    with pytest.raises(TypeError, match=r"^options"):
        get_loss(GRPOLoss(), epsilon=0.1)
    with pytest.raises(TypeError, match="clip_range"):
        get_loss("grpo", clip_range=0.1)


def weighted_sum(inputs, outputs, *, advantages, denominator):
    kept = jnp.where(inputs["labels"] != -100, outputs["logps"], 0)
    return -jnp.sum(kept * advantages[:, None]) / denominator


def test_functions_get_what_they_name():
    loss_fn = get_loss(weighted_sum)
    assert loss_fn == get_loss(weighted_sum)
    assert hash(loss_fn) == hash(get_loss(weighted_sum))
    arguments = {"advantages": BATCH.advantages, "old_logps": BATCH.old, "denominator": 2.0}
    value = loss_fn(INPUTS, OUTPUTS, **arguments).loss
    np.testing.assert_allclose(
        value, weighted_sum(INPUTS, OUTPUTS, advantages=BATCH.advantages, denominator=2.0)
    )
    seen = get_loss(lambda inputs, outputs, **kwargs: {"loss": jnp.float32(len(kwargs))})
    assert seen(INPUTS, OUTPUTS, **arguments)["loss"] == 3
    passed_on = get_loss(lambda inputs, outputs: LossOutput(jnp.float32(1), "metrics"))
    assert passed_on(INPUTS, OUTPUTS, **arguments).metrics == "metrics"


def test_functions_that_return_no_number():
    for result in (jnp.ones(3), None, True):
        with pytest.raises(TypeError, match=r"^the loss function"):
            get_loss(lambda inputs, outputs, result=result: result)(INPUTS, OUTPUTS)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_divides_by(name):
    loss_fn = POLICY_LOSSES[name]
    count = {"tokens": BATCH.mask.sum(), "sequences": len(BATCH.mask)}[loss_fn.divides_by]
    total = call(loss_fn, *BATCH, denominator=1.0).loss
    np.testing.assert_allclose(call(loss_fn, *BATCH).loss, total / float(count), rtol=1e-6)


def test_divides_by_of_functions():
    assert get_loss(weighted_sum).divides_by == "tokens"
    assert get_loss(lambda inputs, outputs: 0.0).divides_by == "batches"
