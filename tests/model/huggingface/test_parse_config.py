"""Reading and writing `config.json`: both spellings, nested and flat, and what is refused."""

import json

import pytest

from tests.model.families import NAMES, family
from twinkle_jax.model import parse_config
from twinkle_jax.model.huggingface.export_config import export_config


def test_what_each_family_is():
    qwen2, qwen3, qwen3_5 = (parse_config(family(name)) for name in NAMES)
    assert qwen2.attention.bias and not qwen2.attention.qk_norm
    assert not qwen3.attention.bias and qwen3.attention.qk_norm
    assert qwen3_5.attention.output_gate and qwen3_5.centred_norms and qwen3_5.delta_net.channels
    assert not qwen3.attention.output_gate and not qwen3.centred_norms and qwen3.delta_net is None
    assert (qwen2.attention.rotary_dim, qwen3_5.attention.rotary_dim) == (8, 4)
    assert qwen3_5.block == ("linear_attention", "full_attention") and qwen3_5.repeats == 2


def test_old_and_new_spelling_of_the_rotary_base():
    old = family("qwen3", rope_theta=5e6, rope_scaling=None)
    del old["rope_parameters"]
    new = family("qwen3", rope_parameters={"rope_theta": 5e6, "rope_type": "default"})
    assert parse_config(old) == parse_config(new)
    assert parse_config(old).attention.rope_theta == 5e6
    both = family("qwen3", rope_theta=1.0, rope_parameters={"rope_theta": 5e6})
    assert parse_config(both) == parse_config(new)
    del old["rope_theta"]
    assert parse_config(old).attention.rope_theta == 10_000


def test_old_partial_rotary_factor_and_its_default():
    config = family("qwen3_5_text", rope_parameters=None, rope_theta=1e7, head_dim=16)
    assert parse_config(config).attention.rotary_dim == 4
    assert parse_config({**config, "partial_rotary_factor": 0.5}).attention.rotary_dim == 8


def test_defaults_of_head_dim_and_of_groups():
    config = family("qwen2")
    del config["head_dim"], config["num_key_value_heads"]
    heads = parse_config(config).attention
    assert (heads.head_dim, heads.key_value_heads) == (6, 4)
    for name, width in (("qwen3", 128), ("qwen3_5_text", 256)):
        assert parse_config(family(name, head_dim=None)).attention.head_dim == width


def test_layers_of_qwen3_5_by_interval():
    config = family("qwen3_5_text", layer_types=None, num_hidden_layers=8)
    parsed = parse_config(config)
    assert parsed.block == ("linear_attention",) * 3 + ("full_attention",) and parsed.repeats == 2
    uneven = parse_config({**config, "num_hidden_layers": 6})
    assert len(uneven.block) == 6 and uneven.repeats == 1
    halves = parse_config({**config, "full_attention_interval": 2})
    assert halves.block == ("linear_attention", "full_attention")


def test_nested_is_flat_and_the_enclosing_model_decides_on_tying():
    text = family("qwen3_5_text", tie_word_embeddings=False)
    nested = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 2}}
    assert parse_config(nested) == parse_config(text)
    assert parse_config({**nested, "tie_word_embeddings": True}).tie_embeddings
    assert parse_config(
        {**nested, "text_config": {**text, "tie_word_embeddings": True}}
    ).tie_embeddings


def test_configs_are_static_arguments():
    a, b = parse_config(family("qwen3")), parse_config(family("qwen3", extra="entry"))
    assert a == b and hash(a) == hash(b)
    assert a != parse_config(family("qwen3", rms_norm_eps=1e-5))


@pytest.mark.parametrize("name", NAMES)
def test_written_configs_read_as_what_they_were(name):
    config = parse_config(family(name, bos_token_id=7))
    written = json.loads(json.dumps(export_config(config, nested=False, dtype="bfloat16")))
    assert parse_config(written) == config
    assert written["bos_token_id"] == 7
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"
    assert written["architectures"] == [
        {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}.get(name, "Qwen3_5ForCausalLM")
    ]
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 500.0


def test_nested_configs_are_written_nested_or_flat():
    text = family("qwen3_5_text")
    nested = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 2}}
    config = parse_config({**nested, "tie_word_embeddings": True})
    whole = export_config(config, nested=True, dtype="float32")
    assert whole["model_type"] == "qwen3_5" and whole["vision_config"] == {"depth": 2}
    assert whole["text_config"]["rope_parameters"]["mrope_section"] == [1, 1, 0]
    flat = export_config(config, nested=False, dtype="float32")
    assert flat["model_type"] == "qwen3_5_text" and "vision_config" not in flat
    assert parse_config(whole) == parse_config(flat) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "unknown model_type 'llama'; known: qwen2, qwen3, qwen3_5"),
        ({"model_type": None}, "unknown model_type None"),
        ({"model_type": "qwen3_moe"}, "unknown model_type 'qwen3_moe'"),
        ({"model_type": "qwen3_5"}, "expected 'text_config'"),
        ({"hidden_size": None}, "hidden_size to be a positive integer, got None"),
        ({"vocab_size": 0}, "vocab_size to be a positive integer, got 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers to be a positive integer, got True"),
        ({"head_dim": 8.0}, "head_dim to be a positive integer, got 8.0"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads, got 4 and 3"),
        ({"layer_types": ["full_attention"]}, "expected 2 layer_types"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention' is not"),
        ({"layer_types": ["linear_attention"] * 2}, "'linear_attention' is not built for qwen3"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' is not built"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_type 'linear'"),
        ({"partial_rotary_factor": 0.125}, "even number of rotated entries of head_dim 8, got 1"),
        ({"partial_rotary_factor": 1.5}, "even number of rotated entries of head_dim 8, got 12"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not built"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "use_sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantised checkpoints are not read"),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        parse_config(family("qwen3") | changes)


def test_value_heads_must_be_a_multiple_of_key_heads():
    with pytest.raises(ValueError, match="linear_num_key_heads, got 4 and 3"):
        parse_config(family("qwen3_5_text", linear_num_key_heads=3))


def test_a_window_that_no_layer_uses_is_no_window():
    config = family("qwen2", use_sliding_window=True, max_window_layers=2)
    assert parse_config(config) == parse_config(family("qwen2"))
