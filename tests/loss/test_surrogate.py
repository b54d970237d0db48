"""Losses per token of the policy."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

from tests.loss import reference
from tests.loss.cases import GARBAGE, random_batch, same_bits
from twinkle_jax.loss import (
    clipped_importance_surrogate,
    clipped_surrogate,
    policy_gradient,
    soft_gate_surrogate,
    token_log_ratio,
)


def clipped(new, old, advantages, mask, **settings):
    return clipped_surrogate(token_log_ratio(new, old, mask), advantages, mask, **settings)


def gated(new, old, advantages, mask, **settings):
    return soft_gate_surrogate(token_log_ratio(new, old, mask), advantages, mask, **settings)


def weighted(new, old, advantages, mask, **settings):
    ratio = token_log_ratio(new, old, mask)
    return clipped_importance_surrogate(ratio, new, advantages, mask, **settings)


def plain(new, old, advantages, mask):
    return policy_gradient(new, advantages, mask)


def oracle(function, new, old, advantages, mask, **settings):
    ratio = reference.token_log_ratio(new, old, mask)
    if function is clipped:
        return reference.clipped(ratio, advantages, mask, **settings)
    if function is gated:
        return reference.soft_gate(ratio, advantages, mask, **settings)
    if function is weighted:
        return reference.clipped_importance(ratio, new, advantages, mask, **settings)
    return reference.policy_gradient(new, advantages, mask)


COMPILED = {f: jax.jit(f) for f in (clipped, gated, weighted, plain)}


def compiled(surrogate):
    return COMPILED[surrogate]


every_surrogate = pytest.mark.parametrize("surrogate", [clipped, gated, weighted, plain])
SETTINGS = [
    (clipped, {}),
    (clipped, {"epsilon": 0.1, "epsilon_high": 0.3}),
    (clipped, {"epsilon": 0.2, "dual_clip": 1.5}),
    (gated, {"tau_pos": 0.5, "tau_neg": 2.0}),
    (weighted, {}),
    (weighted, {"epsilon": 0.1, "epsilon_high": 0.3}),
    (plain, {}),
]


def test_clipped_worked_by_hand():
    # Ratios 2, 1/2, 2, 1/2 and 1 with epsilon = 1/4: only a gain is clipped.
    #   A = +1: -min(2, 1.25) = -1.25;  -min(0.5, 0.75) = -0.5
    #   A = -1: -min(-2, -1.25) = 2;    -min(-0.5, -0.75) = 0.75
    log_ratio = jnp.log(jnp.array([2.0, 0.5, 2.0, 0.5, 1.0]))
    advantages = jnp.array([1.0, 1.0, -1.0, -1.0, 3.0])
    mask = jnp.ones(5, bool)
    value, gradient = jax.value_and_grad(
        lambda x: clipped_surrogate(x, advantages, mask, epsilon=0.25).sum()
    )(log_ratio)
    losses = clipped_surrogate(log_ratio, advantages, mask, epsilon=0.25)
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
    arguments, mask = (batch.logprobs, batch.old, batch.advantages), batch.mask
    actual = clipped(*arguments, mask, epsilon=0.2, epsilon_high=0.28, dual_clip=2.0)
    ratio, a = np.exp(batch.logprobs - batch.old), batch.advantages
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


@pytest.mark.parametrize(("surrogate", "settings"), SETTINGS)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (4, 3)])
def test_matches_reference(surrogate, settings, per_token, shape):
    batch = random_batch(8, *shape, per_token=per_token, spread=1.0)
    arguments = batch.logprobs, batch.old, batch.advantages, batch.mask
    actual = jax.jit(lambda *a: surrogate(*a, **settings))(*arguments)
    assert actual.dtype == jnp.float32
    desired = oracle(surrogate, *arguments, **settings)
    np.testing.assert_allclose(actual, desired, rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize(("surrogate", "settings"), SETTINGS)
def test_gradient(surrogate, settings):
    batch = random_batch(10, spread=0.5)
    with jax.enable_x64(True):
        new, old = batch.logprobs.astype(float), batch.old.astype(float)
        # The weights of CISPO carry no gradient: hold them where they are.
        ratio = token_log_ratio(new, old, batch.mask)

        def loss(x):
            if surrogate is weighted:
                return clipped_importance_surrogate(
                    ratio, x, batch.advantages, batch.mask, **settings
                )
            return surrogate(x, old, batch.advantages, batch.mask, **settings)

        check_grads(jax.jit(loss), (new,), order=1, modes=["rev"])


def test_weights_of_cispo_carry_no_gradient():
    batch = random_batch(11)
    gradient = jax.grad(
        lambda r: clipped_importance_surrogate(
            r, batch.logprobs, batch.advantages, batch.mask
        ).sum()
    )(batch.logprobs - batch.old)
    assert not gradient.any()


@every_surrogate
def test_on_policy_is_the_policy_gradient(surrogate):
    batch = random_batch(12)

    def total(function):
        gradient = jax.grad(lambda x: function(x, x, batch.advantages, batch.mask).sum())
        return jax.jit(gradient)(batch.logprobs)

    np.testing.assert_allclose(total(surrogate), total(plain), rtol=1e-6)


def test_a_closed_clip_range_keeps_the_on_policy_gradient():
    x, mask = jnp.array([-1.0, -2.0]), jnp.ones(2, bool)
    advantages = jnp.array([1.0, -1.0])
    gradient = jax.grad(lambda x: clipped(x, x, advantages, mask, epsilon=0.0).sum())(x)
    np.testing.assert_array_equal(gradient, -advantages)


@every_surrogate
@pytest.mark.parametrize("sign", [-1, 1])
def test_far_apart_is_finite(surrogate, sign):
    new, old = jnp.array([-200.0, -0.5]), jnp.array([-0.5, -200.0])
    mask, advantages = jnp.ones(2, bool), jnp.full(2, float(sign))
    run = jax.jit(jax.value_and_grad(lambda x: surrogate(x, old, advantages, mask).sum()))
    value, gradient = run(new)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


@every_surrogate
def test_no_gradient_where_none_belongs(surrogate):
    batch = random_batch(13)
    run = jax.grad(lambda *a: surrogate(*a, batch.mask).sum(), argnums=(0, 1, 2))
    new, old, advantages = jax.jit(run)(batch.logprobs, batch.old, batch.advantages)
    assert new[batch.mask].any()
    assert not new[~batch.mask].any()
    assert not old.any()
    assert not advantages.any()


@every_surrogate
def test_garbage_under_the_mask(surrogate):
    batch = random_batch(14, per_token=True)

    @jax.jit
    def run(*arguments):
        losses = surrogate(*arguments, batch.mask)
        return losses, jax.grad(lambda *a: surrogate(*a, batch.mask).sum())(*arguments)

    arguments = batch.logprobs, batch.old, batch.advantages
    for garbage in GARBAGE:
        dirty = [np.where(batch.mask, x, garbage) for x in arguments]
        for clean, result in zip(run(*arguments), run(*dirty), strict=True):
            assert same_bits(clean, result)
            assert not result[~batch.mask].any()


@pytest.mark.parametrize("function", [clipped_surrogate, soft_gate_surrogate])
def test_they_clean_and_clamp_log_ratios_themselves(function):
    mask = jnp.array([True, True, False])
    losses, gradient = jax.value_and_grad(lambda x: function(x, jnp.array(-1.0), mask).sum())(
        jnp.array([200.0, 0.0, jnp.nan])
    )
    assert np.isfinite(losses)
    assert np.isfinite(gradient).all()
    assert not gradient[jnp.array([0, 2])].any()


def test_cispo_cleans_and_clamps_log_ratios_itself():
    losses = clipped_importance_surrogate(
        jnp.array([200.0, jnp.nan]),
        jnp.array([-1.0, jnp.nan]),
        jnp.array(1.0),
        jnp.array([True, False]),
        epsilon_high=1e9,
    )
    np.testing.assert_allclose(losses, [np.exp(20), 0], rtol=1e-6)


@every_surrogate
def test_a_broken_token_is_not_silent(surrogate):
    mask = jnp.ones(2, bool)
    for new, advantages in [(jnp.nan, 1.0), (-1.0, jnp.nan)]:
        losses = surrogate(jnp.array([new, -1.0]), jnp.zeros(2), jnp.array([advantages, 1.0]), mask)
        np.testing.assert_array_equal(np.isnan(losses), [True, False])


@every_surrogate
@given(seed=st.integers(0, 10**6), shift=st.floats(-1, 1, width=32))
def test_laws(surrogate, seed, shift):
    batch = random_batch(seed)
    new, old, advantages, mask = batch.logprobs, batch.old, batch.advantages, batch.mask
    losses = compiled(surrogate)(new, old, advantages, mask)
    # Losses scale with the advantages, and no advantage costs nothing.
    np.testing.assert_array_equal(compiled(surrogate)(new, old, 4 * advantages, mask), 4 * losses)
    assert not compiled(surrogate)(new, old, 0 * advantages, mask).any()
    # One advantage a sequence is the same one at each token.
    spread = np.repeat(advantages[:, None], mask.shape[1], axis=1)
    np.testing.assert_array_equal(compiled(surrogate)(new, old, spread, mask), losses)
    if surrogate in (clipped, gated):  # only the ratio matters
        moved = compiled(surrogate)(
            new + np.float32(shift), old + np.float32(shift), advantages, mask
        )
        np.testing.assert_allclose(moved, losses, rtol=1e-4, atol=1e-5)


@every_surrogate
def test_vmap_is_a_loop(surrogate):
    batch = random_batch(15)
    arguments = batch.logprobs, batch.old, batch.advantages, batch.mask
    rows = [compiled(surrogate)(*row) for row in zip(*arguments, strict=True)]
    together = jax.jit(jax.vmap(surrogate))(*arguments)
    np.testing.assert_allclose(together, jnp.stack(rows), rtol=1e-6)


def test_coefficients_are_traced():
    batch, traces = random_batch(16), []

    @jax.jit
    def loss(epsilon, epsilon_high, dual_clip, tau):
        traces.append(1)
        arguments = batch.logprobs, batch.old, batch.advantages, batch.mask
        one = clipped(*arguments, epsilon=epsilon, epsilon_high=epsilon_high, dual_clip=dual_clip)
        return one + gated(*arguments, tau_pos=tau, tau_neg=tau)

    first = loss(0.2, 0.3, 3.0, 1.0)
    assert (loss(0.1, 0.2, 2.0, 2.0) != first).any()
    assert len(traces) == 1


@every_surrogate
def test_errors(surrogate):
    x, mask = jnp.zeros((2, 3)), jnp.ones((2, 3), bool)
    a = jnp.zeros(2)
    message = r"advantages must have shape \(2,\) \(one a sequence\) or \(2, 3\) \(one a token\), "
    for shape in [(3,), (2, 4), (2, 1), ()]:
        with pytest.raises(ValueError, match=message + rf"got \({', '.join(map(str, shape))}"):
            jax.eval_shape(surrogate, x, x, jnp.zeros(shape), mask)
    with pytest.raises(TypeError, match="advantages must be real numbers, got bool"):
        jax.eval_shape(surrogate, x, x, a > 0, mask)
    with pytest.raises(TypeError, match="logprobs must be floating point, got int32"):
        jax.eval_shape(surrogate, jnp.zeros((2, 3), int), x, a, mask)
    with pytest.raises(ValueError, match=r"logprobs must .* mask, \(2, 2\), got \(2, 3\)"):
        jax.eval_shape(surrogate, x, x, a, mask[:, :2])
    assert jax.eval_shape(surrogate, x, x, a.astype(int), mask).dtype == jnp.float32


@pytest.mark.parametrize("function", [clipped_surrogate, soft_gate_surrogate])
def test_errors_name_the_log_ratio(function):
    with pytest.raises(ValueError, match=r"log_ratio must .* mask, \(3, 2\), got \(2, 3\)"):
        jax.eval_shape(function, jnp.zeros((2, 3)), jnp.zeros(3), jnp.ones((3, 2), bool))
