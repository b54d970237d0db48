"""CrossEntropyLoss, DPOLoss, GKDLoss and MSELoss: numbers of the real Twinkle, and their laws."""

import inspect
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import twinkle_jax.loss as losses
from twinkle_jax.loss import (
    ChunkedCrossEntropyLoss,
    CrossEntropyLoss,
    DPOLoss,
    GKDLoss,
    MSELoss,
)

GOLDEN = json.loads(
    (pathlib.Path(__file__).parents[2] / "golden" / "supervised_loss_cases.json").read_text()
)
DATA = {
    name: np.asarray(values, int if name in ("labels", "teacher_topk_indices") else np.float32)
    for name, values in GOLDEN["data"].items()
}
LABELS, LOGPS, LOGITS = DATA["labels"], DATA["logps"], DATA["logits"]
MASK = LABELS != -100
CASES = {f"{index}-{case['loss']}": case for index, case in enumerate(GOLDEN["cases"])}
TEACHER = {"teacher_logits": DATA["teacher_logits"]}
REFERENCE = {"ref_logps": DATA["ref_logps"]}
EVERY = {
    "cross_entropy": (CrossEntropyLoss(), "logps", {}),
    "dft": (CrossEntropyLoss(dft=True), "logps", {}),
    "chunked": (ChunkedCrossEntropyLoss(3), "logits", {}),
    "dpo": (DPOLoss(), "logps", REFERENCE),
    "dpo_hinge": (DPOLoss(loss_type="hinge"), "logps", REFERENCE),
    "gkd": (GKDLoss(chunk_size=3), "logits", TEACHER),
}
every_loss = pytest.mark.parametrize("name", EVERY)


def value_and_gradient(loss_fn, of, labels=LABELS, data=DATA, **arguments):
    def loss(x):
        return loss_fn({"labels": labels}, {of: x}, **arguments).loss

    return jax.value_and_grad(loss)(jnp.asarray(data[of]))


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
    given = {key: DATA[key] for key in case["arguments"]}
    given |= {"topk": case["topk"]} if case["topk"] else {}
    value, gradient = value_and_gradient(loss_fn, case["of"], **given)
    np.testing.assert_allclose(value, case["value"], **GOLDEN["tolerance"])
    if case["kwargs"].get("dft"):
        # The weights of the paper carry no gradient; Twinkle's do.
        assert not np.allclose(gradient, case["gradient"])
    else:
        np.testing.assert_allclose(gradient, case["gradient"], **GOLDEN["tolerance"])
    tokens = loss_fn({"labels": LABELS}, {case["of"]: DATA[case["of"]]}, **given).num_tokens
    assert (tokens or 0) == case["num_tokens"]


def test_weights_of_dft_carry_no_gradient():
    _, gradient = value_and_gradient(CrossEntropyLoss(dft=True), "logps")
    np.testing.assert_allclose(
        gradient, np.where(MASK, -np.exp(LOGPS), 0) / MASK.sum(), rtol=1e-5, atol=1e-8
    )


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
    }
    for cls, defaults in orders.items():
        parameters = inspect.signature(cls).parameters
        given = {name: parameter.default for name, parameter in parameters.items()}
        assert list(given.items())[: len(defaults)] == list(defaults.items())
        assert cls() == cls()
        assert hash(cls()) == hash(cls())


def test_what_a_model_must_provide():
    for cls in (GKDLoss, MSELoss):
        assert cls().require_logits
        assert not cls().require_logps
    for cls in (CrossEntropyLoss, DPOLoss):
        assert cls().require_logps
        assert not cls().require_logits
    assert DPOLoss().divides_by == "pairs"
    assert CrossEntropyLoss().divides_by == GKDLoss().divides_by == "tokens"


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
    given = {"labels": LABELS}, {"logits": LOGITS}
    assert chunked(*given).num_tokens == whole(*given).num_tokens
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
    with pytest.raises(TypeError, match="must be floating point, got int32"):
        loss(jnp.zeros((1, 2), int))


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("cross_entropy", "dpo")
        else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in EVERY
    ],
)
def test_micro_batches_add_up(name):
    loss_fn, of, given = EVERY[name]
    value, gradient = value_and_gradient(loss_fn, of, **given)
    count = 2 if loss_fn.divides_by == "pairs" else MASK.sum()
    parts = []
    for rows in (slice(0, 2), slice(2, 4)):
        some = {key: x[rows] for key, x in given.items()}
        data = {of: DATA[of][rows]}
        parts.append(value_and_gradient(loss_fn, of, LABELS[rows], data, denominator=count, **some))
    np.testing.assert_allclose(sum(v for v, _ in parts), value, rtol=1e-5)
    np.testing.assert_allclose(
        np.concatenate([g for _, g in parts]), gradient, rtol=1e-5, atol=1e-7
    )


