"""The table of parameters, and random ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.model.families import (
    NAMES,
    config_of,
    each,
    family,
    hidden,
    params_of,
    random_params,
)
from twinkle_jax.model import (
    Decoder,
    init_params,
    output_logits,
    parameter_shapes,
    parse_config,
)
from twinkle_jax.model.decoder.parameters import parameter_table
from twinkle_jax.model.huggingface.checkpoint_names import stored_name, stored_shape


def test_names_and_shapes_of_a_checkpoint():
    table = parameter_table(config_of("qwen3_5_text"))
    stored = {stored_name(p.path): stored_shape(p) for p in table.values()}
    # 4 heads of [query, gate] of 8 each; 2 · (2 · 6) + 4 · 10 channels
    assert stored["self_attn.q_proj.weight"] == (64, 24)
    assert stored["self_attn.q_norm.weight"] == (8,)
    assert stored["linear_attn.conv1d.weight"] == (64, 1, 4)
    assert stored["linear_attn.A_log"] == stored["linear_attn.dt_bias"] == (4,)
    assert stored["linear_attn.in_proj_z.weight"] == (40, 24)
    assert stored["embed_tokens.weight"] == stored["lm_head.weight"] == (48, 24)


@pytest.mark.parametrize("name", each(NAMES[::-1]))
def test_random_parameters_have_the_shapes_and_types_promised(name):
    config = config_of(name)
    params = init_params(jax.random.key(0), config, dtype="bfloat16")
    shapes = parameter_shapes(config, "bfloat16")
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )
    kernel = np.asarray(params["layers"]["0"]["mlp"]["up_proj"]["kernel"], np.float32)
    assert 0.015 < kernel.std() < 0.025 and not np.array_equal(kernel[0], kernel[1])
    norm = np.asarray(params["norm"]["scale"], np.float32)
    np.testing.assert_array_equal(norm, 0 if config.centred_norms else 1)


def test_keys_decide_and_parameters_differ_from_each_other():
    config = config_of("qwen3")
    a, b, c = (init_params(jax.random.key(i), config, dtype="bfloat16") for i in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    mlp = a["layers"]["0"]["mlp"]
    assert not np.array_equal(mlp["up_proj"]["kernel"], mlp["gate_proj"]["kernel"])
    assert not np.array_equal(
        mlp["up_proj"]["kernel"], c["layers"]["0"]["mlp"]["up_proj"]["kernel"]
    )


def test_decay_rates_of_random_linear_layers():
    params = init_params(jax.random.key(0), config_of("qwen3_5_text"), dtype="bfloat16")
    rates = np.exp(np.asarray(params["layers"]["0"]["linear_attn"]["A_log"], np.float32))
    assert np.all((rates > 0.009) & (rates < 17))


def test_linear_layers_need_their_sizes():
    import dataclasses

    config = dataclasses.replace(config_of("qwen3_5_text"), delta_net=None)
    with pytest.raises(
        ValueError, match="delta_net must be given where there are linear_attention"
    ):
        parameter_shapes(config)


@pytest.mark.parametrize("name", NAMES)
def test_the_module_is_the_functions(name):
    config, params = config_of(name), params_of(name)
    decoder = Decoder(config, params)
    jax.tree.map(np.testing.assert_array_equal, decoder.params, params)
    graph, state = nnx.split(decoder)
    merged = nnx.merge(graph, jax.tree.map(lambda x: 2 * x, state))
    np.testing.assert_array_equal(merged.norm["scale"][...], 2 * params["norm"]["scale"])
    assert hash(graph) == hash(nnx.split(Decoder(config, params))[0])


def test_the_module_computes_logits_and_takes_the_functions_options():
    config, params = config_of("qwen2"), params_of("qwen2")
    tokens = jnp.array([[1, 2, 3, 4]])
    mask, segments = tokens > 1, jnp.array([[0, 0, 1, 1]])
    out = nnx.jit(lambda d: d(tokens, mask, segment_ids=segments))(Decoder(config, params))
    expected = hidden(params, config, tokens, mask, segment_ids=segments)
    np.testing.assert_allclose(out, output_logits(params, expected), atol=2e-5)
    assert out.shape == (1, 4, 48)


def test_gradients_of_the_module():
    graph, state = nnx.split(Decoder(config_of("qwen2"), params_of("qwen2")))
    tokens = jnp.array([[1, 2, 3]])
    gradient = jax.eval_shape(jax.grad(lambda s: jnp.sum(nnx.merge(graph, s)(tokens))), state)
    shapes = jax.tree.map(lambda x: x.shape, nnx.to_pure_dict(gradient))
    assert shapes == jax.tree.map(lambda x: x.shape, params_of("qwen2"))


def test_the_module_has_no_head_when_tied():
    config = parse_config(family("qwen3", tie_word_embeddings=True))
    decoder = Decoder(config, random_params(config))
    assert not hasattr(decoder, "lm_head") and "lm_head" not in decoder.params
