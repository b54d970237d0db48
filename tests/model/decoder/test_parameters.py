"""The table of parameters, and random ones."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.model.families import NAMES, config_of, each, params_of
from twinkle_jax.model import init_params, parameter_shapes
from twinkle_jax.model.decoder.parameters import cast_params, parameter_table
from twinkle_jax.model.huggingface.checkpoint_files import stored_name, stored_shape


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
    kernels = [
        np.asarray(x["self_attn"]["o_proj"]["kernel"], np.float32)
        for x in params["layers"].values()
        if "self_attn" in x  # some families have linear layers
    ]
    assert all(0.015 < kernel.std() < 0.025 for kernel in kernels)
    assert len({layer.tobytes() for kernel in kernels for layer in kernel}) == sum(
        map(len, kernels)
    )
    norm = np.asarray(params["norm"]["scale"], np.float32)
    np.testing.assert_array_equal(norm, 0 if config.centred_norms else 1)


def test_corrections_of_experts_are_not_rounded_to_16_bits():
    config, params = config_of("glm4_moe"), params_of("glm4_moe")
    for dtype, kept in (("bfloat16", "float32"), ("float16", "float32"), ("float32", "float32")):
        shapes = parameter_shapes(config, dtype)
        gate = shapes["layers"]["1"]["mlp"]["gate"]
        assert (gate["kernel"].dtype, gate["e_score_correction_bias"].dtype) == (dtype, kept)
        cast = cast_params(params, dtype)
        assert jax.tree.map(lambda x: x.dtype, cast) == jax.tree.map(lambda x: x.dtype, shapes)
    gates = [x["layers"]["1"]["mlp"]["gate"]["e_score_correction_bias"] for x in (cast, params)]
    np.testing.assert_array_equal(*gates)


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
    config = dataclasses.replace(config_of("qwen3_5_text"), delta_net=None)
    with pytest.raises(ValueError, match="delta_net"):
        parameter_shapes(config)


def test_the_repeated_block_is_found_once():
    """It takes the square of the number of layers, and every parameter asks for it."""
    config = config_of("qwen3_5_text")
    assert config.stacks is config.stacks
