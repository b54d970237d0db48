"""Log-probabilities of tokens: values and gradients, types, errors, transformations, devices."""

import math
import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from tests.model.families import each
from twinkle_jax.loss import token_logprobs
from twinkle_jax.loss.token_logprobs import LARGEST_TILE, _score, tiling

SMALL = 20, 5, 300  # time, feature, vocab: with chunks of six, blocks of 256 and 44


class Case(NamedTuple):
    """Hidden states, a head, tokens, a mask, temperatures, and weights that make a loss of it."""

    hidden: np.ndarray
    head: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray
    temperature: np.ndarray
    weights: np.ndarray  # of log-probabilities and of entropies, [2, time]


def make(time, feature, vocab, seed=0, kept=0.6, dtype=np.float32):
    draw = np.random.default_rng(seed)
    return Case(
        draw.normal(size=(time, feature)).astype(dtype),
        draw.normal(size=(feature, vocab)).astype(dtype),
        draw.integers(vocab, size=time).astype(np.int32),
        draw.random(time) < kept,
        draw.uniform(0.5, 2, time).astype(dtype),
        draw.normal(size=(2, time)).astype(dtype),
    )


def reference(case, cap=np.inf):
    """Loop over tokens in float64: scores, entropies, and gradients of the weighted sum."""
    hidden, head = case.hidden.astype(np.float64), case.head.astype(np.float64)
    time = len(hidden)
    logprobs, entropies = np.zeros(time), np.zeros(time)
    d_hidden, d_head, d_temperature = np.zeros_like(hidden), np.zeros_like(head), np.zeros(time)
    for t in np.flatnonzero(case.mask):
        tau = float(case.temperature[t])
        products = hidden[t] @ head
        logits = (cap * np.tanh(products / cap) if cap < np.inf else products) / tau
        logp = logits - (logits.max() + np.log(np.exp(logits - logits.max()).sum()))
        p = np.exp(logp)
        logprobs[t], entropies[t] = logp[case.tokens[t]], -(p * logp).sum()
        chosen = np.arange(len(p)) == case.tokens[t]
        on_score, on_entropy = case.weights[:, t]
        d_logits = on_score * (chosen - p) - on_entropy * p * (logp + entropies[t])
        d_products = d_logits * (1 - (logits * tau / cap) ** 2) / tau
        d_hidden[t] = head @ d_products
        d_head += np.outer(hidden[t], d_products)
        d_temperature[t] = -(d_logits @ logits) / tau
    return (logprobs, entropies), (d_hidden, d_head, d_temperature)


def plain(hidden, head, tokens, *, mask, temperature, with_entropy=True):
    """Hold all logits, and let JAX differentiate."""
    assert with_entropy
    logits = jnp.matmul(hidden, head) / jnp.reshape(temperature, (-1, 1))
    logprobs = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
    entropies = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=1)
    return jnp.where(mask, chosen, 0), jnp.where(mask, entropies, 0)


@partial(jax.jit, static_argnames=("function", "chunk_size", "soft_cap"))
def compute(case, function=token_logprobs, chunk_size=None, soft_cap=None):
    """Values, and gradients of the weighted sum in hidden, head and temperature."""
    static = {"chunk_size": chunk_size, "soft_cap": soft_cap}
    static = {name: value for name, value in static.items() if value is not None}

    def loss(hidden, head, temperature):
        options = {"mask": case.mask, "temperature": temperature, "with_entropy": True}
        results = function(hidden, head, case.tokens, **options, **static)
        on_scores, on_entropies = case.weights
        scores, entropies = (result.astype(on_scores.dtype) for result in results)
        return jnp.sum(on_scores * scores) + jnp.sum(on_entropies * entropies), results

    gradient = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
    gradients, results = gradient(case.hidden, case.head, case.temperature)
    return results, gradients


def assert_close(actual, expected, tolerance=1e-5):
    """Each array to within a part of its largest entry."""
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert one.shape == other.shape
        scale = np.abs(other).max(initial=1e-30)
        np.testing.assert_allclose(one / scale, other / scale, rtol=0, atol=tolerance)


