"""Scores of tokens and their gradients, against float64 NumPy and against the plain computation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

from tests.loss.token_logprobs.scores import (
    SMALL,
    Case,
    assert_close,
    assert_same_bits,
    compute,
    make,
    plain,
    reference,
)
from twinkle_jax.loss import token_logprobs


def test_by_hand():
    # logits (0, log 3): probabilities 1/4 and 3/4, entropy log 4 - 3/4 log 3
    # at half the temperature (0, log 9): 1/10 and 9/10, entropy log 10 - 9/10 log 9
    hidden, head = jnp.ones((4, 1)), jnp.array([[0.0, np.log(3)]])
    tokens, temperature = jnp.array([0, 1, 0, 1]), jnp.array([1.0, 1.0, 0.5, 0.5])
    logprobs, entropies = token_logprobs(
        hidden, head, tokens, temperature=temperature, with_entropy=True
    )
    np.testing.assert_allclose(np.exp(logprobs), [0.25, 0.75, 0.1, 0.9], rtol=1e-6)
    warm, cold = np.log(4) - 0.75 * np.log(3), np.log(10) - 0.9 * np.log(9)
    np.testing.assert_allclose(entropies, [warm, warm, cold, cold], rtol=1e-6)
    np.testing.assert_allclose(token_logprobs(hidden, head, tokens)[:2], logprobs[:2], rtol=1e-6)
    half = token_logprobs(hidden, head, tokens, temperature=0.5)
    np.testing.assert_allclose(half[2:], logprobs[2:], rtol=1e-6)


SIZES = [
    # time, feature, vocab, chunk_size: what is special
    (*SMALL, 6),  # the last chunk is short
    (1100, 2, 2100, None),  # two chunks by default, three blocks
    pytest.param((1, 1, 1, None), marks=pytest.mark.exhaustive),
    # a chunk larger than there are tokens, a block of one column
    pytest.param((33, 4, 129, 100), marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients_equal_float64(size):
    case = make(*size[:3])
    actual = compute(case, chunk_size=size[3])
    assert_close(actual, reference(case))
    assert all(result.dtype == jnp.float32 for result in jax.tree.leaves(actual))


def test_values_and_gradients_equal_the_plain_computation():
    case = make(*SMALL)
    assert_close(compute(case, chunk_size=6), compute(case, plain))


@pytest.mark.parametrize("offset", [0.0, 4096.0])
def test_large_logits(offset):
    # Whole numbers, so that logits of hundreds are exact. exp alone would overflow, and where one
    # logit is far above the rest an entropy of nearly 0 is a difference of larger numbers.
    case = make(*SMALL)._replace(temperature=np.ones(20, np.float32))
    case = case._replace(hidden=np.round(64 * case.hidden), head=np.round(4 * case.head))
    case.hidden[:, 0], case.head[0] = 1, offset  # adds the same to every logit
    (values, gradients), expected = compute(case, chunk_size=6), reference(case)
    assert_close((values[0], gradients), (expected[0][0], expected[1]))
    np.testing.assert_allclose(values[1], expected[0][1], atol=1e-6)


def test_without_mask_and_entropy_and_with_one_temperature():
    tau = np.float32(0.75)
    case = make(*SMALL, kept=1.0)._replace(temperature=np.full(20, tau))
    case.weights[1] = 0

    @jax.jit
    def gradient(hidden, head, temperature):
        def loss(*arguments):
            hidden, head, temperature = arguments
            keywords = {"temperature": temperature, "chunk_size": 6}
            scores = token_logprobs(hidden, head, case.tokens, **keywords)
            return jnp.sum(scores * case.weights[0]), scores

        return jax.grad(loss, (0, 1, 2), has_aux=True)(hidden, head, temperature)

    actual = gradient(case.hidden, case.head, tau)
    (scores, _), (d_hidden, d_head, d_temperature) = reference(case)
    assert_close(actual, ((d_hidden, d_head, d_temperature.sum()), scores))
    (scores, _), (d_hidden, d_head, _) = compute(case, chunk_size=6)
    assert_close((actual[0][:2], actual[1]), ((d_hidden, d_head), scores), 1e-6)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30, 0.0])
def test_what_is_masked_changes_no_bit(garbage):
    case = make(*SMALL)
    case.mask[:] = np.arange(20) % 5 < 2  # eight tokens: two chunks, the second not full
    dirty = jax.tree.map(np.copy, case)
    dirty.hidden[~case.mask] = garbage
    dirty.temperature[~case.mask] = garbage
    dirty.weights[:, ~case.mask] = 7
    dirty.tokens[~case.mask] = [-100, 300, 2**31 - 1, -(2**31)][int(np.isfinite(garbage))]
    (values, gradients), clean = compute(dirty, chunk_size=6), compute(case, chunk_size=6)
    assert_same_bits((values, gradients), clean)
    for per_token in (*values, gradients[0], gradients[2]):
        assert not per_token[~case.mask].any() and per_token[case.mask].all()


def test_nothing_kept():
    case = make(*SMALL, kept=0.0)._replace(hidden=np.full((20, 5), np.nan, np.float32))
    for array in jax.tree.leaves(compute(case, chunk_size=6)):
        assert not np.asarray(array).any()
    empty = compute(make(0, 5, 300), chunk_size=6)
    assert [a.shape for a in jax.tree.leaves(empty)] == [(0,), (0,), (0, 5), (5, 300), (0,)]
    assert not np.asarray(empty[1][1]).any()


@given(time=st.integers(1, 20), kept=st.floats(0, 1), seed=st.integers(0, 99))
def test_masking_is_leaving_out(time, kept, seed):
    case = make(*SMALL, seed, kept)
    short = Case(*(x if x is case.head else x[:time] for x in case[:5]), case.weights[:, :time])
    padded = case._replace(mask=case.mask & (np.arange(20) < time))
    (values, gradients), expected = compute(padded, chunk_size=6), reference(short)
    assert_close([x[:time] for x in values], expected[0])
    assert_close(gradients[1], expected[1][1])


@given(st.integers(0, 99))
def test_laws(seed):
    case, draw = make(*SMALL, seed), np.random.default_rng(seed)
    (logprobs, entropies), (d_hidden, d_head, d_temperature) = compute(case, chunk_size=6)
    assert (logprobs <= 1e-6).all()
    assert (entropies >= 0).all() and (entropies <= np.log(300) + 1e-5).all()
    # A number added to all logits of a token changes nothing, so gradients sum to zero.
    np.testing.assert_allclose(np.asarray(d_head).sum(axis=1), 0, atol=1e-4)
    raised = case._replace(head=case.head + draw.normal(size=(5, 1)).astype(np.float32))
    assert_close(compute(raised, chunk_size=6)[0], (logprobs, entropies))
    # It does not matter how tokens are numbered, nor in which order positions come.
    numbers, order = draw.permutation(300), draw.permutation(20)
    tokens = np.argsort(numbers)[case.tokens].astype(np.int32)
    per_token = (x[order] for x in (tokens, case.mask, case.temperature))
    moved = Case(case.hidden[order], case.head[:, numbers], *per_token, case.weights[:, order])
    values, gradients = compute(moved, chunk_size=6)
    assert_close(values, (logprobs[order], entropies[order]))
    assert_close(gradients, (d_hidden[order], d_head[:, numbers], d_temperature[order]))


def test_probabilities_sum_to_one():
    draw = np.random.default_rng(0)
    hidden = np.broadcast_to(draw.normal(size=(1, 6)).astype(np.float32), (500, 6))
    head = draw.normal(size=(6, 500)).astype(np.float32)
    logprobs, entropies = token_logprobs(
        hidden, head, np.arange(500), with_entropy=True, temperature=0.5, chunk_size=128
    )
    np.testing.assert_allclose(np.exp(logprobs).sum(), 1, rtol=1e-5)
    np.testing.assert_allclose(entropies, -(np.exp(logprobs) * logprobs).sum(), rtol=1e-5)


@pytest.mark.exhaustive
def test_gradients_by_finite_differences():
    with jax.enable_x64(True):
        case = make(9, 3, 129, dtype=np.float64)

        def function(hidden, head, temperature):
            return token_logprobs(
                hidden, head, case.tokens, mask=case.mask, temperature=temperature,
                chunk_size=4, with_entropy=True,
            )  # fmt: skip

        arguments = (case.hidden, case.head, case.temperature)
        check_grads(function, arguments, order=1, modes=["rev"], rtol=1e-6, atol=1e-6)
        actual = compute(case, chunk_size=4)
        assert_close(actual, reference(case), 1e-13)
        assert {x.dtype.name for x in jax.tree.leaves(actual)} == {"float64"}


@pytest.mark.exhaustive
def test_second_order_is_forward_over_reverse():
    case = make(9, 3, 129)

    def product(function):
        def loss(hidden, head, temperature):
            scores, entropies = function(
                hidden, head, case.tokens, mask=case.mask, temperature=temperature,
                with_entropy=True,
            )  # fmt: skip
            return jnp.sum(scores**2) + jnp.sum(entropies**3)

        arguments = (case.hidden, case.head, case.temperature)
        tangents = tuple(np.cos(x) for x in arguments)
        return jax.jit(lambda: jax.jvp(jax.grad(loss, (0, 1, 2)), arguments, tangents))()

    assert_close(product(token_logprobs), product(plain))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda h: token_logprobs(h, case.head, case.tokens), (case.hidden,), (case.hidden,))
