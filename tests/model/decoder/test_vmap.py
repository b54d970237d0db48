"""A decoder under `vmap` is the decoder in a loop, at sizes where compilers change their ways.

jax 0.10.2 compiles some vmapped products of a matrix and a vector wrongly on a CPU (jax #39103), in
the last rows behind a multiple of 32,768. Attention of a single token is such a product.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.families import assert_close, each, family, random_params
from twinkle_jax.model import decode_step, hidden_states, parse_config, prefill

TINY = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
}
TINY_LINEAR = {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 4}
CHUNK = 1024


@functools.cache
def tiny(name):
    linear = TINY_LINEAR | {"linear_value_head_dim": 4} if name == "qwen3_5_text" else {}
    layers = {"num_hidden_layers": 2 if linear else 1, "layer_types": None}
    layers |= {"full_attention_interval": 2} if linear else {}
    config = parse_config(family(name, **TINY, **linear, **layers))
    return config, random_params(config)


def in_a_loop(function, *arrays):
    """Apply a function of one row to all, some at a time, none of them beside 32,768 others."""
    mapped = jax.jit(jax.vmap(function))
    rows = len(jax.tree.leaves(arrays)[0])
    parts = []
    for start in range(0, rows, CHUNK):
        taken = jnp.minimum(jnp.arange(start, start + CHUNK), rows - 1)
        part = mapped(*jax.tree.map(lambda x, at=taken: x[at], arrays))
        parts.append(jax.tree.map(lambda x, n=rows - start: np.asarray(x)[:n], part))
    return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)


def assert_alike(mapped, looped):
    for a, b in zip(jax.tree.leaves(mapped), jax.tree.leaves(looped), strict=True):
        assert_close(np.asarray(a, np.float64), b, 2e-4)  # rounding is within 1.1e-5


def forward(config):
    return lambda params, tokens: hidden_states(params, config, tokens[None])[0]


def gradient(config):
    def loss(params, tokens):
        return jnp.sum(jnp.sin(hidden_states(params, config, tokens[None])))

    return jax.grad(loss)


def generation(config):
    """The prompt, and two tokens more."""

    def run(params, tokens):
        last, cache = prefill(params, config, tokens[None], max_length=tokens.shape[0] + 2)
        out = [last[0]]
        for step in range(2):
            last, cache = decode_step(params, config, tokens[:1] + step, cache)
            out.append(last[0])
        return jnp.stack(out)

    return run


SIZES = [(1025, 1), (32_769, 1), (32_771, 3)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", [forward, gradient, generation])
@pytest.mark.parametrize("name", each(["qwen3", "qwen3_5_text"]))
@pytest.mark.parametrize(("rows", "time"), SIZES)
def test_rows_under_vmap_are_rows_in_a_loop(rows, time, name, what):
    config, params = tiny(name)
    tokens = jax.random.randint(jax.random.key(0), (rows, time), 0, 14)
    run = functools.partial(what(config), params)
    assert_alike(jax.jit(jax.vmap(run))(tokens), in_a_loop(run, tokens))


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", [forward, generation])
@pytest.mark.parametrize("name", each(["qwen3", "qwen3_5_text"]))
def test_parameters_under_vmap_are_models_in_a_loop(name, what):
    """Each row has a model of its own: every projection multiplies a matrix and a vector."""
    rows, time = 32_769, 1
    config, params = tiny(name)
    scale = jnp.linspace(0.5, 1.5, rows)
    models = jax.tree.map(lambda x: scale.reshape(-1, *(1,) * x.ndim) * x[None], params)
    tokens = jax.random.randint(jax.random.key(0), (rows, time), 0, 14)
    run = what(config)
    assert_alike(jax.jit(jax.vmap(run))(models, tokens), in_a_loop(run, models, tokens))