def assert_same_bits(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


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


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "close"), [(np.float32, 1e-5), ("bfloat16", 0.02)])
def test_a_soft_cap(dtype, close):
    """Logits of up to six are bent by a bound of two, before temperatures divide them."""
    case = make(*SMALL)
    half = [jnp.asarray(x, dtype) for x in (case.hidden, case.head)]
    case = case._replace(hidden=half[0], head=half[1])
    actual = compute(case, chunk_size=6, soft_cap=2.0)
    exact = case._replace(hidden=np.asarray(half[0]), head=np.asarray(half[1]))
    assert_close(actual, reference(exact, cap=2.0), close)


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


@pytest.mark.parametrize("kept", [0, 7])
def test_nothing_in_between_is_nan_or_infinite(kept):
    """A gradient outside `jit` returns what its backward pass needs, which JAX then looks at."""
    case = make(*SMALL)

    def total(hidden):
        mask = np.arange(20) < kept
        return sum(
            scores.sum()
            for scores in token_logprobs(
                hidden, case.head, case.tokens, mask=mask, chunk_size=6, with_entropy=True
            )
        )

    with jax.debug_nans(True), jax.debug_infs(True):
        gradient = jax.grad(total)(jnp.asarray(case.hidden))
    assert bool(gradient.any()) == (kept > 0)


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
    with pytest.raises(TypeError):
        jax.jvp(lambda h: token_logprobs(h, case.head, case.tokens), (case.hidden,), (case.hidden,))


@pytest.mark.parametrize(
    ("hidden", "head", "result"),
    [
        ("bfloat16", "bfloat16", "float32"),
        pytest.param("bfloat16", "float32", "float32", marks=pytest.mark.exhaustive),
        pytest.param("float16", "float16", "float32", marks=pytest.mark.exhaustive),
        pytest.param("float32", "float64", "float64", marks=pytest.mark.exhaustive),
        pytest.param("float64", "bfloat16", "float64", marks=pytest.mark.exhaustive),
    ],
)
def test_types(hidden, head, result):
    with jax.enable_x64("64" in result):
        case = make(40, 16, 100)
        case = case._replace(
            hidden=jnp.asarray(case.hidden, hidden), head=jnp.asarray(case.head, head)
        )
        exact = case._replace(hidden=np.asarray(case.hidden), head=np.asarray(case.head))
        (values, gradients), expected = compute(case, chunk_size=16), reference(exact)
        assert {x.dtype.name for x in values} == {result}
        assert [x.dtype.name for x in gradients] == [hidden, head, "float32"]
        # Products of bfloat16 are exact in float32, so their sums are as good as any.
        assert_close(values, expected[0], 1e-5)
        rough = "16" in hidden or "16" in head
        assert_close(gradients, expected[1], 2**-7 if rough else 1e-5)


