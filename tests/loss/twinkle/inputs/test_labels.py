"""What the loss objects read out of a batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax.loss import BNPOLoss, GRPOLoss, PPOValueLoss

LOGPS = jnp.array([[-0.5, -1.0, -2.0], [-0.25, -4.0, -8.0]])
LABELS = np.array([[-100, 3, 5], [0, -100, -100]])


def loss(labels, outputs=None, loss_fn=None, **kwargs):
    kwargs = {"advantages": [1.0, -1.0]} | kwargs
    outputs = {"logps": LOGPS} if outputs is None else outputs
    return (loss_fn or GRPOLoss())({"labels": labels}, outputs, **kwargs).loss


def test_labels_in_every_form():
    # On policy the loss is the mean of -A: (-1 + 1) / 2 = 0, or -1 for the first row alone.
    for labels in (LABELS, LABELS.tolist(), jnp.asarray(LABELS), LABELS.astype(np.int8)):
        assert loss(labels) == 0
    assert loss(LABELS[0], {"logps": LOGPS[0]}, advantages=[1.0]) == -1
    assert loss(LABELS, {"logps": LOGPS[..., None]}) == 0
    ours = np.where(LABELS == -100, 255, LABELS).astype(np.uint8)
    # Over tokens it is the mean of -1, -1 and 1.
    assert loss(ours, loss_fn=BNPOLoss(ignore_index=255)) == loss(LABELS, loss_fn=BNPOLoss())
    assert loss(LABELS, loss_fn=BNPOLoss()) == np.float32(-1 / 3)


def test_log_probabilities_come_from_logits():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 6)), jnp.float32)
    logps = jnp.take_along_axis(
        jax.nn.log_softmax(logits), jnp.maximum(jnp.asarray(LABELS), 0)[..., None], axis=-1
    )[..., 0]
    old = LOGPS - 1

    def from_logits(x):
        return loss(LABELS, {"logits": x}, old_logps=old)

    def from_logps(x):
        logps = jnp.take_along_axis(
            jax.nn.log_softmax(x), jnp.maximum(jnp.asarray(LABELS), 0)[..., None], axis=-1
        )
        return loss(LABELS, {"logps": logps}, old_logps=old)

    for ours, plain in zip(
        jax.jit(jax.value_and_grad(from_logits))(logits),
        jax.jit(jax.value_and_grad(from_logps))(logits),
        strict=True,
    ):
        np.testing.assert_allclose(ours, plain, rtol=1e-6, atol=1e-7)
    # Log-probabilities that are given are taken; logits then do not matter.
    both = loss(LABELS, {"logps": logps, "logits": None}, old_logps=old)
    np.testing.assert_allclose(both, from_logits(logits), rtol=1e-6)
    # Garbage where there is no label changes nothing.
    dirty = jnp.where((jnp.asarray(LABELS) == -100)[..., None], jnp.nan, logits)
    run = jax.jit(jax.value_and_grad(from_logits))
    value, gradient = run(dirty)
    assert value == run(logits)[0]
    assert np.isfinite(gradient).all()
    assert not gradient[LABELS == -100].any()


def test_half_precision_logits_are_normalised_in_single():
    logits = jnp.full((1, 1, 4096), 0.5, jnp.bfloat16)
    value = GRPOLoss(beta=1.0)(
        {"labels": [[7]]}, {"logits": logits}, ref_logps=[[0.0]], advantages=[0.0]
    ).loss
    # k3 with log-ratio -log 4096: 4096 - log 4096 - 1
    np.testing.assert_allclose(value, 4095 - np.log(4096), rtol=1e-5)


def test_labels_outside_the_vocabulary():
    logits = jnp.zeros((2, 3, 6))
    with pytest.raises(ValueError, match=r"\[1, 0\] must be a token below 6 or .*, got 6"):
        loss(np.where(LABELS == 0, 6, LABELS), {"logits": logits})
    with pytest.raises(ValueError, match=r"\[1, 0\] must be a token \(0 or more\) .*, got -1"):
        loss(np.where(LABELS == 0, -1, LABELS))
    with pytest.raises(ValueError, match=r"\[0, 0\] must be .* or ignore_index=-1, got -100"):
        loss(LABELS, loss_fn=GRPOLoss(ignore_index=-1))
    critic = {"old_values": LOGPS, "returns": LOGPS}
    with pytest.raises(ValueError, match=r"\['labels'\]\[0, 0\] must be .*, got -7"):
        PPOValueLoss()({"labels": np.where(LABELS < 0, -7, 1)}, {"values": LOGPS}, **critic)


@pytest.mark.parametrize("label", [6, -1])
def test_traced_labels_outside_the_vocabulary_are_not_silent(label):
    logits = jnp.zeros((2, 3, 6))
    run = jax.jit(lambda labels: loss(labels, {"logits": logits}))
    assert run(jnp.asarray(LABELS)) == 0
    assert jnp.isnan(run(jnp.asarray(np.where(LABELS == 0, label, LABELS))))


def test_errors_about_inputs():
    with pytest.raises(TypeError, match=r"inputs must be a mapping, got list"):
        GRPOLoss()([{}], {"logps": LOGPS})
    with pytest.raises(ValueError, match=r"inputs must hold 'labels', got \['input_ids'\]"):
        GRPOLoss()({"input_ids": LABELS}, {"logps": LOGPS})
    with pytest.raises(TypeError, match=r"inputs\['labels'\] must be integers, got float32"):
        jax.eval_shape(loss, LOGPS)
    with pytest.raises(TypeError, match=r"inputs\['labels'\] must be integers, got bool"):
        loss(LABELS > 0)
    with pytest.raises(ValueError, match=r"must be \[batch, time\], got shape \(1, 2, 3\)"):
        loss(LABELS[None])
    with pytest.raises(ValueError, match=r"\['labels'\] must have rows .*, got lengths \[3, 1\]"):
        loss([[1, 2, 3], [4]])


def test_errors_about_outputs():
    with pytest.raises(TypeError, match=r"outputs must be a mapping, got ArrayImpl"):
        loss(LABELS, LOGPS)
    with pytest.raises(ValueError, match=r"must hold 'logps' or 'logits', got \['values'\]"):
        loss(LABELS, {"values": LOGPS})
    shapes = r"outputs\['logps'\] must have the shape of inputs\['labels'\], \(2, 3\), got \(2, 4\)"
    with pytest.raises(ValueError, match=shapes):
        jax.eval_shape(lambda x: loss(LABELS, {"logps": x}), jnp.zeros((2, 4)))
    with pytest.raises(TypeError, match=r"outputs\['logps'\] must be floating point, got int32"):
        jax.eval_shape(lambda x: loss(LABELS, {"logps": x}), jnp.zeros((2, 3), int))
    for shape in [(2, 3), (2, 4, 6), (3, 3, 6)]:
        with pytest.raises(ValueError, match=r"outputs\['logits'\] must be \[batch, time, vocab"):
            jax.eval_shape(lambda x: loss(LABELS, {"logits": x}), jnp.zeros(shape))
    with pytest.raises(TypeError, match=r"outputs\['logits'\] must be floating point, got int32"):
        jax.eval_shape(lambda x: loss(LABELS, {"logits": x}), jnp.zeros((2, 3, 6), int))
    with pytest.raises(ValueError, match=r"must hold 'entropies', got \['logps'\]"):
        loss(LABELS, loss_fn=GRPOLoss(entropy_coef=0.1))
    with pytest.raises(ValueError, match=r"outputs\['entropies'\] must have the shape"):
        loss(LABELS, {"logps": LOGPS, "entropies": LOGPS[0]}, loss_fn=GRPOLoss(entropy_coef=0.1))
    with pytest.raises(ValueError, match=r"outputs must hold 'values', got \['logps'\]"):
        PPOValueLoss()({"labels": LABELS}, {"logps": LOGPS}, old_values=[0, 0], returns=[0, 0])
