"""Importance ratios, and the losses per token of a policy: hand values, and laws of all of them."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.loss.cases import FUNCTIONS, random_batch
from twinkle_jax.loss import (
    clipped_importance_surrogate,
    clipped_surrogate,
    policy_gradient,
    sequence_log_ratio,
    soft_gate_surrogate,
    token_log_ratio,
)

SURROGATES = [n for n, f in FUNCTIONS.items() if "advantages" in f.arrays and f.gradients]
COMPILED = {name: jax.jit(FUNCTIONS[name]) for name in SURROGATES}
every_surrogate = pytest.mark.parametrize("name", SURROGATES)


def test_ratios_worked_by_hand():
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


def test_ratios_far_apart_are_clamped():
    new, old, mask = (
        jnp.array([-200.0, 0.0, 0.0]),
        jnp.array([0.0, -200.0, -jnp.inf]),
        jnp.ones(3, bool),
    )
    np.testing.assert_array_equal(token_log_ratio(new, old, mask), [-20, 20, 20])
    np.testing.assert_allclose(sequence_log_ratio(new, old, mask), [20 / 3] * 3, rtol=1e-6)
    for function in (token_log_ratio, sequence_log_ratio):
        assert not jax.grad(lambda x, f=function: f(x, old, mask).sum())(new).any()


def test_clipped_worked_by_hand():
    # Ratios 2, 1/2, 2, 1/2 and 1 with epsilon = 1/4: only a gain is clipped.
    #   A = +1: -min(2, 1.25) = -1.25;  -min(0.5, 0.75) = -0.5
    #   A = -1: -min(-2, -1.25) = 2;    -min(-0.5, -0.75) = 0.75
    log_ratio = jnp.log(jnp.array([2.0, 0.5, 2.0, 0.5, 1.0]))
    advantages = jnp.array([1.0, 1.0, -1.0, -1.0, 3.0])
    mask = jnp.ones(5, bool)

    @jax.jit
    def total(log_ratio):
        losses = clipped_surrogate(log_ratio, advantages, mask, epsilon=0.25)
        return losses.sum(), losses

    (value, losses), gradient = jax.value_and_grad(total, has_aux=True)(log_ratio)
    np.testing.assert_allclose(losses, [-1.25, -0.5, 2.0, 0.75, -3.0], rtol=1e-6)
    assert value == losses.sum()
    # The derivative in the log-ratio is -rA where nothing is clipped, and 0 where it is.
    np.testing.assert_allclose(gradient, [0, -0.5, 2.0, 0, -3.0], rtol=1e-6)


def test_asymmetric_and_dual_clip_worked_by_hand():
    # Ratio 1.25 is clipped at 1.125 but not at 1.5; ratio 8 with A = -1 costs 8, or 3 at most.
    log_ratio, mask = jnp.log(jnp.array([1.25, 8.0])), jnp.ones(2, bool)
    advantages = jnp.array([1.0, -1.0])
    for settings, losses in [
        ({"epsilon": 0.125}, [-1.125, 8.0]),
        ({"epsilon": 0.125, "epsilon_high": 0.5}, [-1.25, 8.0]),
        ({"epsilon": 0.125, "dual_clip": 3.0}, [-1.125, 3.0]),
    ]:
        actual = clipped_surrogate(log_ratio, advantages, mask, **settings)
        np.testing.assert_allclose(actual, losses, rtol=1e-6)


def test_dual_clip_leaves_positive_advantages_alone():
    # A ceiling below the clip range is of negative advantages only: ratio 1.375 under 1.5 and 1.25.
    log_ratio, mask = jnp.log(jnp.array([1.375, 1.375])), jnp.ones(2, bool)
    losses = clipped_surrogate(log_ratio, jnp.array([1.0, -1.0]), mask, epsilon=0.5, dual_clip=1.25)
    np.testing.assert_allclose(losses, [-1.375, 1.25], rtol=1e-6)
    losses = clipped_surrogate(jnp.log(jnp.array([2.0])), jnp.ones(1), mask[:1], dual_clip=1.1)
    np.testing.assert_allclose(losses, [-1.2], rtol=1e-6)  # the clip range ends above the ceiling


def test_dual_clip_is_the_two_sided_clip():
    # INTELLECT-2: -min(min(r, delta) A, clip(r) A), which differs where delta is in the clip range.
    batch = random_batch(17, 6, 8, per_token=True, spread=2.0)
    mask, settings = batch.mask, {"epsilon": 0.2, "epsilon_high": 0.28, "dual_clip": 2.0}
    actual = clipped_surrogate(batch.log_ratio, batch.advantages, mask, **settings)
    ratio, a = np.exp(batch.log_ratio), batch.advantages
    desired = -np.minimum(np.minimum(ratio, 2.0) * a, np.clip(ratio, 0.8, 1.28) * a)
    np.testing.assert_allclose(actual, np.where(mask, desired, 0), rtol=1e-5)
    assert (mask & (ratio > 2) & (a < 0)).any()


def test_soft_gate_worked_by_hand():
    # At ratio 1 the sigmoid is 1/2 and its slope 1/4: loss -(4/tau)(1/2)A, derivative -A.
    advantages, mask = jnp.array([1.0, -3.0]), jnp.ones(2, bool)

    def total(log_ratio):
        losses = soft_gate_surrogate(log_ratio, advantages, mask, tau_pos=0.5, tau_neg=2.0)
        return losses.sum(), losses

    gradient, losses = jax.grad(total, has_aux=True)(jnp.zeros(2))
    np.testing.assert_allclose(losses, [-4.0, 3.0])
    np.testing.assert_allclose(gradient, [-1.0, 3.0])


def test_clipped_importance_worked_by_hand():
    # Ratios 2 and 1/2: weights 1.25 and 1/2, losses -wA log pi, derivatives -wA.
    log_ratio, new = jnp.log(jnp.array([2.0, 0.5])), jnp.array([-1.0, -2.0])
    advantages, mask = jnp.array([1.0, -1.0]), jnp.ones(2, bool)

    def total(x, **settings):
        return clipped_importance_surrogate(log_ratio, x, advantages, mask, **settings).sum()

    value, gradient = jax.value_and_grad(total)(new, epsilon_high=0.25)
    assert value == pytest.approx(1.25 - 1.0)
    np.testing.assert_allclose(gradient, [-1.25, 0.5])
    assert total(new, epsilon=0.25, epsilon_high=0.25) == pytest.approx(1.25 - 1.5)


def test_policy_gradient_worked_by_hand():
    new, mask = jnp.array([[-1.0, -2.0], [-3.0, -4.0]]), jnp.array([[True, True], [True, False]])
    losses = policy_gradient(new, jnp.array([0.5, -1.0]), mask)
    np.testing.assert_array_equal(losses, [[0.5, 1.0], [-3.0, 0.0]])


@pytest.mark.exhaustive
def test_rlax_agrees_on_the_clipped_surrogate():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its dependencies use names that JAX deprecates
        rlax = pytest.importorskip("rlax", reason="pip install 'twinkle-jax[test,oracle]'")
    batch = random_batch(9, 6, 20, per_token=True, spread=0.5)
    log_ratio = (batch.logprobs - batch.old).reshape(-1)
    advantages, mask = batch.advantages.reshape(-1), jnp.ones(120, bool)

    def theirs(log_ratio):
        return rlax.clipped_surrogate_pg_loss(jnp.exp(log_ratio), advantages, 0.2)

    def ours(log_ratio):
        return clipped_surrogate(log_ratio, advantages, mask, epsilon=0.2).mean()

    for a, b in zip(
        jax.value_and_grad(ours)(log_ratio), jax.value_and_grad(theirs)(log_ratio), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@every_surrogate
def test_on_policy_is_the_policy_gradient(name):
    batch, case = random_batch(12), FUNCTIONS[name]

    def total(logprobs):
        log_ratio = token_log_ratio(logprobs, logprobs, batch.mask)
        arrays = {"log_ratio": log_ratio, "logprobs": logprobs, "advantages": batch.advantages}
        return case(*(arrays[array] for array in case.arrays.split()), batch.mask).sum()

    desired = np.where(batch.mask, -batch.advantages[:, None], 0)
    np.testing.assert_allclose(jax.jit(jax.grad(total))(batch.logprobs), desired, rtol=1e-6)


def test_a_closed_clip_range_keeps_the_on_policy_gradient():
    mask, advantages = jnp.ones(2, bool), jnp.array([1.0, -1.0])
    gradient = jax.grad(lambda x: clipped_surrogate(x, advantages, mask, epsilon=0.0).sum())
    np.testing.assert_array_equal(gradient(jnp.zeros(2)), -advantages)


@pytest.mark.parametrize("array", [jnp.asarray, np.asarray])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_clip_range_of_half_precision_stays_open(dtype, array):
    ratios, mask = jnp.array([2.0, 0.25]), jnp.ones(2, bool)
    losses = clipped_surrogate(
        jnp.log(ratios), jnp.array([1.0, -1.0]), mask, epsilon=array(3e-4, dtype)
    )
    np.testing.assert_allclose(losses, [-1.0003, 0.9997], atol=2e-6)


def test_log_ratios_are_clamped():
    log_ratio, mask = jnp.array([200.0, jnp.nan]), jnp.array([True, False])
    advantages = jnp.array(-1.0)
    for function in (clipped_surrogate, soft_gate_surrogate):
        losses = function(log_ratio, advantages, mask)
        gradient = jax.grad(lambda x, f=function: f(x, advantages, mask).sum())(log_ratio)
        assert np.isfinite(losses).all() and not gradient.any()
    losses = clipped_importance_surrogate(
        log_ratio, jnp.array([-1.0, jnp.nan]), -advantages, mask, epsilon_high=1e9
    )
    np.testing.assert_allclose(losses, [np.exp(20), 0], rtol=1e-6)


@every_surrogate
@given(seed=st.integers(0, 10**6))
def test_losses_are_proportional_to_advantages(name, seed):
    batch = random_batch(seed)

    def losses(advantages):
        return COMPILED[name](
            *FUNCTIONS[name].arguments(batch._replace(advantages=advantages)), batch.mask
        )

    np.testing.assert_array_equal(losses(4 * batch.advantages), 4 * losses(batch.advantages))
    assert not losses(0 * batch.advantages).any()
    # One advantage per sequence is the same one at each of its tokens.
    spread = np.repeat(batch.advantages[:, None], batch.mask.shape[1], axis=1)
    np.testing.assert_array_equal(losses(spread), losses(batch.advantages))