def products(jaxpr):
    """Types that go into and come out of every matrix product of a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield [value.aval.dtype.name for value in (*equation.invars, *equation.outvars)]
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            yield from products(inner) if hasattr(inner, "eqns") else ()


def test_products_of_bfloat16_are_summed_in_float32():
    # Not to be seen in values: the compiler for CPUs keeps more digits than it is asked to.
    case = make(40, 16, 100)
    case = case._replace(hidden=jnp.bfloat16(case.hidden), head=jnp.bfloat16(case.head))
    program = jax.make_jaxpr(lambda case: compute.__wrapped__(case))(case).jaxpr
    assert list(products(program)) == 4 * [["bfloat16", "bfloat16", "float32"]]


def test_small_gradients_survive_float16():
    case = make(40, 4, 100)
    case = case._replace(weights=case.weights * np.float32(1e-6))
    half = case._replace(hidden=np.float16(case.hidden), head=np.float16(case.head))
    assert_close(compute(half)[1][2], reference(half)[1][2])


@pytest.mark.parametrize("dtype", each(["int64", "int8", "uint32"]))
def test_types_of_tokens(dtype):
    case = make(20, 3, 200)
    tokens = case.tokens % 100
    expected = token_logprobs(case.hidden, case.head, tokens.tolist())
    with jax.enable_x64(dtype == "int64"):
        actual = jax.jit(token_logprobs)(case.hidden, case.head, tokens.astype(dtype))
        if dtype == "int64":  # 5 in the lower half, and still no token
            beyond = np.where(np.arange(20) % 2, 2**32 + 5, 5 - 2**32)
            assert np.isnan(jax.jit(token_logprobs)(case.hidden, case.head, beyond)).all()
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("token", [-1, -100, 300, 2**31 - 1])
def test_an_unknown_token_that_is_traced_is_nan(token):
    case = make(*SMALL, kept=1.0)
    unknown = case._replace(tokens=np.where(np.arange(20) == 4, np.int32(token), case.tokens))
    (values, gradients), (expected, _) = compute(unknown, chunk_size=6), compute(case, chunk_size=6)
    assert np.isnan(values[0][4]) and np.isnan(gradients[0][4]).all()
    assert np.isnan(gradients[1]).all() and np.isnan(gradients[2][4])
    others = np.arange(20) != 4
    assert_same_bits(values[0][others], expected[0][others])
    assert_same_bits(values[1], expected[1])


def test_vmap_equals_a_loop():
    cases = [make(*SMALL, seed, kept) for seed, kept in enumerate([0.9, 0.2, 0.0])]
    batch = jax.tree.map(lambda *x: np.stack(x), *cases)
    together = jax.jit(jax.vmap(partial(compute, chunk_size=6)))(batch)
    for i, case in enumerate(cases):
        alone = compute(case, chunk_size=6)
        assert_close(jax.tree.map(lambda x, i=i: x[i], together), alone, 1e-6)


@pytest.mark.exhaustive
def test_inside_scan_and_checkpoint():
    cases = [make(20, 3, 200, seed) for seed in range(3)]
    batch, head = jax.tree.map(lambda *x: np.stack(x), *cases), cases[0].head

    def total(function, head):
        @jax.checkpoint
        def step(carry, case):
            results = function(
                jnp.sin(case.hidden), head, case.tokens, mask=case.mask,
                temperature=case.temperature, with_entropy=True,
            )  # fmt: skip
            return carry + jnp.sum(results[0] * results[1]), None

        return jax.lax.scan(step, jnp.float32(0), batch)[0]

    gradient = jax.jit(jax.value_and_grad(total, argnums=1), static_argnums=0)
    assert_close(gradient(token_logprobs, head), gradient(plain, head))


def test_calls_outside_jit_share_a_compilation():
    case = make(21, 3, 201)
    token_logprobs(case.hidden, case.head, case.tokens, mask=case.mask)
    compiled = _score._cache_size()
    for temperature in (2, 0.5, np.float32(3), jnp.float32(1)):
        mask = case.mask & (np.arange(21) > float(temperature))
        token_logprobs(case.hidden, case.head, case.tokens, mask=mask, temperature=temperature)
    assert _score._cache_size() == compiled


WRONG = [
    (ValueError, "head", {"head": np.zeros((5, 3))}),
    (ValueError, "head", {"head": np.zeros((3, 0))}),
    (ValueError, "hidden", {"hidden": np.zeros((2, 2, 3))}),
    (ValueError, "head", {"head": np.zeros(3)}),
    (ValueError, "tokens", {"tokens": np.zeros(3, int)}),
    (ValueError, "tokens", {"tokens": np.zeros((4, 1), int)}),
    (ValueError, "mask", {"mask": np.ones(3, bool)}),
    (ValueError, "mask", {"mask": np.bool_(True)}),
    (ValueError, "temperature", {"temperature": np.ones(3)}),
    (TypeError, "hidden", {"hidden": np.zeros((4, 3), int)}),
    (TypeError, "head", {"head": np.zeros((3, 5), complex)}),
    (TypeError, "tokens", {"tokens": np.zeros(4)}),
    (TypeError, "tokens", {"tokens": np.zeros(4, bool)}),
    (TypeError, "mask", {"mask": np.ones(4, int)}),
    (TypeError, "temperature", {"temperature": np.ones(4, int)}),
    (TypeError, "temperature", {"temperature": np.bool_(True)}),
    (ValueError, "chunk_size", {"chunk_size": 0}),
    (ValueError, "chunk_size", {"chunk_size": np.int64(-3)}),
    (TypeError, "chunk_size", {"chunk_size": 2.0}),
    (TypeError, "chunk_size", {"chunk_size": True}),
    *((ValueError, "soft_cap", {"soft_cap": cap}) for cap in (0.0, -30, np.inf, np.nan)),
    *((TypeError, "soft_cap", {"soft_cap": cap}) for cap in (True, "30", np.ones(4))),
]


def call(**changes):
    """Call with arguments that fit, except for the changes."""
    arguments = {
        "hidden": np.zeros((4, 3), np.float32),
        "head": np.zeros((3, 5), np.float32),
        "tokens": np.zeros(4, np.int32),
    } | changes
    positional = [arguments.pop(name) for name in ("hidden", "head", "tokens")]
    return token_logprobs(*positional, **arguments)


@pytest.mark.parametrize(("error", "argument", "changes"), WRONG)
def test_wrong_arguments_are_refused_while_tracing(error, argument, changes):
    names = ("chunk_size", "soft_cap")
    static = {name: changes.get(name) for name in names}
    arrays = {name: value for name, value in changes.items() if name not in names}
    for run in (call, lambda **arrays: jax.eval_shape(partial(call, **static), **arrays)):
        with pytest.raises(error, match=f"^{argument}"):
            run(**(changes if run is call else arrays))
    assert call(chunk_size=np.int64(3), soft_cap=np.float32(30)).shape == (4,)


@pytest.mark.parametrize("convert", [np.array, list])
def test_unknown_tokens_are_refused_where_they_can_be_seen(convert):
    keep = np.array([True, True, False, True])
    with pytest.raises(ValueError, match=r"^tokens"):
        call(tokens=convert([0, 5, 1, -1]))
    tokens = convert([0, 4, 9, -1])
    with pytest.raises(ValueError, match=r"^tokens"):
        jax.jit(lambda hidden: call(hidden=hidden, tokens=tokens, mask=keep))(np.zeros((4, 3)))
    assert call(tokens=convert([0, 4, -100, 1]), mask=keep).shape == (4,)
    traced = jax.jit(lambda mask: call(tokens=convert([0, 4, 9, 1]), mask=mask))
    assert np.isfinite(traced(keep)).all()
    on_device = jnp.array([0, 5, 1, -1])  # not read back: it shows as NaN
    with jax.transfer_guard_device_to_host("disallow"):
        scores = call(tokens=on_device)
    assert np.isnan(scores).tolist() == [False, True, False, True]


CASE = make(48, 4, 100, kept=0.5)


@pytest.fixture(scope="module")
def expected():
    return compute(CASE, chunk_size=5)


def make_mesh(*kinds):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)


def put(array, mesh, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def spread(mesh, head, tokens="data"):
    """Put the case on a mesh, its tokens split along one axis or two."""
    return Case(
        put(CASE.hidden, mesh, tokens, None),
        put(CASE.head, mesh, *head),
        *(put(array, mesh, tokens) for array in CASE[2:5]),
        put(CASE.weights, mesh, None, tokens),
    )


def test_automatic_axes(expected):
    case = spread(make_mesh(AxisType.Auto, AxisType.Auto), P("data", "model"))
    assert_close(compute(case, chunk_size=5), expected)


@pytest.mark.parametrize(
    ("tokens", "head"),
    [
        ("data", P("model", "data")),
        pytest.param(("data", "model"), P(None, "model"), marks=pytest.mark.exhaustive),
        pytest.param(None, P("model", None), marks=pytest.mark.exhaustive),
    ],
)
def test_explicit_axes(expected, tokens, head):
    case = spread(make_mesh(AxisType.Explicit, AxisType.Explicit), head, tokens)
    (scores, entropies), gradients = actual = compute(case, chunk_size=5)
    assert_close(actual, expected)
    assert scores.sharding.spec == entropies.sharding.spec == P(tokens)
    arguments = case.hidden, case.head, case.temperature
    for gradient, argument in zip(gradients, arguments, strict=True):
        assert gradient.sharding.is_equivalent_to(argument.sharding, gradient.ndim)


@pytest.mark.exhaustive
def test_explicit_axes_beside_automatic_ones(expected):
    case = spread(make_mesh(AxisType.Explicit, AxisType.Auto), P(None, "model"))
    assert_close(compute(case, chunk_size=5), expected)


@pytest.mark.exhaustive
def test_only_hidden_states_are_spread(expected):
    mesh = make_mesh(AxisType.Explicit, AxisType.Explicit)
    case = CASE._replace(hidden=put(CASE.hidden, mesh, "data", None))
    actual = compute(case, chunk_size=5)
    assert_close(actual, expected)
    assert actual[0][0].sharding.spec == P("data")


@pytest.mark.exhaustive
def test_each_device_works_on_its_own_tokens():
    case = spread(make_mesh(AxisType.Explicit, AxisType.Explicit), P(None, None), ("data", "model"))
    text = compute.lower(case).compile().as_text()
    # a tile has a third of a device's six tokens, not of all 48
    assert re.search(r"f32\[2,100\]", text)
    assert not re.search(r"f32\[(6|12|16|24|48),100\]", text)
    # The gradient of the head is added up once, when it is complete.
    sums = [line for line in text.splitlines() if re.search(r"all-reduce(-start)?\(", line)]
    assert sum("f32[4,100]" in line for line in sums) == 1


@pytest.mark.parametrize(
    ("check_vma", "temperature"),
    [
        (True, None),
        pytest.param(False, None, marks=pytest.mark.exhaustive),
        pytest.param(True, np.float32(0.75), marks=pytest.mark.exhaustive),
    ],
)
def test_inside_shard_map(expected, check_vma, temperature):
    mesh, shared = make_mesh(AxisType.Auto, AxisType.Auto), temperature is not None
    if shared:
        expected = compute(CASE._replace(temperature=np.full(48, temperature)), chunk_size=5)
        scores, (*gradients, d_temperature) = expected
        expected = scores, (*gradients, jnp.sum(d_temperature))
    tokens, specs = P("data"), (P("data"), P(), P("data"), P("data"), P() if shared else P("data"))

    @partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=check_vma)
    def score(hidden, head, tokens, mask, temperature):
        keywords = {"mask": mask, "temperature": temperature, "chunk_size": 5}
        return token_logprobs(hidden, head, tokens, with_entropy=True, **keywords)

    def loss(hidden, head, temperature):
        results = score(hidden, head, CASE.tokens, CASE.mask, temperature)
        return jnp.sum(CASE.weights * jnp.stack(results)), results

    temperature = temperature if shared else CASE.temperature
    gradients, results = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(
        CASE.hidden, CASE.head, temperature
    )
    assert_close((results, gradients), expected)


def untiled(hidden, head, tokens):
    logprobs = jax.nn.log_softmax(jnp.matmul(hidden, head))
    return jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]


def compiled(function, size, *, tied=False, gradient=()):
    """Compile a weighted sum of scores, or its value and gradients, without running it."""
    tokens, feature, vocab = size

    def loss(hidden, head, names, weights):
        return jnp.sum(weights * function(hidden, head.T if tied else head, names))

    program = jax.jit(jax.value_and_grad(loss, gradient) if gradient else loss)
    shape = jax.ShapeDtypeStruct
    return program.lower(
        shape((tokens, feature), jnp.float32),
        shape((vocab, feature) if tied else (feature, vocab), jnp.float32),
        shape((tokens,), jnp.int32),
        shape((tokens,), jnp.float32),
    ).compile()


def temporary(program):
    """Float32 numbers that fit into the program's temporary memory."""
    return program.memory_analysis().temp_size_in_bytes / 4


