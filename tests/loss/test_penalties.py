"""KL estimators, the entropy bonus, and the mask of tokens with high entropy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.loss.cases import random_batch
from tests.loss.cases import top_entropy_mask as reference
from twinkle_jax.loss import entropy_bonus, kl_k1, kl_k2, kl_k3, top_entropy_mask


def test_kl_by_hand():
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
            np.testing.assert_allclose(value, jax.jit(divergence)(logits), rtol=1e-12)
        target = {kl_k2: divergence, kl_k3: reversed_divergence}.get(estimate)
        expected = jnp.zeros(4) if target is None else jax.jit(jax.grad(target))(logits)
        np.testing.assert_allclose(gradient, expected, atol=1e-12)


def test_kl_far_apart_is_clamped():
    new, ref, mask = jnp.array([-200.0, 0.0]), jnp.array([0.0, -200.0]), jnp.ones(2, bool)
    clamped = [np.exp(20) - 21, np.exp(-20) + 19]
    np.testing.assert_allclose(kl_k3(new, ref, mask), clamped, rtol=1e-6)
    assert not jax.grad(lambda x: kl_k3(x, ref, mask).sum())(new).any()


@pytest.mark.parametrize("distance", [1e-6, 1e-4, 1e-2])
def test_kl_of_policies_that_hardly_differ(distance):
    # In float32 exp(x) - x - 1 is rounding alone below 3e-4, and negative as often as not.
    difference = np.random.default_rng(0).normal(0, distance, 4096).astype(np.float32)
    exact = np.expm1(-difference.astype(np.float64)) + difference
    estimates = kl_k3(jnp.array(difference), jnp.zeros(4096), jnp.ones(4096, bool))
    assert jnp.all(estimates >= 0)
    np.testing.assert_allclose(jnp.mean(estimates), exact.mean(), rtol=0.01)


compiled = jax.jit(top_entropy_mask)


def test_bonus_worked_by_hand():
    entropies, mask = jnp.array([[2.0, 4.0, jnp.nan]]), jnp.array([[True, True, False]])
    total, gradient = jax.value_and_grad(lambda x: entropy_bonus(x, mask, coefficient=0.25).sum())(
        entropies
    )
    losses = entropy_bonus(entropies, mask, coefficient=0.25)
    np.testing.assert_array_equal(losses, [[-0.5, -1.0, 0.0]])
    assert total == -1.5
    np.testing.assert_array_equal(gradient, [[-0.25, -0.25, 0.0]])


def test_top_entropy_worked_by_hand():
    # The two highest of ten, as TRL has it at quantile 0.8; ties come along.
    entropies = jnp.array([[0.1, 0.2, 0.3, 1.4, 0.5, 0.14], [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]])
    mask = jnp.array([[True] * 6, [True] * 4 + [False] * 2])
    kept = compiled(entropies, mask)
    np.testing.assert_array_equal(np.argwhere(kept), [[0, 3], [1, 3]])
    assert (compiled(entropies, mask, fraction=1.0) == mask).all()
    np.testing.assert_array_equal(np.argwhere(compiled(entropies, mask, fraction=0.0)), [[0, 3]])
    assert (compiled(jnp.ones((2, 6)), mask) == mask).all()
    assert not compiled(entropies, jnp.zeros((2, 6), bool)).any()
    assert compiled(jnp.zeros((0, 3)), jnp.zeros((0, 3), bool)).shape == (0, 3)


@given(seed=st.integers(0, 10**6), fraction=st.sampled_from([0.1, 0.2, 0.3, 0.5, 0.7, 0.9]))
def test_top_entropy_matches_reference(seed, fraction):
    batch = random_batch(seed, 5, 7)
    actual = compiled(batch.entropies, batch.mask, fraction=fraction)
    desired = reference(batch.entropies, batch.mask, fraction)
    np.testing.assert_array_equal(actual, np.array(desired, bool))
    assert int(actual.sum()) == 1 + np.floor(fraction * (batch.mask.sum() - 1) + 1e-6)


def test_the_quantile_of_entropies_spread_over_an_explicit_mesh():
    entropies, mask = jnp.linspace(0.0, 3.0, 48).reshape(8, 6), jnp.arange(48).reshape(8, 6) % 5 > 0
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), (AxisType.Explicit, AxisType.Explicit))
    for spec in (PartitionSpec("data"), PartitionSpec("data", "tensor")):
        spread = jax.device_put((entropies, mask), NamedSharding(mesh, spec))
        with jax.set_mesh(mesh):
            kept = jax.jit(top_entropy_mask)(*spread)
        np.testing.assert_array_equal(kept, top_entropy_mask(entropies, mask))
