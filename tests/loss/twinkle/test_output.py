"""The result of a loss object, and the base class for one of your own."""

import jax
import jax.numpy as jnp
import pytest

from twinkle_jax.loss import GRPOLoss, Loss, LossOutput, PolicyMetrics, PPOValueLoss


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
    assert GRPOLoss().require_logps
    assert not GRPOLoss().require_values
    assert not GRPOLoss().require_entropy
    assert GRPOLoss(entropy_coef=0.01).require_entropy
    assert PPOValueLoss().require_values
    assert not PPOValueLoss().require_logps
    assert not PPOValueLoss().require_entropy
