"""Losses with a target under Twinkle's names: recorded numbers, and values worked by hand."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import twinkle_jax.loss as losses
from tests.loss import cases as reference
from tests.loss.cases import random_batch
from tests.loss.targets import (
    DATA,
    GOLDEN,
    LABELS,
    LOGITS,
    LOGPS,
    MASK,
    TEACHER,
    value_and_gradient,
)
from twinkle_jax.loss import (
    ChunkedCrossEntropyLoss,
    CPOLoss,
    CrossEntropyLoss,
    DPOLoss,
    GKDLoss,
    LigerFusedLinearCrossEntropyLoss,
    MSELoss,
    ORPOLoss,
    PPOValueLoss,
    SimPOLoss,
)

CASES = {f"{index}-{case['loss']}": case for index, case in enumerate(GOLDEN["cases"])}


@pytest.mark.parametrize(
    "name",
    [
        name if index % 3 == 0 else pytest.param(name, marks=pytest.mark.exhaustive)
        for index, name in enumerate(CASES)
    ],
)
def test_golden(name):
    case = CASES[name]
    loss_fn = getattr(losses, case["loss"])(**case["kwargs"])
    arguments = {key: DATA[key] for key in case["arguments"]}
    arguments |= {"topk": case["topk"]} if case["topk"] else {}
    value, gradient = value_and_gradient(loss_fn, case["of"], **arguments)
    np.testing.assert_allclose(value, case["value"], **GOLDEN["tolerance"])
    if case["kwargs"].get("dft"):
        # The weights of the paper carry no gradient; Twinkle's do.
        assert not np.allclose(gradient, case["gradient"])
    else:
        np.testing.assert_allclose(gradient, case["gradient"], **GOLDEN["tolerance"])
    tokens = loss_fn({"labels": LABELS}, {case["of"]: DATA[case["of"]]}, **arguments).num_tokens
    assert (tokens or 0) == case["num_tokens"]


def test_weights_of_dft_carry_no_gradient():
    _, gradient = value_and_gradient(CrossEntropyLoss(dft=True), "logps")
    np.testing.assert_allclose(
        gradient, np.where(MASK, -np.exp(LOGPS), 0) / MASK.sum(), rtol=1e-5, atol=1e-8
    )


def test_flat_labels():
    flat, logits = LABELS.reshape(-1), LOGITS.reshape(-1, 7)
    whole = CrossEntropyLoss()({"labels": LABELS}, {"logps": LOGPS}).loss
    for outputs in ({"logits": logits}, {"logps": LOGPS.reshape(-1)}):
        value = CrossEntropyLoss()({"labels": flat}, outputs).loss
        np.testing.assert_allclose(value, whole, rtol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"dft": True}, {"reduction": "sum"}], ids=str)
def test_in_chunks_it_is_the_same(settings):
    whole, chunked = CrossEntropyLoss(**settings), ChunkedCrossEntropyLoss(3, **settings)
    for of in ("logits", "logps"):
        expected, wanted = value_and_gradient(whole, of)
        value, gradient = value_and_gradient(chunked, of)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-7)
    arguments = {"labels": LABELS}, {"logits": LOGITS}
    assert chunked(*arguments).num_tokens == whole(*arguments).num_tokens
    nothing = {"labels": np.full_like(LABELS, -100)}, {"logits": LOGITS}
    assert chunked(*nothing).loss == 0


def test_there_is_nothing_for_chunks_to_save():
    """Beside logits and their gradient, nothing of their size is held."""
    labels = jnp.ones((1, 1024), jnp.int32)

    def loss(logits):
        return CrossEntropyLoss()({"labels": labels}, {"logits": logits}).loss

    logits = jax.ShapeDtypeStruct((1, 1024, 256), jnp.float32)
    compiled = jax.jit(jax.grad(loss)).lower(logits).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.1 * 1024 * 256 * 4


def test_mean_squared_error():
    # ((1 - 3)^2 + (2 - 5)^2) / 2 = 6.5, with gradients 1 * (1 - 3) and 1 * (2 - 5).
    def loss(x, **kwargs):
        return MSELoss()({"labels": [[3, 5.0]]}, {"logits": x}, **kwargs).loss

    value, gradient = jax.value_and_grad(loss)(jnp.array([[1.0, 2.0]]))
    assert value == 6.5
    np.testing.assert_array_equal(gradient, [[-2.0, -3.0]])
    assert loss(jnp.array([[1.0, 2.0]]), denominator=4) == 3.25
    assert loss(jnp.array([[3.0, 5.0]])) == 0
    with pytest.raises(ValueError, match=r"must have the shape of .*, \(1, 2\), got \(2,\)"):
        loss(jnp.zeros(2))
    with pytest.raises(TypeError, match="int32"):
        loss(jnp.zeros((1, 2), int))


@pytest.mark.exhaustive
def test_the_student_learns_its_teacher():
    value, gradient = value_and_gradient(GKDLoss(), "logits", teacher_logits=LOGITS)
    np.testing.assert_allclose(value, 0, atol=1e-7)
    np.testing.assert_allclose(gradient, 0, atol=1e-7)
    whole = GKDLoss()({"labels": LABELS}, {"logits": LOGITS}, **TEACHER).loss
    for size in (1, 4, 19, 20, 100):
        chunked = GKDLoss(chunk_size=size)({"labels": LABELS}, {"logits": LOGITS}, **TEACHER).loss
        np.testing.assert_allclose(chunked, whole, rtol=1e-5)
    some = GKDLoss(topk=3)({"labels": LABELS}, {"logits": LOGITS}, **TEACHER).loss
    other = GKDLoss(topk=5)({"labels": LABELS}, {"logits": LOGITS}, topk=3, **TEACHER).loss
    assert some == other != whole


def critic_loss(values, old, returns, mask, loss_fn=PPOValueLoss()):  # noqa: B008
    return loss_fn(
        {"labels": jnp.where(mask, 7, -100)}, {"values": values}, old_values=old, returns=returns
    ).loss


def test_critic_worked_by_hand():
    # Values 2 and 1 from 0 with epsilon 0.5, returns 1: errors max(1, 0.25) and max(0, 0.25);
    # half of them over two tokens. In [batch, time, 1], as a linear layer returns it.
    values = jnp.array([[[2.0], [1.0], [jnp.nan]]])
    mask = jnp.array([[True, True, False]])
    run = jax.value_and_grad(
        lambda x: critic_loss(x, [[0.0, 0.0]], [[1.0, 1.0]], mask, PPOValueLoss(0.5))
    )
    value, gradient = jax.jit(run)(values)
    assert value == 0.3125
    np.testing.assert_array_equal(gradient, [[[0.5], [0.0], [0.0]]])


def test_critic_matches_reference():
    batch = random_batch(90, per_token=True)
    arguments = batch.logprobs, batch.old, batch.advantages, batch.mask
    desired = reference.token_mean(reference.value_loss(*arguments), batch.mask)
    np.testing.assert_allclose(critic_loss(*arguments), desired, rtol=1e-5)
    wide = critic_loss(*arguments, PPOValueLoss(epsilon=9.0))
    error = np.square(batch.logprobs - batch.advantages)[batch.mask].mean() / 2
    np.testing.assert_allclose(wide, error, rtol=1e-5)


def test_defaults_and_order_are_twinkles():
    orders = {
        CrossEntropyLoss: {"ignore_index": -100, "reduction": "mean", "dft": False},
        DPOLoss: {
            "beta": 0.1,
            "label_smoothing": 0.0,
            "ignore_index": -100,
            "loss_type": "sigmoid",
            "reference_free": False,
            "sft_weight": 0.0,
        },
        GKDLoss: {"beta": 0.5, "temperature": 1.0, "ignore_index": -100, "chunk_size": 512},
        MSELoss: {},
        PPOValueLoss: {"epsilon": 0.2, "ignore_index": -100},
        SimPOLoss: {"beta": 2.5, "gamma": 0.5, "ignore_index": -100},
        CPOLoss: {"beta": 0.1, "bc_coef": 1.0, "ignore_index": -100},
        ORPOLoss: {"lambda_orpo": 0.1, "ignore_index": -100},
    }
    for cls, defaults in orders.items():
        parameters = inspect.signature(cls).parameters
        arguments = {name: parameter.default for name, parameter in parameters.items()}
        assert list(arguments.items())[: len(defaults)] == list(defaults.items())


@pytest.mark.parametrize(
    ("cls", "wrong", "argument"),
    [
        (CrossEntropyLoss, {"reduction": "max"}, "reduction"),
        (ChunkedCrossEntropyLoss, {"chunk_size": 0}, "chunk_size"),
        (ChunkedCrossEntropyLoss, {"chunk_size": 1, "reduction": "max"}, "reduction"),
        (LigerFusedLinearCrossEntropyLoss, {"label_smoothing": 0.1}, "label_smoothing"),
        (LigerFusedLinearCrossEntropyLoss, {"softcap": 30.0}, "softcap"),
        (DPOLoss, {"loss_type": "best"}, "loss_type"),
        (DPOLoss, {"loss_type": "ipo", "label_smoothing": 0.1}, "label_smoothing"),
        (GKDLoss, {"beta": -0.1}, "beta"),
        (GKDLoss, {"temperature": 0.0}, "temperature"),
        (GKDLoss, {"chunk_size": 0}, "chunk_size"),
    ],
)
def test_errors_of_the_classes(cls, wrong, argument):
    with pytest.raises(ValueError, match=f"^(Unknown )?{argument}"):
        cls(**wrong)


def test_errors_of_the_calls():
    def call(loss_fn, labels=LABELS, outputs=None, **arguments):
        outputs = outputs or {"logps": LOGPS, "logits": LOGITS, "values": LOGPS}
        return loss_fn({"labels": labels}, outputs, **arguments)

    topk = {key: DATA[key] for key in ("teacher_topk_logprobs", "teacher_topk_indices")}
    indices = topk["teacher_topk_indices"]
    for error, argument, loss_fn, arguments in [
        (AssertionError, "teacher_logits", GKDLoss(), {}),
        (ValueError, "teacher_logits", GKDLoss(), {"teacher_logits": LOGITS[..., :5]}),
        (
            ValueError,
            "teacher_topk_indices",
            GKDLoss(),
            topk | {"teacher_topk_indices": indices[..., :2]},
        ),
        (
            TypeError,
            "teacher_topk_indices",
            GKDLoss(),
            topk | {"teacher_topk_indices": indices.astype(np.float32)},
        ),
        (ValueError, "outputs", GKDLoss(), TEACHER | {"outputs": {"logits": LOGITS[:, :4]}}),
        (TypeError, "old_values", PPOValueLoss(), {"returns": LOGPS}),
        (TypeError, "returns", PPOValueLoss(), {"old_values": LOGPS}),
        (ValueError, "returns", PPOValueLoss(), {"old_values": LOGPS, "returns": [[1.0] * 9] * 4}),
    ]:
        with pytest.raises(error, match=f"^{argument}"):
            call(loss_fn, **arguments)
