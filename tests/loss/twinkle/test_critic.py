"""Twinkle's loss of a critic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.loss import reference
from tests.loss.cases import random_batch
from twinkle_jax.loss import PPOValueLoss


def loss(values, old, returns, mask, loss_fn=None, **kwargs):
    labels = jnp.where(mask, 7, -100)
    return (loss_fn or PPOValueLoss())(
        {"labels": labels}, {"values": values}, old_values=old, returns=returns, **kwargs
    ).loss


def test_worked_by_hand():
    # Values 2 and 1 from 0 with epsilon 0.5, returns 1: errors max(1, 0.25) and max(0, 0.25);
    # half of them over two tokens. In [batch, time, 1], as a linear layer returns it.
    values = jnp.array([[[2.0], [1.0], [jnp.nan]]])
    mask = jnp.array([[True, True, False]])
    run = jax.value_and_grad(lambda x: loss(x, [[0.0, 0.0]], [[1.0, 1.0]], mask, PPOValueLoss(0.5)))
    value, gradient = jax.jit(run)(values)
    assert value == 0.3125
    np.testing.assert_array_equal(gradient, [[[0.5], [0.0], [0.0]]])


def test_matches_reference_and_micro_batches_add_up():
    batch = random_batch(90, per_token=True)
    arguments = batch.logprobs, batch.old, batch.advantages, batch.mask
    run = jax.jit(jax.value_and_grad(loss), static_argnames="loss_fn")
    value, gradient = run(*arguments)
    per_token = reference.value_loss(*arguments)
    np.testing.assert_allclose(value, reference.token_mean(per_token, batch.mask), rtol=1e-5)
    pieces = [
        run(*piece, denominator=batch.mask.sum())
        for piece in zip(*(np.split(x, 2) for x in arguments), strict=True)
    ]
    np.testing.assert_allclose(sum(v for v, _ in pieces), value, rtol=1e-6)
    np.testing.assert_allclose(np.concatenate([g for _, g in pieces]), gradient, rtol=1e-6)
    wide = run(*arguments, loss_fn=PPOValueLoss(epsilon=9.0))[0]
    error = np.square(batch.logprobs - batch.advantages)[batch.mask].mean() / 2
    np.testing.assert_allclose(wide, error, rtol=1e-5)


def test_nothing_kept_is_zero():
    nan = jnp.full((2, 3), jnp.nan)
    value, gradient = jax.jit(jax.value_and_grad(loss))(nan, nan, nan, nan > 0)
    assert value == 0
    assert not gradient.any()


def test_equal_hashable_and_defaults():
    assert PPOValueLoss() == PPOValueLoss(0.2, -100)
    assert hash(PPOValueLoss()) == hash(PPOValueLoss())
    assert PPOValueLoss(0.5) != PPOValueLoss()


def test_arguments():
    x, mask = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    ignored = {"old_logps": x, "ref_logps": x, "advantages": x}
    assert loss(x, x, x, mask, **ignored) == 0
    with pytest.raises(TypeError, match="old_values must be given to PPOValueLoss, got None"):
        loss(x, None, x, mask)
    with pytest.raises(TypeError, match="returns must be given to PPOValueLoss, got None"):
        loss(x, x, None, mask)
    with pytest.raises(TypeError, match=r"got \'return\' \(did you mean \'returns\'\?\)"):
        loss(x, x, x, mask, **{"return": x})
    with pytest.raises(ValueError, match=r"returns\[0\] must have 2 numbers .*, got 3"):
        loss(x, x, [[1.0, 2.0, 3.0]], mask)
    with pytest.raises(ValueError, match=r"outputs\['values'\] must have the shape of"):
        loss(x[:, :1], x, x, mask)
