"""Estimates of the divergence from a reference policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tests.loss import reference
from tests.loss.cases import GARBAGE, random_batch, same_bits
from twinkle_jax.loss import kl_k1, kl_k2, kl_k3

ORACLES = {kl_k1: reference.k1, kl_k2: reference.k2, kl_k3: reference.k3}
every_estimate = pytest.mark.parametrize("estimate", ORACLES)


def test_worked_by_hand():
    # Probabilities 1/2 and 1/8 against 1/4 and 1/4: log-ratios log 2 and -log 2.
    #   k3: 1/2 + log 2 - 1 and 2 - log 2 - 1
    new, ref = jnp.log(jnp.array([0.5, 0.125, 0.5])), jnp.log(jnp.array([0.25, 0.25, 0.1]))
    mask, two = jnp.array([True, True, False]), np.log(2)
    np.testing.assert_allclose(kl_k1(new, ref, mask), [two, -two, 0], rtol=1e-6)
    np.testing.assert_allclose(kl_k2(new, ref, mask), [two**2 / 2, two**2 / 2, 0], rtol=1e-6)
    np.testing.assert_allclose(kl_k3(new, ref, mask), [two - 0.5, 1 - two, 0], rtol=1e-6)


@every_estimate
def test_matches_reference(estimate):
    batch = random_batch(30, spread=1.5)
    actual = jax.jit(estimate)(batch.logprobs, batch.ref, batch.mask)
    desired = ORACLES[estimate](batch.logprobs, batch.ref, batch.mask)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, desired, rtol=1e-5, atol=1e-6)


@every_estimate
def test_gradient(estimate):
    batch = random_batch(31)
    with jax.enable_x64(True):
        new, ref = batch.logprobs.astype(float), batch.ref.astype(float)
        check_grads(jax.jit(lambda x: estimate(x, ref, batch.mask)), (new,), order=1, modes=["rev"])


@every_estimate
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


@every_estimate
def test_far_apart_is_finite(estimate):
    new, ref, mask = jnp.array([-200.0, 0.0]), jnp.array([0.0, -200.0]), jnp.ones(2, bool)
    value, gradient = jax.jit(jax.value_and_grad(lambda x: estimate(x, ref, mask).sum()))(new)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    if estimate is kl_k3:
        clamped = [np.exp(20) - 21, np.exp(-20) + 19]
        np.testing.assert_allclose(estimate(new, ref, mask), clamped, rtol=1e-6)
        assert not gradient.any()


@every_estimate
def test_garbage_and_gradients_that_must_not_flow(estimate):
    batch = random_batch(32)

    @jax.jit
    def run(*arguments):
        gradients = jax.grad(lambda *a: estimate(*a, batch.mask).sum(), argnums=(0, 1))(*arguments)
        return estimate(*arguments, batch.mask), *gradients

    clean = run(batch.logprobs, batch.ref)
    for garbage in GARBAGE:
        dirty = [np.where(batch.mask, x, garbage) for x in (batch.logprobs, batch.ref)]
        for one, other in zip(clean, run(*dirty), strict=True):
            assert same_bits(one, other)
            assert not one[~batch.mask].any()
    assert clean[1].any()
    assert not clean[2].any()


@every_estimate
def test_errors(estimate):
    x, mask = jnp.zeros((2, 3)), jnp.ones((2, 3), bool)
    message = r"reference_logprobs must have the shape of mask, \(2, 3\), got \(3,\)"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(estimate, x, x[0], mask)
    with pytest.raises(TypeError, match="reference_logprobs must be floating point, got int32"):
        jax.eval_shape(estimate, x, x.astype(int), mask)
