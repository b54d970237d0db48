"""The gated delta rule: chunks equal the recurrence, segments are apart, gradients are right."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tests.model.families import assert_close, config_of, each, params_of
from tests.model.reference import reference_delta_rule
from twinkle_jax.model.decoder.delta_net import (
    DeltaInputs,
    _solve_by_halves,
    _substitute,
    delta_net,
    delta_rule,
    delta_rule_step,
    unit,
)

_run = jax.jit(delta_rule, static_argnames="chunk")


def draw(time, *, decay=1.0, batch=2, heads=3, seed=0):
    rng = np.random.default_rng(seed)
    query, key = (rng.standard_normal((batch, time, heads, 4)) for _ in range(2))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = rng.standard_normal((batch, time, heads, 5))
    log_decay = -decay * rng.exponential(size=(batch, time, heads))
    strength = rng.uniform(size=(batch, time, heads))
    return DeltaInputs(query, key, value, log_decay, strength)


def reference(inputs):
    batch, _, heads, _ = inputs.key.shape
    results = [
        [reference_delta_rule(*(x[b, :, h] for x in inputs)) for h in range(heads)]
        for b in range(batch)
    ]
    out = np.array([[out for out, _ in row] for row in results])
    return np.moveaxis(out, 1, 2), np.array([[state for _, state in row] for row in results])


def as_float32(inputs):
    return DeltaInputs(*(jnp.asarray(x, jnp.float32) for x in inputs))


def test_two_tokens_by_hand():
    # S1 = k1 (1/2 · 4) = (2, 0); e^0 S1 read with k2 = (0, 1) gives 0, so S2 = S1 + k2 (1 · 3).
    inputs = DeltaInputs(
        query=jnp.array([[[[1.0, 0.0]], [[1.0, 1.0]]]]),
        key=jnp.array([[[[1.0, 0.0]], [[0.0, 1.0]]]]),
        value=jnp.array([[[[4.0]], [[3.0]]]]),
        log_decay=jnp.zeros((1, 2, 1)),
        strength=jnp.array([[[0.5], [1.0]]]),
    )
    out, state = _run(inputs, chunk=64)
    np.testing.assert_array_equal(out[0, :, 0, 0], [2, 5])
    np.testing.assert_array_equal(state[0, 0, :, 0], [2, 3])


def test_short_keys_are_not_scaled_to_length_1():
    # transformers adds 1e-6 to the square: 0.001 becomes 0.001 / sqrt(2e-6).
    np.testing.assert_allclose(unit(jnp.array([1e-3, 0.0])), [0.5**0.5, 0], rtol=1e-5)


LENGTHS = [(1, 64), (8, 4), (13, 1)]


@pytest.mark.parametrize(
    ("time", "chunk"),
    [(9, 4), (9, 64), *(pytest.param(*x, marks=pytest.mark.exhaustive) for x in LENGTHS)],
)
@pytest.mark.parametrize("decay", [0.01, 1.0, 30.0])
def test_chunks_equal_the_recurrence(time, chunk, decay):
    inputs = draw(time, decay=decay)
    for actual, expected in zip(
        _run(as_float32(inputs), chunk=chunk), reference(inputs), strict=True
    ):
        assert_close(actual, expected, 5e-6)


def test_long_rows_are_solved_in_parts():
    """Five chunks, of which two are solved at once: values, end and gradients are the same."""
    inputs = as_float32(draw(17, batch=1))
    segments = jnp.asarray([[0] * 7 + [1] * 10])
    out, state = jax.jit(lambda x: delta_rule(x, segments, chunk=4, together=2))(inputs)
    expected, end = jax.jit(lambda x: delta_rule(x, segments, chunk=4))(inputs)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(state, end)

    def gradients(together):
        def loss(x):
            out, state = delta_rule(x, segments, chunk=4, together=together)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(state))

        return jax.jit(jax.grad(loss))(inputs)

    chex.assert_trees_all_close(gradients(2), gradients(128), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_long_rows_need_less_memory_in_parts():
    inputs = as_float32(draw(2048, batch=1))

    def memory(together):
        gradient = jax.grad(lambda x: jnp.sum(jnp.sin(delta_rule(x, together=together)[0])))
        return jax.jit(gradient).lower(inputs).compile().memory_analysis().temp_size_in_bytes

    assert memory(4) < memory(128) / 2


def test_steps_equal_the_recurrence():
    inputs = draw(6)
    state = jnp.zeros((2, 3, 4, 5))
    out, last = reference(inputs)
    single = jax.jit(delta_rule_step)
    for t in range(6):
        now, state = single(state, DeltaInputs(*(x[:, t : t + 1] for x in as_float32(inputs))))
        assert_close(now[:, 0], out[:, t], 5e-6)
    assert_close(state, last, 5e-6)


@pytest.mark.parametrize("chunk", each([4, 3, 64]))
def test_segments_start_from_an_empty_state(chunk):
    inputs = draw(11, batch=1)
    segments = np.array([[3, 3, 3, 3, 1, 1, 2, 2, 2, 2, 2]])
    out, state = _run(as_float32(inputs), jnp.asarray(segments), chunk=chunk)
    parts = [reference(DeltaInputs(*(x[:, segments[0] == i] for x in inputs))) for i in (3, 1, 2)]
    assert_close(out, np.concatenate([part for part, _ in parts], axis=1), 5e-6)
    assert_close(state, parts[-1][1], 5e-6)


def test_padding_leaves_the_state_alone():
    inputs = as_float32(draw(9))
    keep = jnp.arange(9)[None, :, None] < 6
    padded = inputs._replace(
        log_decay=jnp.where(keep, inputs.log_decay, 0),
        strength=jnp.where(keep, inputs.strength, 0),
    )
    _, state = _run(padded, chunk=4)
    _, expected = _run(DeltaInputs(*(x[:, :6] for x in inputs)), chunk=4)
    assert_close(state, expected, 1e-6)


def test_gradients():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        inputs = DeltaInputs(*(jnp.asarray(x) for x in draw(5, batch=1, heads=1)))
        segments = jnp.array([[0, 0, 0, 1, 1]])

        def run(*parts):
            out, state = delta_rule(DeltaInputs(*parts), segments, chunk=2)
            return jnp.sin(out).sum() + jnp.sin(state).sum()

        check_grads(jax.jit(run), tuple(inputs), order=1, modes=("rev",), rtol=1e-3, atol=1e-3)


def test_strong_decay_gives_finite_gradients():
    """Above the diagonal differences of cumulative decay are large and positive."""
    inputs = as_float32(draw(8, decay=300.0))
    gradients = jax.jit(jax.grad(lambda x: jnp.sum(delta_rule(x)[0])))(inputs)
    assert all(np.all(np.isfinite(x)) for x in gradients)


def test_a_linear_layer_keeps_sequences_of_a_row_apart():
    """Its convolution too, which reaches three tokens back."""
    config = config_of("qwen3_5_text")
    weights = jax.tree.map(lambda x: x[0], params_of("qwen3_5_text")["layers"]["0"]["linear_attn"])
    x, other = np.random.default_rng(0).standard_normal((2, 7, config.hidden_size))
    other[4:] = x[4:]  # another first sequence

    @jax.jit
    def mix(x, segments):
        mask = jnp.ones((1, 7), bool)
        return delta_net(x, weights, config.delta_net, mask, segments, epsilon=1e-6)[0]

    for ids, apart in (([[0, 0, 0, 0, 1, 1, 1]], True), ([[0] * 7], False)):
        one, two = (mix(jnp.float32(y), jnp.array(ids)) for y in (x, other))
        alike = np.isclose(one, two, rtol=0, atol=1e-4).all(
            axis=1
        )  # a running sum of decays rounds
        np.testing.assert_array_equal(alike, [False] * 4 + [apart] * 3)


@pytest.mark.parametrize("decay", [0.001, 1.0, 10.0])
def test_chunks_are_as_exact_as_single_steps(decay):
    """Running sums of the decay over a chunk round at their own size: 1e-5 at a decay of 10."""
    inputs = draw(128, decay=decay)
    out, state = _run(as_float32(inputs))
    expected, last = reference(inputs)
    assert_close(out, expected, 1e-6)
    assert_close(state, last, 1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 37, 64])
def test_halves_solve_what_substitution_solves(size):
    rng = np.random.default_rng(size)
    below = np.tril(rng.standard_normal((2, 3, size, size)), -1) / 4
    right, weights = rng.standard_normal((2, 2, 3, size, 5))

    def value_and_gradients(solve):
        def loss(below, right):
            solution = solve(below, right)
            return jnp.sum(solution * weights), solution

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(below, right)

    with jax.enable_x64(True):
        (_, solution), (to_below, to_right) = value_and_gradients(_solve_by_halves)
        (_, expected), (wanted, at_right) = value_and_gradients(_substitute)
    np.testing.assert_allclose(solution, np.linalg.solve(np.eye(size) + below, right), atol=1e-10)
    np.testing.assert_allclose(solution, expected, atol=1e-10)
    np.testing.assert_allclose(np.tril(to_below, -1), np.tril(wanted, -1), atol=1e-9)
    np.testing.assert_allclose(to_right, at_right, atol=1e-10)


def test_a_cpu_runs_no_triangular_solve():
    """That of jaxlib 0.10.2 may never return, on one device too."""
    inputs = as_float32(draw(128))
    run = jax.jit(jax.grad(lambda x: jnp.sum(delta_rule(x)[0])))
    assert "trsm" not in run.lower(inputs).as_text()
    assert "triangular" not in run.lower(inputs).as_text()
