"""Embeddings that are scaled, and which layers of a loop slide."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.families import assert_close, config_of, family, hidden, params_of
from twinkle_jax.model import hidden_states, parameter_shapes, parse_config
from twinkle_jax.model.decoder.layers import embed


def test_the_scale_of_embeddings_is_rounded_to_the_type_that_is_computed_in():
    """√24 = 4.898979; the nearest bfloat16, with 8 bits, is 4.90625."""
    config, table = config_of("gemma3_text"), jnp.ones((48, 24))
    found = embed(config, table, jnp.array([3]), jnp.dtype("bfloat16"))
    assert found.dtype == jnp.bfloat16 and float(found[0, 0]) == 4.90625
    found = embed(config, table, jnp.array([3]), jnp.dtype("float32"))
    assert float(found[0, 0]) == np.float32(24**0.5)
    assert float(embed(config_of("qwen3"), table, jnp.array([3]), jnp.dtype("float32"))[0, 0]) == 1


def test_a_window_decides_what_reaches_a_token():
    """One sliding layer that sees 3 tokens: a fourth does not reach it, the third does."""
    changes = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    config = parse_config(family("gemma3_text", **changes))
    params = params_of("gemma3_text")
    params = {**params, "layers": jax.tree.map(lambda x: x[:1], params["layers"])}
    tokens = jnp.array([[5, 6, 7, 8], [9, 6, 7, 8], [5, 9, 7, 8]])
    last = hidden(params, config, tokens)[:, -1]
    np.testing.assert_array_equal(last[0], last[1])
    assert np.abs(last[0] - last[2]).max() > 0.01


@pytest.mark.exhaustive
def test_a_window_as_long_as_the_row_is_none():
    config, params = config_of("gemma3_text"), params_of("gemma3_text")
    tokens = jnp.array([[5, 6, 7, 8, 9]])
    seen = []
    for size in (4, 5, 6):
        window = dataclasses.replace(config.attention.window, size=size)
        heads = dataclasses.replace(config.attention, window=window)
        seen.append(hidden(params, dataclasses.replace(config, attention=heads), tokens))
    assert_close(seen[1], seen[2])
    assert np.abs(seen[0][0, :4] - seen[1][0, :4]).max() < 1e-4
    assert np.abs(seen[0][0, 4] - seen[1][0, 4]).max() > 0.01


@pytest.mark.parametrize("layers", [6, 7])
def test_layers_of_both_kinds_are_one_loop_over_one_layer(layers):
    config = parse_config(family("gemma3_text", num_hidden_layers=layers, layer_types=None))
    tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    traced = jax.make_jaxpr(partial(hidden_states, config=config))
    program = traced(parameter_shapes(config), tokens=tokens)
    (loop,) = (e for e in program.eqns if e.primitive.name == "scan")
    assert loop.params["length"] == layers
    assert str(loop.params["jaxpr"]).count(" cond[") == 1  # of an attention with a window
