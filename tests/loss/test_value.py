"""The clipped loss of a critic."""

import jax
import jax.numpy as jnp
import numpy as np

from twinkle_jax.loss import clipped_value_loss


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
