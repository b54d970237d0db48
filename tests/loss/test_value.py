"""The clipped loss of a critic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tests.loss import reference
from tests.loss.cases import GARBAGE, random_batch, same_bits
from twinkle_jax.loss import clipped_value_loss


def critic_batch(seed, *shape):
    batch = random_batch(seed, *shape, per_token=True)
    return batch.logprobs, batch.old, batch.advantages, batch.mask


def test_worked_by_hand():
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


@pytest.mark.parametrize("shape", [(1, 1), (4, 6)])
@pytest.mark.parametrize("epsilon", [0.05, 0.2, 10.0])
def test_matches_reference(shape, epsilon):
    arguments = critic_batch(40, *shape)
    actual = jax.jit(clipped_value_loss)(*arguments, epsilon=epsilon)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(
        actual, reference.value_loss(*arguments, epsilon), rtol=1e-5, atol=1e-6
    )


def test_gradient():
    values, old, returns, mask = critic_batch(41)
    with jax.enable_x64(True):
        check_grads(
            lambda x: clipped_value_loss(x, old.astype(float), returns.astype(float), mask),
            (values.astype(float),),
            order=1,
            modes=["rev"],
        )


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


def test_garbage_and_gradients_that_must_not_flow():
    *arrays, mask = critic_batch(42)

    @jax.jit
    def run(*arrays):
        gradients = jax.grad(lambda *a: clipped_value_loss(*a, mask).sum(), argnums=(0, 1, 2))
        return clipped_value_loss(*arrays, mask), *gradients(*arrays)

    clean = run(*arrays)
    for garbage in GARBAGE:
        dirty = run(*(np.where(mask, x, garbage) for x in arrays))
        for one, other in zip(clean, dirty, strict=True):
            assert same_bits(one, other)
            assert not one[~mask].any()
    assert clean[1].any()
    assert not clean[2].any()
    assert not clean[3].any()


def test_errors():
    x, mask = jnp.zeros((2, 3)), jnp.ones((2, 3), bool)
    message = r"returns must have the shape of mask, \(2, 3\), got \(2,\)"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(clipped_value_loss, x, x, x[:, 0], mask)
    with pytest.raises(TypeError, match="behaviour_values must be floating point, got int32"):
        jax.eval_shape(clipped_value_loss, x, x.astype(int), x, mask)
