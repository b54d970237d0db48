"""Reading and writing `config.json`: both spellings, nested and flat, and what is refused."""

import json

import pytest

from tests.model.families import ALL, family
from twinkle_jax.model import parse_config
from twinkle_jax.model.huggingface.config_json import export_config


def test_what_each_family_is():
    names = ("qwen2", "qwen3", "qwen3_5_text")
    qwen2, qwen3, qwen3_5 = (parse_config(family(name)) for name in names)
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
        config = family(name)
        del config["head_dim"]
        assert parse_config(config).attention.head_dim == width


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
    a, b = parse_config(family("qwen3")), parse_config(family("qwen3", transformers_version="5"))
    assert a == b and hash(a) == hash(b)
    assert a != parse_config(family("qwen3", rms_norm_eps=1e-5))


@pytest.mark.parametrize("name", ALL)
def test_written_configs_read_as_what_they_were(name):
    config = parse_config(family(name, bos_token_id=7))
    written = json.loads(json.dumps(export_config(config, nested=False, dtype="bfloat16")))
    assert parse_config(written) == config
    assert written["bos_token_id"] == 7
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"
    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_5_text": "Qwen3_5"}
    names |= {"gemma3_text": "Gemma3", "mistral": "Mistral"}
    assert written["architectures"] == [f"{names[name]}ForCausalLM"]
    rope = written["rope_parameters"]
    assert written["rope_theta"] == rope.get("full_attention", rope)["rope_theta"] == 500.0


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


