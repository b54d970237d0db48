"""Losses by name, by class, as objects and as functions; and what each of them divides by."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.loss.cases import OBJECTS, call, random_batch
from twinkle_jax import loss as losses
from twinkle_jax.loss import GRPOLoss, LossOutput, PPOLoss, get_loss
from twinkle_jax.training.gradient import loss_denominator

BATCH = random_batch(81)
INPUTS = {"labels": jnp.where(BATCH.mask, 7, -100)}
OUTPUTS = {"logps": BATCH.logprobs}


def test_every_loss_has_a_name():
    classes = {name for name in losses.__all__ if name.endswith("Loss")} - {"Loss", "PolicyLoss"}
    names = ["bnpo", "cispo", "cross_entropy", "dapo", "dpo", "dr_grpo", "gkd", "grpo", "gspo"]
    names += ["mse", "ppo", "ppo_value", "sapo", "chunked_cross_entropy"]
    assert {type(get_loss(name)).__name__ for name in names} == classes
    assert all(type(get_loss(name)).__name__ == name for name in classes)


def test_names_classes_and_objects():
    assert get_loss("grpo", epsilon=0.1) == get_loss(GRPOLoss, epsilon=0.1) == GRPOLoss(0.1)
    assert get_loss("PPOLoss") == PPOLoss()
    loss_fn = GRPOLoss(0.3)
    assert get_loss(loss_fn) is loss_fn


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"loss must be one of 'bnpo', .*, got 'gropo'"):
        get_loss("gropo")
    for wrong in (3, None, int, {"loss": "grpo"}):
        with pytest.raises(TypeError, match="loss must be a name, a loss or a function, got"):
            get_loss(wrong)
    with pytest.raises(TypeError, match="options must be given to the class"):
        get_loss(GRPOLoss(), epsilon=0.1)
    with pytest.raises(TypeError, match="clip_range"):
        get_loss("grpo", clip_range=0.1)


def own_sum(inputs, outputs, *, advantages, denominator):
    kept = jnp.where(inputs["labels"] != -100, outputs["logps"], 0)
    return -jnp.sum(kept * advantages[:, None]) / denominator


def test_functions_get_what_they_name():
    loss_fn = get_loss(own_sum)
    assert loss_fn == get_loss(own_sum)
    assert hash(loss_fn) == hash(get_loss(own_sum))
    given = {"advantages": BATCH.advantages, "old_logps": BATCH.old, "denominator": 2.0}
    value = loss_fn(INPUTS, OUTPUTS, **given).loss
    np.testing.assert_allclose(
        value, own_sum(INPUTS, OUTPUTS, advantages=BATCH.advantages, denominator=2.0)
    )
    seen = get_loss(lambda inputs, outputs, **kwargs: {"loss": jnp.float32(len(kwargs))})
    assert seen(INPUTS, OUTPUTS, **given)["loss"] == 3
    passed_on = get_loss(lambda inputs, outputs: LossOutput(jnp.float32(1), "metrics"))
    assert passed_on(INPUTS, OUTPUTS, **given).metrics == "metrics"


def test_functions_that_return_no_number():
    for result, kind in [(jnp.ones(3), r"\(3,\)"), (None, "NoneType"), (True, "bool")]:
        with pytest.raises(TypeError, match=f"must return a number or a mapping, got {kind}"):
            get_loss(lambda inputs, outputs, result=result: result)(INPUTS, OUTPUTS)


@pytest.mark.parametrize("name", OBJECTS)
def test_what_a_loss_divides_by_is_what_it_says(name):
    count = loss_denominator(OBJECTS[name], BATCH.mask, np.ones(len(BATCH.mask), bool))
    np.testing.assert_allclose(
        call(OBJECTS[name], *BATCH).loss, call(OBJECTS[name], *BATCH, 1.0).loss / count, rtol=1e-6
    )


def count_of(loss_fn, labelled, rows):
    return float(loss_denominator(loss_fn, labelled, rows))


def test_denominators():
    labelled, rows = BATCH.mask, np.array([True, True, True, False])

    class Counted:
        def __init__(self, unit):
            self.divides_by = unit

    counts = {"tokens": labelled.sum(), "sequences": 3, "pairs": 1.5, "batches": 1}
    for unit, count in counts.items():
        assert count_of(Counted(unit), labelled, rows) == count
    assert count_of(object(), labelled, rows) == labelled.sum()
    assert count_of(get_loss(own_sum), labelled, rows) == labelled.sum()
    assert count_of(get_loss(lambda inputs, outputs: 0.0), labelled, rows) == 1
    with pytest.raises(ValueError, match=r"divides_by must be one of 'tokens', .*, got 'words'"):
        loss_denominator(Counted("words"), labelled, rows)