def largest_array(program):
    """Elements of the largest array that a program mentions, at the top or within a fusion."""
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", program.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.exhaustive
def test_memory_of_a_language_model():
    # The sizes of a small model with a large vocabulary; nothing of this is run.
    size = tokens, feature, vocab = 4096, 1024, 151_936
    logits, head = tokens * vocab, feature * vocab
    held = compiled(untiled, size, gradient=(0, 1))
    assert largest_array(held) == logits
    ours = compiled(token_logprobs, size, gradient=(0, 1))
    assert largest_array(ours) == head < logits / 2
    assert temporary(ours) <= temporary(held) / 16
    tied = compiled(token_logprobs, size, tied=True, gradient=(0, 1))
    assert largest_array(tied) == head
    # The gradient of the head is transposed in the end, and the head itself never.
    assert temporary(tied) <= temporary(held) / 8
    assert temporary(tied) <= 1.5 * head


@pytest.mark.exhaustive
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 64])
def test_the_head_is_not_copied(tied, chunk_size):
    def score(hidden, head, tokens):
        return token_logprobs(hidden, head, tokens, chunk_size=chunk_size)

    _, feature, vocab = size = 64, 1024, 65_536  # four blocks, of which two may exist
    assert temporary(compiled(score, size, tied=tied)) < 0.6 * feature * vocab