@every_loss
@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_garbage_under_the_mask_and_nothing_to_learn(name, garbage):
    loss_fn, of, given = EVERY[name]

    def dirty(x, mask=MASK):
        keep = mask if x.ndim == 2 else mask[..., None]
        return np.where(keep, x, np.float32(garbage))

    clean = value_and_gradient(loss_fn, of, **given)
    arguments = {key: dirty(x) for key, x in given.items()}
    result = value_and_gradient(loss_fn, of, data={of: dirty(DATA[of])}, **arguments)
    np.testing.assert_array_equal(clean[0], result[0])
    np.testing.assert_array_equal(clean[1], result[1])
    assert not np.asarray(clean[1])[~MASK].any()
    nothing = np.zeros_like(MASK)
    arguments = {key: dirty(x, nothing) for key, x in given.items()}
    data = {of: dirty(DATA[of], nothing)}
    value, gradient = value_and_gradient(loss_fn, of, np.full_like(LABELS, -100), data, **arguments)
    assert value == 0
    assert not gradient.any()


@pytest.mark.exhaustive
@every_loss
def test_jit_and_gradients_where_none_belong(name):
    loss_fn, of, given = EVERY[name]

    @jax.jit
    def run(x, given):
        def loss(x, given):
            return loss_fn({"labels": LABELS}, {of: x}, **given).loss

        return jax.value_and_grad(loss, argnums=(0, 1))(x, given)

    value, (gradient, others) = run(DATA[of], given)
    plain, plain_gradient = value_and_gradient(loss_fn, of, **given)
    np.testing.assert_allclose(value, plain, rtol=1e-5)
    np.testing.assert_allclose(gradient, plain_gradient, rtol=1e-5, atol=1e-7)
    assert not any(x.any() for x in others.values())


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


def test_errors_of_the_classes():
    for cls, wrong, message in [
        (CrossEntropyLoss, {"reduction": "max"}, "reduction must be one of 'mean', 'sum', got"),
        (ChunkedCrossEntropyLoss, {"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        (
            ChunkedCrossEntropyLoss,
            {"chunk_size": 1, "reduction": "max"},
            "reduction must be one of 'mean', 'sum', got 'max'",
        ),
        (DPOLoss, {"loss_type": "best"}, "loss_type must be one of 'sigmoid', .*, got 'best'"),
        (
            DPOLoss,
            {"loss_type": "ipo", "label_smoothing": 0.1},
            "label_smoothing must be 0 for loss_type='ipo', got 0.1",
        ),
        (GKDLoss, {"beta": -0.1}, r"beta must be in \[0, 1\], got -0.1"),
        (GKDLoss, {"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        (GKDLoss, {"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            cls(**wrong)


def test_errors_of_the_calls():
    def call(loss_fn, labels=LABELS, outputs=None, **given):
        return loss_fn({"labels": labels}, outputs or {"logps": LOGPS, "logits": LOGITS}, **given)

    with pytest.raises(ValueError, match=r"an even number of rows, .*, got 3"):
        call(DPOLoss(), LABELS[:3], {"logps": LOGPS[:3]})
    with pytest.raises(ValueError, match=r"ref_chosen_logps must have shape \(2,\), got \(4,\)"):
        call(DPOLoss(), ref_chosen_logps=LOGPS[:, 0], ref_rejected_logps=LOGPS[:2, 0])
    with pytest.raises(TypeError, match=r"teacher_logits, or .* must be given to GKDLoss"):
        call(GKDLoss())
    with pytest.raises(ValueError, match=r"teacher_logits must have shape \(4, 5, 7\), got"):
        call(GKDLoss(), teacher_logits=DATA["teacher_logits"][..., :5])
    with pytest.raises(ValueError, match=r"teacher_topk_indices must have shape \(4, 5, 3\), .*"):
        call(
            GKDLoss(),
            teacher_topk_logprobs=DATA["teacher_topk_logprobs"],
            teacher_topk_indices=DATA["teacher_topk_indices"][..., :2],
        )
    with pytest.raises(TypeError, match="teacher_topk_indices must be integers, got float32"):
        call(
            GKDLoss(),
            teacher_topk_logprobs=DATA["teacher_topk_logprobs"],
            teacher_topk_indices=DATA["teacher_topk_logprobs"],
        )
    with pytest.raises(ValueError, match=r"outputs\['logits'\] must be \[batch, time, vocab"):
        call(GKDLoss(), outputs={"logits": LOGITS[:, :4]}, **TEACHER)
    for loss_fn in (
        CrossEntropyLoss(),
        ChunkedCrossEntropyLoss(2),
        DPOLoss(),
        GKDLoss(),
        MSELoss(),
    ):
        with pytest.raises(TypeError, match=r"arguments must be of .*, got 'advantage'"):
            call(loss_fn, advantage=1)
