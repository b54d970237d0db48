"""Importance ratios of tokens and of sequences, and the weights that correct for the sampler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tests.loss import reference
from tests.loss.cases import GARBAGE, random_batch, same_bits
from twinkle_jax.loss import (
    masked_importance_weights,
    masked_sequence_importance_weights,
    sequence_log_ratio,
    token_log_ratio,
    truncated_importance_weights,
    truncated_sequence_importance_weights,
)

PAIRS = [
    (token_log_ratio, reference.token_log_ratio),
    (sequence_log_ratio, reference.sequence_log_ratio),
    (truncated_importance_weights, reference.importance_weights),
    (truncated_sequence_importance_weights, reference.sequence_weights),
    (masked_importance_weights, reference.masked_weights),
    (masked_sequence_importance_weights, reference.masked_sequence_weights),
]
LOG_RATIOS = (token_log_ratio, sequence_log_ratio)
NAMES = {
    function: ("logprobs", "behaviour_logprobs")
    if function in LOG_RATIOS
    else ("behaviour_logprobs", "sampler_logprobs")
    for function, _ in PAIRS
}
every_function = pytest.mark.parametrize("function", NAMES)


def test_worked_by_hand():
    # Log-ratios 0.5 and -1.5 in the first row: their mean is -0.5. The second row is 1 and masked.
    new = jnp.array([[-1.0, -2.5], [-1.0, -1.0]])
    old = jnp.array([[-1.5, -1.0], [-2.0, -9.0]])
    mask = jnp.array([[True, True], [True, False]])
    np.testing.assert_array_equal(token_log_ratio(new, old, mask), [[0.5, -1.5], [1.0, 0.0]])
    np.testing.assert_array_equal(sequence_log_ratio(new, old, mask), [[-0.5, -0.5], [1.0, 0.0]])


@pytest.mark.parametrize(("function", "oracle"), PAIRS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (5, 2)])
def test_matches_reference(function, oracle, shape):
    batch = random_batch(sum(shape), *shape, spread=2.0)
    actual = jax.jit(function)(batch.logprobs, batch.old, batch.mask)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(
        actual, oracle(batch.logprobs, batch.old, batch.mask), rtol=1e-5, atol=1e-6
    )


@every_function
def test_far_apart_is_clamped(function):
    new, old = jnp.array([-200.0, 0.0, 0.0]), jnp.array([0.0, -200.0, -jnp.inf])
    mask = jnp.ones(3, bool)
    value, gradient = jax.jit(jax.value_and_grad(lambda x: function(x, old, mask).sum()))(new)
    assert np.isfinite(value)
    assert not gradient.any()
    if function is token_log_ratio:
        np.testing.assert_array_equal(function(new, old, mask), [-20, 20, 20])
    if function is sequence_log_ratio:
        np.testing.assert_allclose(function(new, old, mask), 20 / 3 * np.ones(3), rtol=1e-6)
    if function is truncated_importance_weights:
        np.testing.assert_allclose(function(new, old, mask), [np.exp(-20), 2, 2], rtol=1e-6)
    if function is masked_importance_weights:
        np.testing.assert_array_equal(function(new, old, mask), [0, 0, 0])
    if function is masked_sequence_importance_weights:
        wide = function(new, old, mask, maximum=1e9)  # -20 + 20 + 20
        np.testing.assert_allclose(wide, np.exp(20) * np.ones(3), rtol=1e-6)
        assert np.isfinite(function(np.zeros(9), 99 * np.ones(9), np.ones(9, bool))).all()


@pytest.mark.parametrize("function", [token_log_ratio, sequence_log_ratio])
def test_gradient(function):
    batch = random_batch(3)
    with jax.enable_x64(True):
        new, old = batch.logprobs.astype(float), batch.old.astype(float)
        check_grads(lambda x: function(x, old, batch.mask), (new,), order=1, modes=["rev"])


def test_gradient_of_the_sequence_reaches_each_token():
    mask = jnp.array([[True, True, True, True, False]])
    gradient = jax.grad(lambda x: sequence_log_ratio(x, x - 1, mask)[0, 0])(jnp.zeros((1, 5)))
    np.testing.assert_array_equal(gradient, [[0.25, 0.25, 0.25, 0.25, 0]])


@every_function
def test_no_gradient_for_the_behaviour_policy(function):
    batch = random_batch(4)
    for argument in (1,) if function in LOG_RATIOS else (0, 1):
        gradient = jax.grad(lambda *a: function(*a, batch.mask).sum(), argnums=argument)
        assert not jax.jit(gradient)(batch.logprobs, batch.old).any()


@every_function
def test_garbage_under_the_mask(function):
    batch = random_batch(5)

    @jax.jit
    def run(new, old):
        return function(new, old, batch.mask), jax.grad(
            lambda x: function(x, old, batch.mask).sum()
        )(new)

    for garbage in GARBAGE:
        dirty = [np.where(batch.mask, x, garbage) for x in (batch.logprobs, batch.old)]
        for clean, result in zip(run(batch.logprobs, batch.old), run(*dirty), strict=True):
            assert same_bits(clean, result)
            assert not result[~batch.mask].any()


@every_function
def test_vmap_is_a_loop(function):
    batch = random_batch(6)
    rows = [function(*row) for row in zip(batch.logprobs, batch.old, batch.mask, strict=True)]
    together = jax.vmap(function)(batch.logprobs, batch.old, batch.mask)
    np.testing.assert_allclose(together, jnp.stack(rows), rtol=1e-6)
    np.testing.assert_allclose(together, function(batch.logprobs, batch.old, batch.mask), rtol=1e-6)


@every_function
def test_types(function):
    batch = random_batch(7)
    half = function(
        jnp.asarray(batch.logprobs, jnp.bfloat16), jnp.asarray(batch.old, jnp.bfloat16), batch.mask
    )
    assert half.dtype == jnp.float32
    with jax.enable_x64(True):
        assert function(batch.logprobs.astype(float), batch.old, batch.mask).dtype == jnp.float64


@every_function
def test_errors(function):
    first, second = NAMES[function]
    x, mask = jnp.zeros((2, 3)), jnp.ones((2, 3), bool)
    message = rf"{second} must have the shape of mask, \(2, 3\), got \(2, 4\)"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(function, x, jnp.zeros((2, 4)), mask)
    with pytest.raises(ValueError, match=rf"{first} must .* mask, \(3,\), got \(2, 3\)"):
        jax.eval_shape(function, x, x, jnp.ones(3, bool))
    with pytest.raises(TypeError, match=f"{second} must be floating point, got int32"):
        jax.eval_shape(function, x, jnp.zeros((2, 3), int), mask)
    with pytest.raises(TypeError, match=r"mask must be boolean \(True = keep\), got int32; try"):
        jax.eval_shape(function, x, x, jnp.ones((2, 3), int))
    with pytest.raises(ValueError, match=r"mask must have a time axis, got shape \(\)"):
        jax.eval_shape(function, jnp.zeros(()), jnp.zeros(()), jnp.array(True))
