"""Losses towards a target: the functions, and the objects under Twinkle's names."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.test_util import check_grads

import twinkle_jax.loss as loss_room
from tests.loss.cases import (
    DATA,
    GOLDEN,
    LABELS,
    LOGITS,
    LOGPS,
    MASK,
    TEACHER,
    value_and_gradient,
)
from tests.model.families import each
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
    clipped_value_loss,
    cross_entropy,
    dynamic_fine_tuning,
    generalised_jsd,
)


def test_fine_tuning_by_hand():
    logprobs, mask = jnp.log(jnp.array([0.5, 0.25, 0.1])), jnp.array([True, True, False])
    for function, losses, gradient in [
        (cross_entropy, [np.log(2), np.log(4), 0], [-1, -1, 0]),
        (dynamic_fine_tuning, [np.log(2) / 2, np.log(4) / 4, 0], [-0.5, -0.25, 0]),
    ]:
        np.testing.assert_allclose(function(logprobs, mask), losses, rtol=1e-6)
        actual = jax.grad(lambda x, f=function: f(x, mask).sum())(logprobs)
        np.testing.assert_allclose(actual, gradient, rtol=1e-6)


RNG = np.random.default_rng(1)
JSD_STUDENT, JSD_TEACHER = 2 * RNG.normal(size=(2, 3, 4, 6))
JSD_MASK = RNG.random((3, 4)) < 0.7
BETAS = pytest.mark.parametrize("beta", each([0.0, 0.3, 1.0, 0.5, 0.9], 3))
ENDS = pytest.mark.parametrize("beta", each([0.3, 0.0, 1.0]))


def jsd_reference(student, teacher, mask, beta=0.5, temperature=1.0):
    out = np.zeros(mask.shape)
    for index in np.argwhere(mask):
        s, t = (np.exp(x[tuple(index)] / temperature) for x in (student, teacher))
        s, t = s / s.sum(), t / t.sum()
        m = beta * t + (1 - beta) * s
        mixed = beta * np.sum(t * np.log(t / m)) + (1 - beta) * np.sum(s * np.log(s / m))
        ends = {0.0: np.sum(t * np.log(t / s)), 1.0: np.sum(s * np.log(s / t))}
        out[tuple(index)] = ends.get(beta, mixed)
    return out


@BETAS
@pytest.mark.parametrize("chunk_size", [5, 512])
def test_jsd_matches_reference(beta, chunk_size):
    run = functools.partial(generalised_jsd, temperature=1.5, chunk_size=chunk_size)
    actual = jax.jit(run)(
        JSD_STUDENT.astype(np.float32), JSD_TEACHER.astype(np.float32), JSD_MASK, beta=beta
    )  # beta is traced, its ends too
    desired = jsd_reference(JSD_STUDENT, JSD_TEACHER, JSD_MASK, beta, 1.5)
    np.testing.assert_allclose(actual, desired, rtol=1e-5, atol=1e-6)


@BETAS
@pytest.mark.parametrize("distance", [0.0, 1e-5, 1e-3, 0.1])
def test_divergence_of_distributions_that_hardly_differ(beta, distance):
    """Their difference is below float32's rounding of a probability; it came out below 0."""
    rng = np.random.default_rng(0)
    student = rng.normal(size=(16, 500)).astype(np.float32)
    teacher = (student + distance * rng.normal(size=student.shape)).astype(np.float32)
    mask = np.ones(16, bool)
    desired = jsd_reference(student.astype(float), teacher.astype(float), mask, beta)
    actual = jax.jit(generalised_jsd)(student, teacher, mask, beta=beta)
    assert np.min(actual) >= 0
    np.testing.assert_allclose(actual, desired, rtol=2e-7 / max(distance, 1e-5), atol=1e-15)


