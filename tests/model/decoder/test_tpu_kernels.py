"""Kernels for TPUs, interpreted: attention as XLA computes it, entries as a scatter puts them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.families import assert_close, config_of, each, family, params_of, random_params
from tests.model.training import fresh, random_batch, relative
from twinkle_jax.loss import GRPOLoss
from twinkle_jax.model import hidden_states, make_mesh, parse_config, prefill, shard_like_params
from twinkle_jax.model.decoder.cache import write_token
from twinkle_jax.model.decoder.tpu_kernels import write_in_place
from twinkle_jax.training import grad_step, score_batch


def value_and_gradient(config, params, attention, tokens, mask, segment_ids=None, dtype=None):
    """Hidden states at tokens, and the gradient of a product with fixed numbers."""
    weights = jax.random.normal(jax.random.key(5), (*tokens.shape, config.hidden_size))

    def total(params):
        hidden = hidden_states(
            params,
            config,
            tokens,
            mask,
            segment_ids=segment_ids,
            attention=attention,
            compute_dtype=dtype,
        )
        return jnp.sum(hidden.astype(jnp.float32) * weights), hidden

    with jax.numpy_dtype_promotion("standard" if dtype else "strict"):
        (_, hidden), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
    return hidden, gradient


def rows(count, time, seed=0):
    """Rows of different lengths, some padded in front and some behind."""
    rng = np.random.default_rng(seed)
    mask = np.ones((count, time), bool)
    mask[1, : time // 3] = False
    mask[-1, time - 2 :] = False
    return jnp.asarray(rng.integers(0, 48, (count, time)), jnp.int32), jnp.asarray(mask)


@pytest.mark.slow
@pytest.mark.parametrize("segmented", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "name",
    each(["gemma2", "gpt_oss", "youtu", "gemma3_text", "qwen3", "qwen2", "qwen3_5_text"], 3),
)
def test_values_and_gradients_are_those_of_xla(name, segmented):
    config, params = config_of(name), params_of(name)
    tokens, mask = rows(3, 10)
    ids = jnp.asarray(np.repeat([[4, 7, 4]], 3, 0).repeat([3, 5, 2], 1), jnp.int32)
    arrays = tokens, mask, ids if segmented else None
    actual = value_and_gradient(config, params, "splash", *arrays)
    expected = value_and_gradient(config, params, "xla", *arrays)
    assert_close(actual[0], expected[0], 1e-5)
    assert relative(actual[1], expected[1]) < 1e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize("time", [384, 600])
def test_rows_of_many_blocks(time):
    """Some of them outside the window, and so never read; with segments across their edges."""
    config = parse_config(family("gemma3_text", sliding_window=100))
    params = random_params(config)
    tokens, mask = rows(2, time)
    ids = jnp.asarray(np.arange(time) // 170, jnp.int32)[None].repeat(2, 0)
    for segments in (None, ids):
        actual, expected = (
            value_and_gradient(config, params, kind, tokens, mask, segments)
            for kind in ("splash", "xla")
        )
        assert_close(actual[0], expected[0], 1e-5)
        assert relative(actual[1], expected[1]) < 3e-5


@pytest.mark.exhaustive
def test_in_sixteen_bits_it_is_as_close_as_xla():
    config, params, (tokens, mask) = config_of("qwen3"), params_of("qwen3"), rows(3, 10)
    exact, _ = value_and_gradient(config, params, "xla", tokens, mask)

    def off(kind):
        hidden, _ = value_and_gradient(config, params, kind, tokens, mask, None, "bfloat16")
        return np.max(np.abs(hidden.astype(jnp.float32) - exact))

    assert off("splash") < 1.5 * off("xla")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 4, 1)])
def test_each_device_attends_in_its_rows_and_heads(shape, name):
    mesh = make_mesh(**dict(zip(("data", "fsdp", "tensor"), shape, strict=True)))
    config, batch, loss = config_of(name), random_batch(rows=8, time=12), GRPOLoss(beta=0.1)
    results = []
    for where, kind in ((None, "xla"), (mesh, "splash")):
        state = fresh(name)
        if where is not None:
            state = jax.device_put(state, shard_like_params(state, where))
        scores = score_batch(state.params, batch, config, attention=kind)
        state, _ = grad_step(state, batch, config, loss, attention=kind)
        results.append((scores.logps, state.gradient_sum))
    (here, gradient), (there, gradient_there) = results
    np.testing.assert_allclose(there, here, rtol=0, atol=1e-5)
    assert relative(gradient_there, gradient) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 3])
def test_prompts_are_read_on_a_mesh(count):
    """With XLA's attention where the mesh does not divide them, which is not refused."""
    mesh, config, params = make_mesh(data=4), config_of("qwen3"), params_of("qwen3")
    tokens, mask = rows(count, 10)

    def read(mesh, attention):
        fill = jax.jit(
            lambda p: prefill(
                p, config, tokens, mask, max_length=12, attention=attention, mesh=mesh
            )
        )
        return fill(params)

    last, cache = read(mesh, "splash")
    expected, cache_of_one = read(None, "xla")
    assert_close(last, expected, 1e-5)
    assert relative(cache.layers, cache_of_one.layers) < 1e-5


