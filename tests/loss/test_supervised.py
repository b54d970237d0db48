"""Cross entropy, and dynamic fine-tuning."""

import jax
import jax.numpy as jnp
import numpy as np

from twinkle_jax.loss import cross_entropy, dynamic_fine_tuning


def test_worked_by_hand():
    logprobs, mask = jnp.log(jnp.array([0.5, 0.25, 0.1])), jnp.array([True, True, False])
    for function, losses, gradient in [
        (cross_entropy, [np.log(2), np.log(4), 0], [-1, -1, 0]),
        (dynamic_fine_tuning, [np.log(2) / 2, np.log(4) / 4, 0], [-0.5, -0.25, 0]),
    ]:
        np.testing.assert_allclose(function(logprobs, mask), losses, rtol=1e-6)
        actual = jax.grad(lambda x, f=function: f(x, mask).sum())(logprobs)
        np.testing.assert_allclose(actual, gradient, rtol=1e-6)
