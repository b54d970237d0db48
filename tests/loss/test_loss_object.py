"""What a loss object is and returns, and laws of every loss with a target."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.loss.targets import DATA, LABELS, MASK, TARGET_LOSSES, value_and_gradient
from twinkle_jax.loss import (
    LOSSES,
    CPOLoss,
    GRPOLoss,
    Loss,
    LossOutput,
    PolicyMetrics,
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
    with pytest.raises(TypeError, match="abstract"):
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
    with pytest.raises(TypeError, match="clip_range"):
        cls(clip_range=0.2)


@pytest.mark.parametrize("name", LOSSES)
def test_unknown_arguments_are_refused_with_a_hint(name):
    for wrong, hint in [("advantage", "advantages"), ("old_logprobs", "old_logps"), ("mask", "")]:
        with pytest.raises(TypeError, match=f"got '{wrong}'.*{hint}"):
            get_loss(name)({}, {}, **{wrong: 3})


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("cross_entropy", "dpo", "ppo_value")
        else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in TARGET_LOSSES
        if name not in ("cpo", "orpo")  # whose cross entropy is of each micro-batch
    ],
)
def test_micro_batches_add_up(name):
    loss_fn, of, arguments = TARGET_LOSSES[name]
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