# The cache.

CACHED_ROWS, GROUPS, LAYERS = 4, 2, 3


def stack_and_entries(width, slots, axis, dtype):
    extents = (slots, width) if axis == 3 else (width, slots)
    keys = jax.random.split(jax.random.key(0))
    stack = jax.random.normal(keys[0], (LAYERS, CACHED_ROWS, GROUPS, *extents)).astype(dtype)
    return stack, jax.random.normal(keys[1], (CACHED_ROWS, GROUPS, width))


def written_by_hand(stack, new, repeat, length, axis):
    stack, new = np.array(stack), np.asarray(new.astype(stack.dtype))
    for row, slot in enumerate(length):
        if slot < stack.shape[axis]:
            np.moveaxis(stack, axis, 2)[repeat, row, slot] = new[row]
    return stack


CASES = {  # width of a head, slots, their axis, type, where each row writes
    "time along lanes": (64, 256, 4, "bfloat16", [0, 127, 128, 255]),
    "a last block that is not full": (8, 300, 4, "float32", [299, 300, 256, 5]),
    "values of narrow heads": (8, 160, 3, "bfloat16", [159, 0, 130, 160]),
    "values of wide heads": (128, 40, 3, "bfloat16", [15, 16, 39, 40]),
    "less than a block": (8, 12, 4, "float32", [11, 3, 2**30, 0]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("how", ["kernel", "mesh", "scatter"])
def test_an_entry_is_written_and_nothing_else(case, how):
    width, slots, axis, dtype, length = CASES[case]
    stack, new = stack_and_entries(width, slots, axis, dtype)
    at, repeat = jnp.array(length, jnp.int32), jnp.int32(1)
    if how == "scatter":
        written = write_token(stack, new, repeat, at, axis=axis, mesh=None)
    else:
        mesh = make_mesh(data=2, fsdp=2, tensor=2) if how == "mesh" else None
        options = {"axis": axis, "mesh": mesh, "interpret": True}
        written = jax.jit(lambda *xs: write_in_place(*xs, **options))(stack, new, repeat, at)
    assert written.dtype == stack.dtype
    np.testing.assert_array_equal(written, written_by_hand(stack, new, 1, length, axis))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_rows_write_into_lines_of_their_own(case):
    width, slots, axis, dtype, length = CASES[case]
    stack, new = stack_and_entries(width, slots, axis, dtype)
    at, line = jnp.array(length, jnp.int32), jnp.array([2, 0, 3, 1], jnp.int32)
    options = {"axis": axis, "mesh": None, "interpret": True}
    written = write_in_place(stack, new, jnp.int32(1), at, line, **options)
    row = np.argsort(line)  # of each line
    expected = written_by_hand(stack, new[row], 1, np.asarray(length)[row].tolist(), axis)
    np.testing.assert_array_equal(written, expected)


def test_heads_that_a_mesh_does_not_divide_stay_whole():
    stack, new = stack_and_entries(8, 16, 4, "float32")
    length = [3, 4, 5, 6]
    options = {"axis": 4, "mesh": make_mesh(data=1, fsdp=2, tensor=4), "interpret": True}
    written = write_in_place(stack, new, jnp.int32(0), jnp.array(length, jnp.int32), **options)
    np.testing.assert_array_equal(written, written_by_hand(stack, new, 0, length, 4))
