"""Importance ratios of tokens and of sequences."""

import jax
import jax.numpy as jnp
import numpy as np

from twinkle_jax.loss import sequence_log_ratio, token_log_ratio


def test_worked_by_hand():
    # Log-ratios 0.5 and -1.5 in the first row: their mean is -0.5. The second row is 1 and masked.
    new = jnp.array([[-1.0, -2.5], [-1.0, -1.0]])
    old = jnp.array([[-1.5, -1.0], [-2.0, -9.0]])
    mask = jnp.array([[True, True], [True, False]])
    np.testing.assert_array_equal(token_log_ratio(new, old, mask), [[0.5, -1.5], [1.0, 0.0]])
    np.testing.assert_array_equal(sequence_log_ratio(new, old, mask), [[-0.5, -0.5], [1.0, 0.0]])


def test_gradient_of_the_sequence_reaches_each_token():
    mask = jnp.array([[True, True, True, True, False]])
    gradient = jax.grad(lambda x: sequence_log_ratio(x, x - 1, mask)[0, 0])(jnp.zeros((1, 5)))
    np.testing.assert_array_equal(gradient, [[0.25, 0.25, 0.25, 0.25, 0]])


def test_far_apart_is_clamped():
    new, old, mask = (
        jnp.array([-200.0, 0.0, 0.0]),
        jnp.array([0.0, -200.0, -jnp.inf]),
        jnp.ones(3, bool),
    )
    np.testing.assert_array_equal(token_log_ratio(new, old, mask), [-20, 20, 20])
    np.testing.assert_allclose(sequence_log_ratio(new, old, mask), [20 / 3] * 3, rtol=1e-6)
    for function in (token_log_ratio, sequence_log_ratio):
        assert not jax.grad(lambda x, f=function: f(x, old, mask).sum())(new).any()