REFUSED = [
    ({"model_type": "mamba"}, "model_type must be one of gemma3, .*llama, .*, got 'mamba'"),
    ({"model_type": None}, "model_type must be .*, got None"),
    ({"model_type": ["qwen3"]}, r"model_type must be .*, got \['qwen3'\]"),
    ({"model_type": "qwen3_moe"}, "model_type must be .*, got 'qwen3_moe'"),
    ({"model_type": "qwen3_5"}, "text_config must be there where model_type is 'qwen3_5'"),
    ({"model_type": "qwen3_5", "text_config": [1]}, "text_config must be a JSON object, got"),
    ({"hidden_size": None}, "hidden_size must be a positive integer .*, got None"),
    ({"vocab_size": 0}, "vocab_size must be a positive integer .*, got 0"),
    ({"num_hidden_layers": True}, "num_hidden_layers must be a positive integer .*, got True"),
    ({"num_hidden_layers": 10**30}, "num_hidden_layers must be .* at most 4096, got 1000000"),
    ({"num_hidden_layers": 10**5000}, "num_hidden_layers must be .*, got an integer of 16610 bits"),
    ({"hidden_size": 2**31}, "hidden_size must be a positive integer of at most 2147483647, got"),
    ({"num_attention_heads": [4]}, r"num_attention_heads must be .*, got \[4\]"),
    ({"num_key_value_heads": "2"}, "num_key_value_heads must be a positive integer .*, got '2'"),
    ({"head_dim": 8.0}, "head_dim must be a positive integer .*, got 8.0"),
    ({"head_dim": None}, "head_dim must be a positive integer .*, got None"),
    ({"num_key_value_heads": 3}, "multiple of num_key_value_heads, got 4 and 3"),
    ({"layer_types": ["full_attention"]}, "layer_types must be a list of 2"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must be .*'sliding"),
    ({"layer_types": ["linear_attention"] * 2}, "layer_types must be .*, got .'linear_attention"),
    ({"layer_types": {"0": "full_attention"}}, "layer_types must be a list of 2"),
    ({"layer_types": 2}, "layer_types must be a list of 2 .*, got 2"),
    ({"layer_types": [["full_attention"], None]}, "layer_types must be a list of 2"),
    ({"rope_parameters": [1]}, r"rope_parameters must be a JSON object, got \[1\]"),
    ({"rope_scaling": "yarn"}, "rope_scaling must be a JSON object, got 'yarn'"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be 'default', got 'yarn'"),
    ({"rope_parameters": {"rope_type": None}}, "rope_type must be 'default', got None"),
    ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type must be 'default', got 'llama3'"),
    ({"rope_parameters": {"factor": 4.0}}, "rope_parameters must have no key 'factor'"),
    ({"rope_parameters": {"full_attention": {}}}, "must have no key 'full_attention'"),
    ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_type must be 'default'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type must be 'default', got"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0 or 1 or None, got 0.5"),
    ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
    ({"hidden_act": None}, "hidden_act must be 'silu', got None"),
    ({"is_causal": False}, "is_causal must be True, got False"),
    ({"is_causal": None}, "is_causal must be True, got None"),
    ({"is_causal": 1}, "is_causal must be True, got 1"),
    ({"attention_dropout": 0.1}, "attention_dropout must be .*, got 0.1"),
    ({"attention_bias": "false"}, "attention_bias must be true or false, got 'false'"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
    ({"use_sliding_window": True, "max_window_layers": 1}, "max_window_layers must be at least"),
    ({"use_sliding_window": 1}, "use_sliding_window must be true or false, got 1"),
    ({"quantization_config": {"bits": 4}}, "quantization_config must be None, got {'bits': 4}"),
    ({"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config must be None"),
    ({"auto_map": {"AutoModel": "code.py"}}, "auto_map must be None, got"),
    ({"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' must be a key that .* qwen3 has"),
    ({"num_experts": 8}, "'num_experts' must be a key that a configuration of qwen3 has"),
    ({"linear_num_key_heads": 2}, "'linear_num_key_heads' must be a key"),
    ({"mlp_bias": False}, "'mlp_bias' must be a key that a configuration of qwen3 has"),
]
REFUSED += [
    (
        {"rope_parameters": {"rope_theta": value}},
        "rope_theta must be a finite number, positive, got",
    )
    for value in (0, -1e4, float("nan"), float("inf"), True, None, "10000", [1e4], 10**400)
]
REFUSED += [
    ({"rms_norm_eps": value}, "rms_norm_eps must be a finite number, at least 0, got")
    for value in (-1, float("nan"), float("inf"), "1e-6", None, True, [1e-6])
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        parse_config(family("qwen3") | changes)


def test_a_config_that_is_no_mapping():
    with pytest.raises(TypeError, match="config must be a mapping, got list"):
        parse_config([])


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
def test_families_without_windows_have_no_keys_for_them(name):
    """Transformers' models of these families do not read them."""
    with pytest.raises(ValueError, match="'use_sliding_window' must be a key that"):
        parse_config(family(name, use_sliding_window=False))


@pytest.mark.parametrize(("head_dim", "part"), [(8, 0.125), (8, 1.5), (9, 1.0), (8, 0.1)])
def test_rotated_entries_come_in_pairs(head_dim, part):
    rope = {"rope_theta": 5.0, "partial_rotary_factor": part}
    with pytest.raises(ValueError, match=f"must be even, .*, got {head_dim} times {part}"):
        parse_config(family("qwen3_5_text", head_dim=head_dim, rope_parameters=rope))
    with pytest.raises(ValueError, match="partial_rotary_factor must be a finite number, positive"):
        parse_config(family("qwen3_5_text", rope_parameters=rope | {"partial_rotary_factor": -1}))


def test_value_heads_must_be_a_multiple_of_key_heads():
    with pytest.raises(ValueError, match="linear_num_key_heads, got 4 and 3"):
        parse_config(family("qwen3_5_text", linear_num_key_heads=3))


def test_a_window_that_no_layer_uses_is_no_window():
    config = family("qwen2", use_sliding_window=True, max_window_layers=2)
    assert parse_config(config) == parse_config(family("qwen2"))
    none = family("qwen2", use_sliding_window=True, sliding_window=None, max_window_layers=0)
    assert parse_config(none) == parse_config(family("qwen2"))


def test_rope_scaling_wins_over_rope_parameters():
    """As in transformers; what it lacks stands beside it, not in the other."""
    config = family("qwen3", rope_scaling={"rope_type": "default", "rope_theta": 7.0})
    assert parse_config(config).attention.rope_theta == 7
    config = family("qwen3", rope_scaling={"type": "default"})
    assert parse_config(config).attention.rope_theta == 10_000
    assert parse_config({**config, "rope_theta": 9.0}).attention.rope_theta == 9
    assert parse_config({**config, "rope_scaling": {}}).attention.rope_theta == 500
    text = family("qwen3_5_text", rope_scaling={"type": "default", "rope_theta": 7.0})
    parsed = parse_config({"model_type": "qwen3_5", "text_config": text})
    assert (parsed.attention.rope_theta, parsed.attention.rotary_dim) == (7, 2)


def test_mistral_must_say_that_no_layer_slides():
    config = family("mistral")
    assert parse_config(config).layer_kinds == ("full_attention",) * 2
    for window in (16, 4096):
        with pytest.raises(ValueError, match="sliding_window must be None, got "):
            parse_config(config | {"sliding_window": window})
    del config["sliding_window"]
    with pytest.raises(ValueError, match="sliding_window must be None, got 4096"):
        parse_config(config)


def test_llama_3_and_smollm_2():
    scaling = parse_config(family("llama")).attention.rope_scaling
    assert (scaling.factor, scaling.high_frequency, scaling.original_length) == (8, 4, 64)
    small = family("llama", rope_parameters=None, rope_theta=1e5, rope_scaling=None)
    small |= {"is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 1}
    parsed = parse_config({**small, "mlp_bias": False, "transformers.js_config": {"a": 1}})
    assert parsed.attention.rope_scaling is None and not parsed.attention.bias
    assert parse_config({**small, "attention_bias": True}).attention.output_bias
    rope = dict(family("llama")["rope_parameters"])
    for changes, message in (
        ({"factor": 0}, "factor must be a finite number, positive, got 0"),
        ({"high_freq_factor": 1.0}, "high_freq_factor must be above low_freq_factor, 1.0, got 1.0"),
        ({"original_max_position_embeddings": 0.5}, "original_max_position_embeddings must be"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_config(family("llama", rope_parameters=rope | changes))
    del rope["low_freq_factor"]
    with pytest.raises(ValueError, match="low_freq_factor must be there"):
        parse_config(family("llama", rope_parameters=rope))
    for changes in ({"mlp_bias": True}, {"rope_interleaved": True}, {"pretraining_tp": 2}):
        with pytest.raises(ValueError, match=f"{next(iter(changes))} must be"):
            parse_config(family("llama", **changes))


def test_configurations_as_the_hub_has_them():
    """Every key of Qwen2.5-0.5B, and of the text model of Qwen3.6, small."""
    qwen2 = family("qwen2", attention_dropout=0.0, hidden_act="silu", initializer_range=0.02)
    qwen2 |= {"architectures": ["Qwen2ForCausalLM"], "bos_token_id": 1, "eos_token_id": 2}
    qwen2 |= {"max_window_layers": 24, "sliding_window": 32768, "use_sliding_window": False}
    qwen2 |= {"torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True}
    assert parse_config({**qwen2, "use_mrope": False}) == parse_config(family("qwen2"))
    text = family("qwen3_5_text", attention_bias=False, attention_dropout=0.0, dtype="bfloat16")
    text |= {"attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32"}
    text |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "use_cache": True}
    text |= {"mlp_only_layers": [], "full_attention_interval": 2, "pad_token_id": None}
    text["rope_parameters"] = text["rope_parameters"] | {"mrope_interleaved": True}
    outer = {"image_token_id": 9, "language_model_only": False, "vision_config": {"depth": 1}}
    nested = {"model_type": "qwen3_5", "text_config": text, **outer}
    assert parse_config(nested) == parse_config(family("qwen3_5_text"))


def test_a_quantised_enclosing_model():
    nested = {"model_type": "qwen3_5", "text_config": family("qwen3_5_text")}
    with pytest.raises(ValueError, match="quantization_config must be None"):
        parse_config({**nested, "quantization_config": {"bits": 4}})


def test_written_rope_entries_are_those_that_were_read():
    """A leftover `rope_scaling` would win over what is written."""
    config = parse_config(family("qwen3", rope_scaling={"type": "default", "rope_theta": 7.0}))
    written = export_config(config, nested=False, dtype="float32")
    assert written["rope_scaling"] is None and parse_config(written) == config
    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": 7.0}
    written = export_config(parse_config(family("llama")), nested=False, dtype="float32")
    assert (
        written["rope_scaling"] == written["rope_parameters"] == family("llama")["rope_parameters"]
    )
