"""Loss objects: their interface and names, labels and outputs that they read, sample values."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.loss.cases import (
    DATA,
    LABELS,
    MASK,
    TARGET_LOSSES,
    random_batch,
    value_and_gradient,
)
from twinkle_jax import loss as losses
from twinkle_jax.loss import (
    LOSSES,
    BNPOLoss,
    CPOLoss,
    GRPOLoss,
    Loss,
    LossOutput,
    PolicyLoss,
    PolicyMetrics,
    PPOLoss,
    PPOValueLoss,
    get_loss,
)

every_loss = pytest.mark.parametrize("name", TARGET_LOSSES)


def test_read_by_attribute_and_by_name():
    output = LossOutput(0.5)
    assert output.loss == output["loss"] == 0.5
    assert output.metrics is None
    assert dict(output) == {"loss": 0.5, "metrics": None, "num_tokens": None}
    assert "loss" in output
    assert "logits" not in output
    assert len(output) == 3
    with pytest.raises(KeyError, match="logits"):
        output["logits"]
    with pytest.raises(KeyError, match="__class__"):
        output["__class__"]


def test_is_a_pytree():
    metrics = PolicyMetrics(*map(jnp.float32, range(6)))
    output = LossOutput(jnp.float32(0.5), metrics)
    assert len(jax.tree.leaves(output)) == 7
    doubled = jax.jit(lambda x: jax.tree.map(lambda leaf: 2 * leaf, x))(output)
    assert isinstance(doubled, LossOutput)
    assert doubled["loss"] == 1
    assert doubled.metrics.ratio_max == 10


def test_base_must_be_subclassed():
    with pytest.raises(TypeError):
        Loss()

    class Half(Loss):
        def __call__(self, inputs, outputs, **kwargs):
            return LossOutput(outputs["logps"].sum() / 2)

    assert Half()({}, {"logps": jnp.ones(4)})["loss"] == 2
    assert Half().require_logps
    assert not Half().require_entropy


def test_what_a_model_must_provide():
    needs = {"require_logits": {"gkd", "infonce", "mse"}, "require_values": {"ppo_value"}}
    for name in LOSSES:
        loss_fn = get_loss(name)
        required = {flag for flag in ("require_logits", "require_values") if getattr(loss_fn, flag)}
        assert required == {flag for flag, names in needs.items() if name in names}
        assert loss_fn.require_logps == (not required)
        assert not loss_fn.require_entropy
    assert GRPOLoss(entropy_coef=0.01).require_entropy


@pytest.mark.parametrize("name", LOSSES)
def test_equal_hashable_immutable_and_strict(name):
    cls = LOSSES[name]
    assert cls() == cls() and hash(cls()) == hash(cls())
    for field, value in vars(cls()).items():
        with pytest.raises(AttributeError):
            setattr(cls(), field, value)
    for other in LOSSES.values():
        assert (cls() == other()) == (cls is other)
    if issubclass(cls, PolicyLoss):
        assert cls() != cls(epsilon=0.1)
    assert repr(cls()).startswith(f"{cls.__name__}(")
    with pytest.raises(TypeError, match="clip_range"):
        cls(clip_range=0.2)


@pytest.mark.parametrize("name", LOSSES)
def test_unknown_arguments_are_refused_with_a_hint(name):
    for wrong, hint in [("advantage", "advantages"), ("old_logprobs", "old_logps"), ("mask", "")]:
        with pytest.raises(TypeError, match=f"'{wrong}'.*{hint}"):
            get_loss(name)({}, {}, **{wrong: 3})


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("cpo", "cross_entropy", "dpo", "ppo_value")
        else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in TARGET_LOSSES
    ],
)
def test_micro_batches_add_up(name):
    loss_fn, of, arguments = TARGET_LOSSES[name]
    if name in ("cpo", "orpo"):  # whose cross entropy is of each micro-batch otherwise
        loss_fn = dataclasses.replace(loss_fn, tokens_per_pair=float(MASK[::2].sum() / 2))
    value, gradient = value_and_gradient(loss_fn, of, **arguments)
    count = 2 if loss_fn.divides_by == "pairs" else MASK.sum()
    parts = []
    for rows in (slice(0, 2), slice(2, 4)):
        some = {key: x[rows] for key, x in arguments.items()}
        data = {of: DATA[of][rows]}
        parts.append(value_and_gradient(loss_fn, of, LABELS[rows], data, denominator=count, **some))
    np.testing.assert_allclose(sum(v for v, _ in parts), value, rtol=1e-5)
    np.testing.assert_allclose(
        np.concatenate([g for _, g in parts]), gradient, rtol=1e-5, atol=1e-7
    )


@every_loss
@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_garbage_under_the_mask_and_nothing_to_learn(name, garbage):
    loss_fn, of, arguments = TARGET_LOSSES[name]

    def dirty(x, mask=MASK):
        keep = mask if x.ndim == 2 else mask[..., None]
        return np.where(keep, x, np.float32(garbage))

    clean = value_and_gradient(loss_fn, of, **arguments)
    dirty_arguments = {key: dirty(x) for key, x in arguments.items()}
    result = value_and_gradient(loss_fn, of, data={of: dirty(DATA[of])}, **dirty_arguments)
    np.testing.assert_array_equal(clean[0], result[0])
    np.testing.assert_array_equal(clean[1], result[1])
    assert not np.asarray(clean[1])[~MASK].any()
    nothing = np.zeros_like(MASK)
    arguments = {key: dirty(x, nothing) for key, x in arguments.items()}
    data = {of: dirty(DATA[of], nothing)}
    value, gradient = value_and_gradient(loss_fn, of, np.full_like(LABELS, -100), data, **arguments)
    assert value == 0
    assert not gradient.any()


@pytest.mark.exhaustive
@every_loss
def test_jit_and_gradients_where_none_belong(name):
    loss_fn, of, arguments = TARGET_LOSSES[name]

    @jax.jit
    def run(x, arguments):
        def loss(x, arguments):
            return loss_fn({"labels": LABELS}, {of: x}, **arguments).loss

        return jax.value_and_grad(loss, argnums=(0, 1))(x, arguments)

    value, (gradient, others) = run(DATA[of], arguments)
    plain, plain_gradient = value_and_gradient(loss_fn, of, **arguments)
    np.testing.assert_allclose(value, plain, rtol=1e-5)
    np.testing.assert_allclose(gradient, plain_gradient, rtol=1e-5, atol=1e-7)
    assert not any(x.any() for x in others.values())


def test_cross_entropy_beside_a_preference_is_of_each_micro_batch():
    data = {"logps": DATA["logps"][:2]}
    pairs, _ = value_and_gradient(CPOLoss(bc_coef=0.0), "logps", LABELS[:2], data)
    both, _ = value_and_gradient(CPOLoss(), "logps", LABELS[:2], data)
    np.testing.assert_allclose(both, pairs - data["logps"][0][MASK[0]].mean(), rtol=1e-5)


LOGPS = jnp.array([[-0.5, -1.0, -2.0], [-0.25, -4.0, -8.0]])
SMALL_LABELS = np.array([[-100, 3, 5], [0, -100, -100]])


def loss(labels, outputs=None, loss_fn=None, **kwargs):
    kwargs = {"advantages": [1.0, -1.0]} | kwargs
    outputs = {"logps": LOGPS} if outputs is None else outputs
    return (loss_fn or GRPOLoss())({"labels": labels}, outputs, **kwargs).loss


@pytest.mark.slow
def test_labels_in_every_form():
    # On policy the loss is the mean of -A: (-1 + 1) / 2 = 0, or -1 for the first row alone.
    for labels in (
        SMALL_LABELS,
        SMALL_LABELS.tolist(),
        jnp.asarray(SMALL_LABELS),
        SMALL_LABELS.astype(np.int8),
    ):
        assert loss(labels) == 0
    assert loss(SMALL_LABELS[0], {"logps": LOGPS[0]}, advantages=[1.0]) == -1
    assert loss(SMALL_LABELS, {"logps": LOGPS[..., None]}) == 0
    ours = np.where(SMALL_LABELS == -100, 255, SMALL_LABELS).astype(np.uint8)
    # Over tokens it is the mean of -1, -1 and 1.
    assert loss(ours, loss_fn=BNPOLoss(ignore_index=255)) == loss(SMALL_LABELS, loss_fn=BNPOLoss())
    assert loss(SMALL_LABELS, loss_fn=BNPOLoss()) == np.float32(-1 / 3)


def test_log_probabilities_come_from_logits():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 6)), jnp.float32)
    labels, old = SMALL_LABELS, LOGPS - 1

    @jax.jit
    @jax.value_and_grad
    def from_logits(x):
        return loss(SMALL_LABELS, {"logits": x}, old_logps=old)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def from_logps(x):
        logps = jnp.take_along_axis(
            jax.nn.log_softmax(x), jnp.maximum(labels, 0)[..., None], axis=-1
        )
        # Log-probabilities that are arguments are taken; logits then do not matter.
        both = {"logps": logps[..., 0], "logits": jnp.full_like(x, jnp.nan)}
        return tuple(loss(SMALL_LABELS, given, old_logps=old) for given in ({"logps": logps}, both))

    value, gradient = from_logits(logits)
    (plain, both), plain_gradient = from_logps(logits)
    np.testing.assert_allclose(value, plain, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(gradient, plain_gradient, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(both, value, rtol=1e-6)
    # Garbage where there is no label changes nothing.
    dirty, gradient = from_logits(np.where((labels == -100)[..., None], np.float32("nan"), logits))
    assert dirty == value
    assert np.isfinite(gradient).all()
    assert not gradient[SMALL_LABELS == -100].any()


def test_half_precision_logits_are_normalised_in_single():
    logits = jnp.full((1, 1, 4096), 0.5, jnp.bfloat16)
    rows = {"ref_logps": [[0.0]], "advantages": [0.0]}
    run = jax.jit(lambda x: GRPOLoss(beta=1.0)({"labels": [[7]]}, {"logits": x}, **rows).loss)
    value = run(logits)
    # k3 with log-ratio -log 4096: 4096 - log 4096 - 1
    np.testing.assert_allclose(value, 4095 - np.log(4096), rtol=1e-5)


def test_labels_outside_the_vocabulary():
    outputs, plain = {"logits": jnp.zeros((2, 3, 6))}, {"logps": LOGPS}
    critic = {"old_values": LOGPS, "returns": LOGPS}
    for row, column, call in [
        (1, 0, lambda: loss(np.where(SMALL_LABELS == 0, 6, SMALL_LABELS), outputs)),
        (1, 0, lambda: loss(np.where(SMALL_LABELS == 0, -1, SMALL_LABELS), plain)),
        (0, 0, lambda: loss(SMALL_LABELS, loss_fn=GRPOLoss(ignore_index=-1))),
        (1, 0, lambda: loss(np.where(SMALL_LABELS == 0, 2**32 + 5, SMALL_LABELS), plain)),
        (
            0,
            0,
            lambda: PPOValueLoss()(
                {"labels": np.where(SMALL_LABELS < 0, -7, 1)}, {"values": LOGPS}, **critic
            ),
        ),
    ]:
        with pytest.raises(ValueError, match=rf"^inputs\['labels'\]\[{row}, {column}\]"):
            call()


@pytest.mark.parametrize("label", [6, -1])
def test_traced_labels_outside_the_vocabulary_are_not_silent(label):
    logits = jnp.zeros((2, 3, 6))
    run = jax.jit(lambda labels: loss(labels, {"logits": logits}))
    assert run(jnp.asarray(SMALL_LABELS)) == 0
    assert jnp.isnan(run(jnp.asarray(np.where(SMALL_LABELS == 0, label, SMALL_LABELS))))


def test_errors_about_inputs():
    for error, argument, inputs in [
        (TypeError, "inputs", [{}]),
        (ValueError, "inputs", {"input_ids": SMALL_LABELS}),
        (TypeError, "labels", {"labels": LOGPS}),
        (TypeError, "labels", {"labels": SMALL_LABELS > 0}),
        (ValueError, "labels", {"labels": SMALL_LABELS[None]}),
        (ValueError, "labels", {"labels": [[1, 2, 3], [4]]}),
    ]:
        with pytest.raises(error, match=argument):
            GRPOLoss()(inputs, {"logps": LOGPS})


def test_errors_about_outputs():
    bonus, integers = GRPOLoss(entropy_coef=0.1), jnp.zeros((2, 3, 6), int)
    for error, argument, outputs, loss_fn in [
        (TypeError, "outputs", LOGPS, None),
        (ValueError, "outputs", {"values": LOGPS}, None),
        (ValueError, "logps", {"logps": jnp.zeros((2, 4))}, None),
        (TypeError, "logps", {"logps": integers[..., 0]}, None),
        (ValueError, "logits", {"logits": jnp.zeros((2, 3))}, None),
        (ValueError, "logits", {"logits": jnp.zeros((2, 4, 6))}, None),
        (ValueError, "logits", {"logits": jnp.zeros((3, 3, 6))}, None),
        (TypeError, "logits", {"logits": integers}, None),
        (ValueError, "entropies", {"logps": LOGPS}, bonus),
        (ValueError, "entropies", {"logps": LOGPS, "entropies": LOGPS[0]}, bonus),
    ]:
        with pytest.raises(error, match=argument):
            loss(SMALL_LABELS, outputs, loss_fn)
    with pytest.raises(ValueError, match="outputs"):
        PPOValueLoss()(
            {"labels": SMALL_LABELS}, {"logps": LOGPS}, old_values=[0, 0], returns=[0, 0]
        )


# Numbers for samples: arrays, or ragged rows of response tokens. `ROW_` is what these tests share.

ROW_LABELS = np.array([[-100, 3, 5, -100], [0, -100, -100, -100], [1, 2, 3, 4]])
ROW_MASK = ROW_LABELS != -100
OLD = np.arange(1, 13, dtype=np.float32).reshape(3, 4) / -8
ROWS = [OLD[0, 1:3].tolist(), [float(OLD[1, 0])], OLD[2].tolist()]
ROW_LOGPS = jnp.asarray(OLD) + jnp.linspace(-0.1, 0.1, 12, dtype=jnp.float32).reshape(3, 4)
ADVANTAGES = np.array([1.0, -2.0, 0.5], np.float32)


def row_loss(old_logps=OLD, labels=ROW_LABELS, advantages=ADVANTAGES, **kwargs):
    outputs = {"logps": ROW_LOGPS}
    return GRPOLoss(beta=0.5)(
        {"labels": labels}, outputs, old_logps=old_logps, advantages=advantages, **kwargs
    ).loss


FORMS = {
    "array": OLD,
    "device": jnp.asarray(OLD),
    "double": OLD.astype(float),
    "lists": ROWS,
    "tuples": tuple(map(tuple, ROWS)),
    "arrays": [np.asarray(row, np.float32) for row in ROWS],
    "device_rows": [jnp.asarray(row) for row in ROWS],
    "whole_lists": OLD.tolist(),
    "mixed": [OLD[0].tolist(), ROWS[1], jnp.asarray(ROWS[2])],
}


QUICKLY = ("lists", "mixed", "device")


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    [pytest.param(f, marks=[pytest.mark.exhaustive] * (f not in QUICKLY)) for f in FORMS],
)
def test_every_form_is_the_same(form):
    assert row_loss(FORMS[form]) == row_loss()
    assert row_loss(ref_logps=FORMS[form]) == row_loss(ref_logps=OLD)
    # Traced labels hide the number of tokens, and numbers that are arguments of jit are traced.
    assert jax.jit(lambda labels: row_loss(FORMS[form], labels))(ROW_LABELS) == jax.jit(row_loss)(
        OLD
    )
    assert jax.jit(row_loss)(FORMS[form]) == jax.jit(row_loss)(OLD)


@pytest.mark.slow
def test_advantages_in_every_form():
    expected = row_loss()
    per_token = np.repeat(ADVANTAGES[:, None], 4, axis=1)
    ragged = [[1.0, 1.0], [-2.0], [0.5] * 4]
    for advantages in [
        ADVANTAGES.tolist(),
        [1, -2, 0.5],
        jnp.asarray(ADVANTAGES),
        list(jnp.asarray(ADVANTAGES)),
        ADVANTAGES[:, None],
        [[1.0], [-2.0], [0.5]],
        per_token,
        per_token.tolist(),
        ragged,
    ]:
        assert row_loss(advantages=advantages) == expected


@pytest.mark.exhaustive
def test_types():
    rows = [[-1, -2], jnp.array([-1.5]), OLD[2]]
    with jax.enable_x64(True):
        assert row_loss(rows).dtype == jnp.float32  # the type of the log-probabilities
    assert row_loss(rows) == row_loss([[-1.0, -2.0], [-1.5], OLD[2]])


def test_one_number_per_token_and_position():
    # Each token has a value of its own, so that a shift by one position would show.
    tokens = [[0.25, -0.5], [1.0], [2.0, -1.0, 0.5, 4.0]]
    rows = np.zeros((3, 4), np.float32)
    rows[ROW_MASK] = np.concatenate(tokens)
    turned = [row[::-1] for row in tokens]
    of_tokens, of_rows, of_turned = jax.jit(
        lambda: [row_loss(advantages=x) for x in (tokens, rows, turned)]
    )()
    assert of_tokens == of_rows != of_turned


def test_rectangular_array_of_response_tokens():
    labels = np.array([[-100, 3, 5], [1, 2, -100]])
    outputs, inputs = {"logps": ROW_LOGPS[:2, :3]}, {"labels": labels}
    old = np.array([[-0.25, -0.5], [-0.75, -1.0]], np.float32)
    rows = np.array([[0, -0.25, -0.5], [-0.75, -1.0, 0]], np.float32)
    one, other = jax.jit(
        lambda: [
            GRPOLoss()(inputs, outputs, old_logps=x, advantages=[1.0, -1.0]).loss
            for x in (old, rows)
        ]
    )()
    assert one == other


def test_a_row_without_tokens_is_empty():
    inputs = {"labels": np.array([[-100, -100], [1, 2]])}
    rows = {"old_logps": [[], [0.0, 0.0]], "advantages": [np.nan, 1.0]}
    run = jax.jit(lambda x: GRPOLoss()(inputs, {"logps": x}, **rows).loss)
    assert run(jnp.zeros((2, 2))) == -0.5


def test_values_of_a_critic_in_every_form():
    outputs = {"values": ROW_LOGPS}
    expected = PPOValueLoss()({"labels": ROW_LABELS}, outputs, old_values=OLD, returns=OLD + 1).loss
    rows = [[x + 1 for x in row] for row in ROWS]
    assert (
        PPOValueLoss()({"labels": ROW_LABELS}, outputs, old_values=ROWS, returns=rows).loss
        == expected
    )
    scalars = PPOValueLoss()(
        {"labels": ROW_LABELS}, outputs, old_values=ROWS, returns=[0, 1, 2]
    ).loss
    spread = np.repeat(np.arange(3.0, dtype=np.float32)[:, None], 4, axis=1)
    other = PPOValueLoss()({"labels": ROW_LABELS}, outputs, old_values=OLD, returns=spread).loss
    assert scalars == other


@pytest.mark.parametrize("length", [0, 1, 3, 5])
def test_rows_of_the_wrong_length(length):
    rows = [[-1.0] * length, *ROWS[1:]]
    for call in (
        lambda: row_loss(rows),
        lambda: row_loss(ref_logps=rows),
        lambda: jax.jit(lambda x: row_loss(rows) + x)(0.0),  # with labels from outside
    ):
        with pytest.raises(ValueError, match=r"_logps\[0\]"):
            call()


def test_rows_of_the_wrong_length_behind_traced_labels():
    run = jax.jit(lambda labels, old: row_loss(old, labels))
    assert not jnp.isnan(run(ROW_LABELS, ROWS))
    assert jnp.isnan(run(ROW_LABELS, [[-1.0], *ROWS[1:]]))
    assert jnp.isnan(run(ROW_LABELS, [[-1.0] * 3, *ROWS[1:]]))
    with pytest.raises(ValueError, match=r"old_logps\[2\]"):
        run(ROW_LABELS, [*ROWS[:2], [-1.0] * 5])


def test_errors_about_rows():
    mixed = [OLD[0, :2], OLD[1, :1], OLD[2, :3]]
    for error, argument, data in [
        (ValueError, "old_logps", ROWS[:2]),
        (ValueError, "advantages", np.zeros(4, np.float32)),
        (ValueError, r"old_logps\[0\]", [-1.0, -2.0, -3.0]),
        (ValueError, "old_logps", OLD[..., None]),
        (ValueError, "old_logps", OLD[:, 0]),
        (ValueError, r"old_logps\[2\]", mixed),
        (ValueError, r"old_logps\[0\]", OLD[:, :3]),
        (ValueError, r"advantages\[1\]", [[1.0, 2.0], 3.0, [1.0] * 4]),
        (TypeError, "old_logps", -1.0),
        (TypeError, "advantages", jnp.float32(1.0)),
        (TypeError, "old_logps", OLD.astype(np.complex64)),
        (TypeError, "advantages", ROW_MASK),
        (TypeError, r"advantages\[1\]", [[1.0] * 2, OLD[1] > 0, [1.0] * 4]),
        (TypeError, r"advantages\[1\]", [1.0, None, 2.0]),
        (TypeError, r"old_logps\[2\]", [*ROWS[:2], [-1.0, None, -1.0]]),
    ]:
        with pytest.raises(error, match=f"^{argument}"):
            row_loss(**{argument.split("\\")[0]: data})


# By name, class and function.

BATCH = random_batch(81)
INPUTS = {"labels": jnp.where(BATCH.mask, 7, -100)}
OUTPUTS = {"logps": BATCH.logprobs}


def test_every_loss_has_a_name():
    bases = {"Loss", "PolicyLoss", "PreferenceLoss"}
    classes = {name for name in losses.__all__ if name.endswith("Loss")} - bases
    assert {type(get_loss(name)).__name__ for name in LOSSES} == classes
    assert all(type(get_loss(name)).__name__ == name for name in classes)


def test_names_classes_and_objects():
    assert get_loss("grpo", epsilon=0.1) == get_loss(GRPOLoss, epsilon=0.1) == GRPOLoss(0.1)
    assert get_loss("PPOLoss") == PPOLoss()
    loss_fn = GRPOLoss(0.3)
    assert get_loss(loss_fn) is loss_fn


def test_a_class_with_a_name_is_found(monkeypatch):
    monkeypatch.setattr("twinkle_jax.loss.loss_object.LOSSES", dict(LOSSES))

    class MineLoss(GRPOLoss, name="mine"):
        pass

    assert type(get_loss("mine", epsilon=0.1)) is type(get_loss("MineLoss")) is MineLoss


def test_errors_of_get_loss():
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
    assert get_loss(lambda inputs, outputs: np.float32(2))(INPUTS, OUTPUTS).loss == 2
    passed_on = get_loss(lambda inputs, outputs: LossOutput(jnp.float32(1), "metrics"))
    assert passed_on(INPUTS, OUTPUTS, **arguments).metrics == "metrics"


def test_functions_that_return_no_number():
    for result in (jnp.ones(3), None, True, {"value": 1.0}):
        with pytest.raises(TypeError, match=r"^the loss function"):
            get_loss(lambda inputs, outputs, result=result: result)(INPUTS, OUTPUTS)


def test_divides_by_of_functions():
    assert get_loss(weighted_sum).divides_by == "tokens"
    assert get_loss(lambda inputs, outputs: 0.0).divides_by == "batches"
