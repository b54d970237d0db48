"""Reductions: from losses per token to one number."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

from tests.loss import cases as reference
from tests.loss.cases import GARBAGE, random_batch, same_bits
from twinkle_jax.loss import constant_length, sequence_mean, token_mean

REDUCTIONS = {
    "token_mean": (token_mean, reference.token_mean),
    "sequence_mean": (sequence_mean, reference.sequence_mean),
    "constant_length": (
        functools.partial(constant_length, length=8),
        functools.partial(reference.constant_length, length=8),
    ),
}
every_reduction = pytest.mark.parametrize("name", REDUCTIONS)


@functools.cache
def compiled(name):
    return jax.jit(jax.value_and_grad(REDUCTIONS[name][0]))


def batch_denominator(name, mask):
    """What a reduction divides by in a whole batch."""
    return float(mask.sum()) if name == "token_mean" else float(len(mask))


def test_worked_by_hand():
    losses = jnp.array([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0], [5.0, 5.0, 5.0], [0.0, 0.0, 0.0]])
    mask = jnp.array([[True] * 3, [True, False, False], [False] * 3, [False] * 3])
    # Tokens: (1 + 2 + 3 + 4) / 4. Sequences: (2 + 4 + 0 + 0) / 4. Constant 5: 10 / (4 * 5).
    assert token_mean(losses, mask) == 2.5
    assert sequence_mean(losses, mask) == 1.5
    assert constant_length(losses, mask, length=5) == 0.5
    # With the denominator of a larger batch.
    assert token_mean(losses, mask, denominator=20) == 0.5
    assert sequence_mean(losses, mask, denominator=12) == 0.5
    assert constant_length(losses, mask, length=5, denominator=8) == 0.25


@every_reduction
@pytest.mark.parametrize("shape", [(1, 1), (4, 3), (2, 7)])
def test_matches_reference(name, shape):
    batch = random_batch(17, *shape)
    ours, theirs = REDUCTIONS[name]
    actual = ours(batch.logprobs, batch.mask)
    assert actual.shape == ()
    np.testing.assert_allclose(actual, theirs(batch.logprobs, batch.mask), rtol=1e-6)


@every_reduction
def test_gradient(name):
    batch = random_batch(18)
    with jax.enable_x64(True):
        losses = batch.logprobs.astype(float)
        check_grads(lambda x: REDUCTIONS[name][0](x, batch.mask), (losses,), order=1, modes=["rev"])


@every_reduction
def test_nothing_kept_is_zero(name):
    losses = jnp.array([[1.0, jnp.nan], [jnp.inf, 2.0]])
    mask = jnp.zeros((2, 2), bool)
    for denominator in (None, 0, 0.0, 3):
        value, gradient = compiled(name)(losses, mask, denominator=denominator)
        assert value == 0
        assert not gradient.any()
    assert REDUCTIONS[name][0](jnp.zeros((0, 2)), jnp.zeros((0, 2), bool)) == 0
    assert REDUCTIONS[name][0](jnp.zeros((2, 0)), jnp.zeros((2, 0), bool)) == 0


@every_reduction
def test_garbage_under_the_mask(name):
    batch = random_batch(19)
    clean = compiled(name)(batch.logprobs, batch.mask)
    for garbage in GARBAGE:
        dirty = np.where(batch.mask, batch.logprobs, garbage)
        result = compiled(name)(dirty, batch.mask)
        assert same_bits(clean[0], result[0])
        assert same_bits(clean[1], result[1])
        assert not result[1][~batch.mask].any()


@every_reduction
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_micro_batches_add_up(name, parts):
    batch = random_batch(20, rows=8)
    reduce = compiled(name)
    value, gradient = reduce(batch.logprobs, batch.mask)
    denominator = batch_denominator(name, batch.mask)
    pieces = [
        reduce(losses, mask, denominator=denominator)
        for losses, mask in zip(
            np.split(batch.logprobs, parts), np.split(batch.mask, parts), strict=True
        )
    ]
    np.testing.assert_allclose(sum(v for v, _ in pieces), value, rtol=1e-6)
    np.testing.assert_allclose(np.concatenate([g for _, g in pieces]), gradient, rtol=1e-6)


@every_reduction
@given(seed=st.integers(0, 10**6))
def test_laws(name, seed):
    batch = random_batch(seed)
    losses, mask = batch.logprobs, batch.mask
    value, gradient = compiled(name)(losses, mask)
    order = np.random.default_rng(seed).permutation(len(mask))
    moved, moved_gradient = compiled(name)(losses[order], mask[order])
    np.testing.assert_allclose(moved, value, rtol=1e-6)
    np.testing.assert_array_equal(moved_gradient, gradient[order])
    padded = [np.pad(x, ((0, 0), (0, 3))) for x in (losses, mask)]
    np.testing.assert_allclose(compiled(name)(*padded)[0], value, rtol=1e-6)
    np.testing.assert_array_equal(compiled(name)(4 * losses, mask)[0], 4 * value)


@every_reduction
def test_leading_axes_and_none(name):
    batch = random_batch(22)
    reduce = REDUCTIONS[name][0]
    value = reduce(batch.logprobs, batch.mask)
    folded = reduce(batch.logprobs.reshape(2, 2, -1), batch.mask.reshape(2, 2, -1))
    np.testing.assert_allclose(folded, value, rtol=1e-6)
    first = reduce(batch.logprobs[0], batch.mask[0])
    assert first == reduce(batch.logprobs[:1], batch.mask[:1])


@every_reduction
def test_vmap_is_a_loop(name):
    batch = random_batch(23)
    reduce = REDUCTIONS[name][0]
    rows = [reduce(x, m) for x, m in zip(batch.logprobs, batch.mask, strict=True)]
    np.testing.assert_allclose(
        jax.vmap(reduce)(batch.logprobs, batch.mask), jnp.stack(rows), rtol=1e-6
    )


@every_reduction
def test_half_precision_is_summed_in_single(name):
    losses, mask = jnp.full((4, 1000), 1.0, jnp.bfloat16), jnp.ones((4, 1000), bool)
    value = REDUCTIONS[name][0](losses, mask)
    assert value.dtype == jnp.float32
    assert value == (125 if name == "constant_length" else 1)


@every_reduction
def test_denominators_and_lengths_are_traced(name):
    batch = random_batch(24)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def loss(denominator, length):
        if name == "constant_length":
            return constant_length(
                batch.logprobs, batch.mask, length=length, denominator=denominator
            )
        return REDUCTIONS[name][0](batch.logprobs, batch.mask, denominator=denominator)

    first = loss(jnp.int32(2), 8)
    np.testing.assert_allclose(loss(jnp.int32(4), 8), first / 2, rtol=1e-6)


@every_reduction
def test_errors(name):
    reduce = REDUCTIONS[name][0]
    with pytest.raises(ValueError, match="losses"):
        jax.eval_shape(reduce, jnp.zeros((2, 3)), jnp.ones(2, bool))
    with pytest.raises(TypeError, match="losses"):
        jax.eval_shape(reduce, jnp.zeros((2, 3), int), jnp.ones((2, 3), bool))
    with pytest.raises(TypeError, match="mask"):
        jax.eval_shape(reduce, jnp.zeros((2, 3)), jnp.ones((2, 3)))
    lengths = jnp.ones(2)  # one loss a row would come out
    with pytest.raises(ValueError, match="denominator must be one number"):
        reduce(jnp.zeros((2, 3)), jnp.ones((2, 3), bool), denominator=lengths)


def test_the_constant_is_one_number():
    with pytest.raises(ValueError, match="length must be one number"):
        constant_length(jnp.zeros((2, 3)), jnp.ones((2, 3), bool), length=jnp.ones(2))