@pytest.mark.slow
def test_jsd_of_several_betas_at_once():
    """Their ends too, where the mixture is one of the distributions."""
    betas = jnp.array([0.0, 0.3, 1.0])
    student = JSD_STUDENT.astype(np.float32)
    student[*np.argwhere(JSD_MASK)[0], 0] = -np.inf

    def run(beta):
        return jax.value_and_grad(
            lambda x: generalised_jsd(x, JSD_TEACHER.astype(np.float32), JSD_MASK, beta=beta).sum()
        )(student)

    for actual, desired in zip(
        jax.tree.leaves(jax.vmap(run)(betas)),
        jax.tree.leaves(jax.tree.map(lambda *x: np.stack(x), *map(run, betas))),
        strict=True,
    ):
        assert np.isfinite(actual).all()
        np.testing.assert_allclose(actual, desired, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@ENDS
def test_gradient_of_jsd(beta):
    with jax.enable_x64(True):
        run = functools.partial(generalised_jsd, beta=beta, chunk_size=5)
        check_grads(lambda s: run(s, JSD_TEACHER, JSD_MASK), (JSD_STUDENT,), order=1, modes=["rev"])
        teacher = jax.grad(lambda t: run(JSD_STUDENT, t, JSD_MASK).sum())(jnp.asarray(JSD_TEACHER))
        assert not teacher.any()


@pytest.mark.slow
@ENDS
def test_garbage_impossible_tokens_and_vmap(beta):
    run = functools.partial(generalised_jsd, beta=beta)
    student, teacher = JSD_STUDENT.astype(np.float32), JSD_TEACHER.astype(np.float32)
    clean = run(student, teacher, JSD_MASK)
    dirty = [np.where(JSD_MASK[..., None], x, np.float32(np.nan)) for x in (student, teacher)]
    np.testing.assert_array_equal(run(*dirty, JSD_MASK), clean)
    batched = jax.vmap(run)(student, teacher, JSD_MASK)
    np.testing.assert_allclose(batched, clean, rtol=1e-5, atol=1e-6)
    never = [np.concatenate([x, np.full_like(x[..., :1], -np.inf)], -1) for x in (student, teacher)]
    np.testing.assert_allclose(run(*never, JSD_MASK), clean, rtol=1e-5, atol=1e-6)
    gradient = jax.grad(lambda s: run(s, never[1], JSD_MASK).sum())(never[0])
    assert np.isfinite(gradient).all()


@jax.jit
@jax.value_and_grad
def summed_jsd(student, teacher, mask, beta):
    return generalised_jsd(student, teacher, mask, beta=beta, chunk_size=5).sum()


@pytest.mark.parametrize(
    "spec", each([("data", "time"), ("data",), ("data", None, "time")], mark=pytest.mark.slow)
)
def test_jsd_of_tokens_spread_over_an_explicit_mesh(spec):
    """Chunks are taken across the tokens of several devices."""
    student, teacher = jax.random.normal(jax.random.key(0), (2, 8, 4, 6))
    mask = jnp.arange(4)[None] < jnp.arange(8)[:, None]
    mesh = jax.make_mesh((4, 2), ("data", "time"), (AxisType.Explicit,) * 2)
    value, gradient = summed_jsd(student, teacher, mask, 0.25)
    spread = [
        jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec[: x.ndim])))
        for x in (student, teacher, mask)
    ]
    with jax.set_mesh(mesh):
        sharded, sharded_gradient = summed_jsd(*spread, 0.25)
    np.testing.assert_allclose(sharded, value, rtol=1e-6)
    np.testing.assert_allclose(sharded_gradient, gradient, rtol=1e-5, atol=1e-8)


def test_errors_of_jsd():
    x, mask = jnp.zeros((2, 3, 5)), jnp.ones((2, 3), bool)
    with pytest.raises(ValueError, match="teacher_logits"):
        jax.eval_shape(generalised_jsd, x, x[..., :4], mask)
    with pytest.raises(ValueError, match="student_logits"):
        jax.eval_shape(generalised_jsd, x, x, jnp.ones((2, 4), bool))
    with pytest.raises(TypeError, match="teacher_logits"):
        jax.eval_shape(generalised_jsd, x, x.astype(int), mask)
    with pytest.raises(ValueError, match="chunk_size"):
        generalised_jsd(x, x, mask, chunk_size=0)
    assert generalised_jsd(x[:0], x[:0], mask[:0]).shape == (0, 3)


def test_value_loss_by_hand():
    # Old value 0, clip range 1/2.
    #   value 1, return 2: errors 1 and 2.25, the clipped one is larger: 1.125, no gradient
    #   value 1, return 0: errors 1 and 0.25: 0.5, gradient 1
    #   value 0.25, return 1: inside the range: 0.75^2 / 2, gradient -0.75
    values, returns = jnp.array([1.0, 1.0, 0.25, 9.0]), jnp.array([2.0, 0.0, 1.0, 0.0])
    mask = jnp.array([True, True, True, False])

    def total(x):
        losses = clipped_value_loss(x, jnp.zeros(4), returns, mask, epsilon=0.5)
        return losses.sum(), losses

    gradient, losses = jax.grad(total, has_aux=True)(values)
    np.testing.assert_array_equal(losses, [1.125, 0.5, 0.28125, 0.0])
    np.testing.assert_array_equal(gradient, [0.0, 1.0, -0.75, 0.0])


def test_rounding_inside_the_range_does_not_stop_the_gradient():
    # old + (value - old) is not always the value, so one of two equal errors may look the larger.
    rng = np.random.default_rng(0)
    old = rng.uniform(-0.01, 0.01, 1000).astype(np.float32)
    values = rng.uniform(-0.1, 0.1, 1000).astype(np.float32)
    assert (old + (values - old) != values).any()
    returns, mask = np.zeros(1000, np.float32), np.ones(1000, bool)
    gradient = jax.jit(jax.grad(lambda x: clipped_value_loss(x, old, returns, mask).sum()))(values)
    np.testing.assert_array_equal(gradient, values)


