"""Scores of tokens: types of the arguments, and the transformations of JAX around them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.loss.token_logprobs.scores import (
    SMALL,
    assert_close,
    assert_same_bits,
    compute,
    make,
    plain,
    reference,
)
from twinkle_jax.loss import token_logprobs


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


@pytest.mark.parametrize(
    "dtype", ["int64", *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("int8", "uint32"))]
)
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


def test_one_compilation_for_all_values():
    traces = []

    @jax.jit
    def score(hidden, head, tokens, mask, temperature):
        traces.append(1)
        return token_logprobs(hidden, head, tokens, mask=mask, temperature=temperature)

    for seed in range(3):
        case = make(20, 3, 200, seed, kept=seed / 2)
        score(case.hidden, case.head, case.tokens, case.mask, 0.5 + seed)
    assert len(traces) == 1


def test_calls_outside_jit_share_a_compilation():
    from twinkle_jax.loss.token_logprobs import _score

    case = make(21, 3, 201)
    token_logprobs(case.hidden, case.head, case.tokens, mask=case.mask)
    compiled = _score._cache_size()
    for temperature in (2, 0.5, np.float32(3), jnp.float32(1)):
        mask = case.mask & (np.arange(21) > float(temperature))
        token_logprobs(case.hidden, case.head, case.tokens, mask=mask, temperature=temperature)
    assert _score._cache_size() == compiled