@pytest.mark.exhaustive
def test_a_block_after_the_other():
    # Sixteen blocks: with all of them, or zeros for the gradient of all, this would be over 1.
    _, feature, vocab = size = 16, 4096, 65_536
    program = compiled(token_logprobs, size, gradient=(0, 1))
    assert temporary(program) < 0.4 * feature * vocab


@pytest.mark.exhaustive
def test_what_is_not_differentiated_costs_nothing():
    def products(*gradient):
        text = compiled(token_logprobs, (64, 8, 100), gradient=gradient).as_text()
        return text.count(" dot(")

    assert products(0) == products(1) == products(0, 1) - 1


def test_tilings():
    # Chunks of equal size, no larger than asked for; columns in whole multiples of 128.
    assert tiling(4096, 1024, 151_936, None).chunk == 1024
    assert tiling(4097, 1024, 151_936, None).chunk == 824  # five of 820, in multiples of 8
    assert tiling(100, 8, 1000, 30).chunk == 30  # four of 25 would be 32
    assert tiling(100, 8, 1000, 200).chunk == 100
    assert tiling(20, 8, 300, 6) == (6, (256, 44))
    # Two chunks at least, and two blocks where there are columns enough.
    assert tiling(4000, 8, 300, None) == (1000, (256, 44))
    assert tiling(512, 256, 32_768, None) == (256, (4096,) * 8)
    assert tiling(20, 8, 129, 20) == (20, (128, 1))
    # Of few logits, three chunks of one block.
    assert tiling(20, 8, 129, None) == (7, (129,))
    assert tiling(30, 8, 129, None) == (16, (129,))  # a third is ten; in multiples of 8
    assert tiling(6, 8, 129, None) == (2, (129,))
    assert tiling(1, 8, 129, None) == (1, (129,))
    assert tiling(768, 128, 512, None) == (256, (512,))
    assert tiling(1024, 8, 1024, None) == (344, (1024,))
    assert tiling(1025, 8, 1024, None) == (513, (512, 512))


@pytest.mark.parametrize("size", [(1, 1, 1), (4096, 1024, 151_936), (512, 256, 32_768),
                                  (333, 64, 50_257), (65_536, 8192, 262_144)])  # fmt: skip
@pytest.mark.parametrize("chunk_size", [None, 1, 100, 1024])
def test_tilings_cover_everything(size, chunk_size):
    time, feature, vocab = size
    rows, widths = tiling(time, feature, vocab, chunk_size)
    assert 1 <= rows <= min(time, chunk_size or 1024)
    assert sum(widths) == vocab and len(widths) <= 16 and min(widths) >= 1
    assert len(set(widths[:-1])) <= 1 and widths[-1] <= widths[0]
    assert rows * widths[0] <= LARGEST_TILE + 128 * rows
    if time * vocab > 2**24:
        assert rows * widths[0] <= time * vocab / 16 + 128 * rows