def test_a_closed_range_on_an_unmoved_critic_keeps_the_gradient():
    x, mask = jnp.array([1.0]), jnp.array([True])
    gradient = jax.grad(lambda v: clipped_value_loss(v, x, 0 * x, mask, epsilon=0.0).sum())(x)
    assert gradient == 1


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
    loss_fn = getattr(loss_room, case["loss"])(**case["kwargs"])
    arguments = {key: DATA[key] for key in case["arguments"]}
    if case["topk"]:
        loss_fn = functools.partial(loss_fn, topk=case["topk"])
    value, gradient = value_and_gradient(loss_fn, case["of"], **arguments)
    np.testing.assert_allclose(value, case["value"], **GOLDEN["tolerance"])
    if case["kwargs"].get("dft"):
        # The weights of the paper carry no gradient; Twinkle's do.
        assert not np.allclose(gradient, case["gradient"])
    else:
        np.testing.assert_allclose(gradient, case["gradient"], **GOLDEN["tolerance"])
    inputs, of = {"labels": LABELS}, case["of"]
    tokens = jax.jit(lambda x: loss_fn(inputs, {of: x}, **arguments).num_tokens)(DATA[of])
    assert (tokens or 0) == case["num_tokens"]


def test_weights_of_dft_carry_no_gradient():
    _, gradient = value_and_gradient(CrossEntropyLoss(dft=True), "logps")
    np.testing.assert_allclose(
        gradient, np.where(MASK, -np.exp(LOGPS), 0) / MASK.sum(), rtol=1e-5, atol=1e-8
    )


def test_flat_labels():
    flat, logits = LABELS.reshape(-1), LOGITS.reshape(-1, 7)
    expected, _ = value_and_gradient(CrossEntropyLoss(), "logps")
    for outputs in ({"logits": logits}, {"logps": LOGPS.reshape(-1)}):
        value = jax.jit(lambda x: CrossEntropyLoss()({"labels": flat}, x).loss)(outputs)
        np.testing.assert_allclose(value, expected, rtol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"dft": True}, {"reduction": "sum"}], ids=str)
def test_in_chunks_it_is_the_same(settings):
    unchunked, chunked = CrossEntropyLoss(**settings), ChunkedCrossEntropyLoss(3, **settings)
    for of in ("logits", "logps"):
        expected, wanted = value_and_gradient(unchunked, of)
        value, gradient = value_and_gradient(chunked, of)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-7)
    arguments = {"labels": LABELS}, {"logits": LOGITS}
    assert chunked(*arguments).num_tokens == unchunked(*arguments).num_tokens
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
    with pytest.raises(ValueError, match="logits"):
        loss(jnp.zeros(2))
    with pytest.raises(TypeError, match="logits"):
        loss(jnp.zeros((1, 2), int))


@pytest.mark.exhaustive
def test_the_student_learns_its_teacher():
    value, gradient = value_and_gradient(GKDLoss(), "logits", teacher_logits=LOGITS)
    np.testing.assert_allclose(value, 0, atol=1e-7)
    np.testing.assert_allclose(gradient, 0, atol=1e-7)
    unchunked = GKDLoss()({"labels": LABELS}, {"logits": LOGITS}, **TEACHER).loss
    for size in (1, 4, 19, 20, 100):
        chunked = GKDLoss(chunk_size=size)({"labels": LABELS}, {"logits": LOGITS}, **TEACHER).loss
        np.testing.assert_allclose(chunked, unchunked, rtol=1e-5)
    some = GKDLoss(topk=3)({"labels": LABELS}, {"logits": LOGITS}, **TEACHER).loss
    other = GKDLoss(topk=5)({"labels": LABELS}, {"logits": LOGITS}, topk=3, **TEACHER).loss
    assert some == other != unchunked


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
        (GKDLoss, {"topk": 0}, "topk"),
    ],
)
def test_errors_of_the_classes(cls, wrong, argument):
    with pytest.raises(ValueError, match=argument):
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
        (ValueError, "teacher_logits", GKDLoss(topk=2), {"teacher_logits": LOGITS[:1]}),
        (ValueError, "topk", GKDLoss(topk=99), TEACHER),
        (ValueError, "topk", GKDLoss(), TEACHER | {"topk": 0}),
        (
            AssertionError,
            "teacher_topk_indices",
            GKDLoss(),
            TEACHER | {"teacher_topk_logprobs": topk["teacher_topk_logprobs"]},
        ),
        (AssertionError, "teacher_topk_logprobs", GKDLoss(), {"teacher_topk_indices": indices}),
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
