"""Estimates of the divergence from a reference policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax.loss import kl_k1, kl_k2, kl_k3


def test_worked_by_hand():
    # Probabilities 1/2 and 1/8 against 1/4 and 1/4: log-ratios log 2 and -log 2.
    #   k3: 1/2 + log 2 - 1 and 2 - log 2 - 1
    new, ref = jnp.log(jnp.array([0.5, 0.125, 0.5])), jnp.log(jnp.array([0.25, 0.25, 0.1]))
    mask, two = jnp.array([True, True, False]), np.log(2)
    np.testing.assert_allclose(kl_k1(new, ref, mask), [two, -two, 0], rtol=1e-6)
    np.testing.assert_allclose(kl_k2(new, ref, mask), [two**2 / 2, two**2 / 2, 0], rtol=1e-6)
    np.testing.assert_allclose(kl_k3(new, ref, mask), [two - 0.5, 1 - two, 0], rtol=1e-6)


@pytest.mark.parametrize("estimate", [kl_k1, kl_k2, kl_k3])
def test_expected_value_and_gradient(estimate):
    # Over a whole vocabulary the expectations can be taken exactly.
    with jax.enable_x64(True):
        logits = jnp.array([0.3, -1.0, 2.0, 0.5])
        ref = jax.nn.log_softmax(jnp.array([-0.4, 0.2, 1.0, 0.9]))
        mask = jnp.ones(4, bool)

        def expectation(logits):
            new = jax.nn.log_softmax(logits)
            return jnp.sum(jax.lax.stop_gradient(jnp.exp(new)) * estimate(new, ref, mask))

        def divergence(logits):
            new = jax.nn.log_softmax(logits)
            return jnp.sum(jnp.exp(new) * (new - ref))

        def reversed_divergence(logits):
            return jnp.sum(jnp.exp(ref) * (ref - jax.nn.log_softmax(logits)))

        value, gradient = jax.jit(jax.value_and_grad(expectation))(logits)
        if estimate is not kl_k2:
            np.testing.assert_allclose(value, divergence(logits), rtol=1e-12)
        target = {
            kl_k1: jnp.zeros(4),
            kl_k2: jax.grad(divergence)(logits),
            kl_k3: jax.grad(reversed_divergence)(logits),
        }
        np.testing.assert_allclose(gradient, target[estimate], atol=1e-12)


def test_far_apart_is_clamped():
    new, ref, mask = jnp.array([-200.0, 0.0]), jnp.array([0.0, -200.0]), jnp.ones(2, bool)
    clamped = [np.exp(20) - 21, np.exp(-20) + 19]
    np.testing.assert_allclose(kl_k3(new, ref, mask), clamped, rtol=1e-6)
    assert not jax.grad(lambda x: kl_k3(x, ref, mask).sum())(new).any()
