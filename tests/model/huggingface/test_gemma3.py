"""Gemma 3's configurations: windows, two rotary parts, four norms; flat, nested, old and new."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from tests.model.families import family
from twinkle_jax.model import hidden_states, parameter_shapes, parse_config
from twinkle_jax.model.decoder.config import LinearScaling, Window
from twinkle_jax.model.huggingface.config_json import export_config

SLIDING, FULL = "sliding_attention", "full_attention"


def test_what_it_is():
    config = parse_config(family("gemma3_text"))
    assert config.centred_norms and config.output_norms and config.scaled_embedding
    assert config.activation == "gelu_pytorch_tanh" and config.tie_embeddings
    assert config.attention.qk_norm and not config.attention.bias
    assert config.attention.window == Window(size=3, rope_theta=20.0)
    assert config.attention.rope_scaling == LinearScaling(2.0)
    assert config.attention.scale == pytest.approx(12**-0.5)
    names = {path for path in parameter_shapes(config)["layers"]["0"] if "norm" in path}
    assert names == {
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    }


@pytest.mark.parametrize("layers", [6, 26, 34])
def test_any_pattern_is_a_loop_over_one_layer(layers):
    config = parse_config(family("gemma3_text", layer_types=None, num_hidden_layers=layers))
    assert config.block == (FULL,) and config.repeats == layers
    assert config.layer_kinds[:6] == (SLIDING,) * 5 + (FULL,)
    assert config.sliding.shape == (layers, 1) and config.sliding.sum() == layers - layers // 6


def test_a_configuration_as_the_hub_has_it():
    """Gemma 3 4B gives few keys, nested; the others have transformers' defaults."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = parse_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": text,
            "vision_config": {"hidden_size": 1152},
            "mm_tokens_per_image": 256,
        }
    )
    heads = config.attention
    assert (heads.query_heads, heads.key_value_heads, heads.head_dim) == (8, 4, 256)
    assert (heads.rope_theta, heads.rope_scaling) == (1e6, LinearScaling(8.0))
    assert (heads.window, heads.scale) == (Window(1024, 1e4), 1 / 16)
    assert config.vocab_size == 262_208 and config.tie_embeddings


def test_rotary_parts_of_both_kinds_in_both_spellings():
    old = {"rope_theta": 700.0, "rope_local_base_freq": 30.0, "rope_parameters": None}
    old["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}
    full = {"rope_type": "linear", "rope_theta": 700.0, "factor": 4.0}
    new = {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": 30.0}}
    expected = parse_config(family("gemma3_text", rope_parameters=new))
    assert parse_config(family("gemma3_text", **old)) == expected
    # As in transformers, `rope_scaling` is laid over the full layers' part.
    laid = {FULL: {**full, "factor": 2.0}, SLIDING: new[SLIDING]}
    scaling = {"rope_type": "linear", "factor": 4.0}
    both = family("gemma3_text", rope_parameters=laid, rope_scaling=scaling)
    assert parse_config(both) == expected


def test_what_is_written_is_read_by_both_versions_of_transformers():
    config = parse_config(family("gemma3_text", sliding_window_pattern=6))
    written = export_config(config, nested=False, dtype="float32")
    assert written["hidden_activation"] == "gelu_pytorch_tanh" and "hidden_act" not in written
    assert written["rope_local_base_freq"] == 20.0 and written["sliding_window"] == 3
    assert written["rope_scaling"] == {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    assert written["query_pre_attn_scalar"] == 12
    assert parse_config(written) == config
    whole = parse_config(family("gemma3_text", layer_types=[FULL] * 3))
    assert whole.attention.window is None
    written = export_config(whole, nested=False, dtype="float32")
    assert list(written["rope_parameters"]) == [FULL] and parse_config(written) == whole


REFUSED = [
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping must be None, got 30.0"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be None, got 50.0"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention must be False or None"),
    ({"hidden_activation": "gelu"}, "hidden_activation must be 'gelu_pytorch_tanh', got 'gelu'"),
    ({"hidden_act": "silu"}, "'hidden_act' must be a key that a configuration of gemma3_text has"),
    ({"sliding_window": None}, "sliding_window must be a positive integer .*, got None"),
    ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive integer .*, got 0"),
    ({"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern must be a pos"),
    ({"rope_parameters": {"rope_theta": 1.0}}, "rope_parameters must have the keys 'full_att.*"),
    ({"rope_parameters": {SLIDING: {"rope_type": "linear"}}}, "rope_type must be 'default', got"),
    ({"rope_parameters": {FULL: {"rope_type": "linear"}}}, "factor must be there .*, got none"),
    ({"rope_parameters": {FULL: {"rope_type": "llama3"}}}, "rope_type must be 'default' or 'lin"),
    ({"rope_parameters": {FULL: {"factor": 8.0}}}, "must have no key 'factor' .* 'default'"),
    ({"layer_types": ["linear_attention"] * 3}, "layer_types must be a list of 3"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        parse_config(family("gemma3_text") | changes)


def test_sliding_layers_need_a_window():
    config = parse_config(family("gemma3_text"))
    heads = dataclasses.replace(config.attention, window=None)
    config = dataclasses.replace(config, attention=heads)
    params, tokens = parameter_shapes(config), jax.ShapeDtypeStruct((1, 4), jnp.int32)
    with pytest.raises(ValueError, match="window must be given where there are sliding_attention"):
        jax.eval_shape(partial(hidden_states, config=config), params, tokens=tokens)
