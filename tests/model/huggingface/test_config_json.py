"""Reading and writing `config.json`: both spellings, nested and flat, and what is refused."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.families import ALL, REAL_GEMMA4, family
from twinkle_jax.model import (
    LinearScaling,
    LongRopeScaling,
    ProportionalScaling,
    Window,
    YarnScaling,
    hidden_states,
    parameter_shapes,
    parse_config,
)
from twinkle_jax.model.decoder.config import FULL, SLIDING, ExpertsConfig
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
    names |= {"gemma2": "Gemma2", "gemma3_text": "Gemma3", "gemma4_text": "Gemma4"}
    names |= {"mistral": "Mistral", "ministral3": "Ministral3"}
    names |= {"olmo2": "Olmo2", "olmo3": "Olmo3", "smollm3": "SmolLM3"}
    names |= {"exaone4": "Exaone4", "ernie4_5": "Ernie4_5", "solar_open": "SolarOpen"}
    names |= {"granite": "Granite", "phi3": "Phi3", "youtu": "Youtu"}
    names |= {"qwen2_moe": "Qwen2Moe", "qwen3_next": "Qwen3Next", "olmoe": "Olmoe"}
    names |= {"seed_oss": "SeedOss", "glm": "Glm", "glm4": "Glm4", "glm4_moe": "Glm4Moe"}
    names |= {"deepseek_v3": "DeepseekV3", "glm4_moe_lite": "Glm4MoeLite"}
    names |= {"gpt_oss": "GptOss", "qwen3_moe": "Qwen3Moe", "qwen3_5_moe_text": "Qwen3_5Moe"}
    assert written["architectures"] == [f"{names[name.split()[0]]}ForCausalLM"]
    rope = written["rope_parameters"]
    assert written["rope_theta"] == rope.get("full_attention", rope)["rope_theta"] == 500.0


def test_nested_configs_are_written_nested_or_flat():
    text = family("qwen3_5_text")
    nested = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 2}}
    config = parse_config({**nested, "tie_word_embeddings": True})
    with_vision = export_config(config, nested=True, dtype="float32")
    assert with_vision["model_type"] == "qwen3_5" and with_vision["vision_config"] == {"depth": 2}
    assert with_vision["text_config"]["rope_parameters"]["mrope_section"] == [1, 1, 0]
    flat = export_config(config, nested=False, dtype="float32")
    assert flat["model_type"] == "qwen3_5_text" and "vision_config" not in flat
    assert parse_config(with_vision) == parse_config(flat) == config


REFUSED = {
    "model_type": ["mamba", None, ["qwen3"], "mixtral"],
    "hidden_size": [None, 2**31],
    "vocab_size": [0],
    "num_hidden_layers": [True, 10**30, 10**5000],
    "num_attention_heads": [[4]],
    "num_key_value_heads": ["2", 3],
    "head_dim": [8.0, None],
    "layer_types": [
        ["full_attention"],
        ["full_attention", "sliding_attention"],
        ["linear_attention"] * 2,
        {"0": "full_attention"},
        2,
        [["full_attention"], None],
    ],
    "rope_parameters": [[1], {"factor": 4.0}, {"full_attention": {}}],
    "rope_scaling": ["yarn"],
    "partial_rotary_factor": [0.5],
    "hidden_act": ["gelu", None],
    "is_causal": [False, None, 1],
    "attention_dropout": [0.1],
    "attention_bias": ["false"],
    "tie_word_embeddings": [1],
    "use_sliding_window": [1],
    "quantization_config": [{"bits": 4}],
    "per_layer_config": [{"0": {"head_dim": 4}}],
    "auto_map": [{"AutoModel": "code.py"}],
    "attn_logit_softcapping": [50.0],
    "num_experts": [8],
    "linear_num_key_heads": [2],
    "mlp_bias": [False],
    "rms_norm_eps": [-1, float("nan"), float("inf"), "1e-6", None, True, [1e-6]],
}
REFUSED_ELSEWHERE = [
    ({"model_type": "qwen3_5"}, "text_config"),
    ({"model_type": "qwen3_5", "text_config": [1]}, "text_config"),
    ({"use_sliding_window": True, "max_window_layers": 1}, "max_window_layers"),
    ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_type"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type"),
]
REFUSED_ELSEWHERE += [
    ({"rope_parameters": {name: value}}, name)
    for name, values in {
        "rope_type": ("longrope", None, "llama3"),
        "rope_theta": (0, -1e4, float("nan"), float("inf"), True, None, "10000", [1e4], 10**400),
    }.items()
    for value in values
]
REFUSED_CASES = [({name: value}, name) for name, values in REFUSED.items() for value in values]


def refused(config, name):
    """One short line that names the key and shows its value."""
    with pytest.raises(ValueError, match=rf"\b{name}\b.*, got ") as caught:
        parse_config(config)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(("changes", "name"), REFUSED_CASES + REFUSED_ELSEWHERE)
def test_what_is_refused(changes, name):
    refused(family("qwen3") | changes, name)


def test_a_config_that_is_no_mapping():
    with pytest.raises(TypeError, match="config"):
        parse_config([])


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
def test_families_without_windows_have_no_keys_for_them(name):
    """Transformers' models of these families do not read them."""
    refused(family(name, use_sliding_window=False), "use_sliding_window")


@pytest.mark.parametrize(
    ("head_dim", "part"), [(8, 0.125), (8, 1.5), (9, 1.0), (8, 0.1), (8, -1), (8, 0)]
)
def test_rotated_entries_come_in_pairs(head_dim, part):
    rope = {"rope_theta": 5.0, "partial_rotary_factor": part}
    config = family("qwen3_5_text", head_dim=head_dim, rope_parameters=rope)
    refused(config, "partial_rotary_factor")


def test_value_heads_must_be_a_multiple_of_key_heads():
    refused(family("qwen3_5_text", linear_num_key_heads=3), "linear_num_key_heads")


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_experts_and_their_two_names(key):
    text = family("qwen3_moe", norm_topk_prob=False)
    text[key] = text.pop("num_experts")
    experts = parse_config(text).experts
    assert (experts.number, experts.chosen, experts.width) == (6, 2, 16)
    assert not experts.normalised and experts.shared_width is None
    hybrid = {key: x for key, x in family("qwen3_5_moe_text").items() if key != "intermediate_size"}
    experts = parse_config({"model_type": "qwen3_5_moe", "text_config": hybrid}).experts
    assert experts.normalised and experts.shared_width == 28


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_experts": 1}, "num_experts"),
        ({"num_local_experts": 5}, "num_local_experts"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"output_router_logits": True}, "output_router_logits"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
        # transformers' model of this family has no layers that its window spares.
        ({"use_sliding_window": True, "max_window_layers": 99}, "use_sliding_window"),
        ({"use_sliding_window": True, "layer_types": ["full_attention"] * 2}, "use_sliding_window"),
    ],
)
def test_experts_that_are_refused(changes, name):
    refused(family("qwen3_moe", **changes), name)


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


def test_windows_of_mistral():
    config = family("mistral")
    assert parse_config(config).layer_kinds == (FULL, FULL)
    narrow = parse_config(config | {"sliding_window": 16})
    assert narrow.layer_kinds == (SLIDING, SLIDING) and narrow.attention.window == Window(16)
    written = export_config(narrow, nested=False, dtype="float32")
    assert written["sliding_window"] == 16 and "layer_types" not in written
    del config["sliding_window"]  # 4096 then, as in transformers: the longest rows are 256
    assert parse_config(config).layer_kinds == (FULL, FULL)
    del config["max_position_embeddings"]  # 131,072 then
    assert parse_config(config).attention.window == Window(4096)


def test_linear_scaling_of_llama():
    """DeepSeek-Coder has it."""
    config = family("llama", rope_parameters=None, rope_theta=1e5)
    config |= {"rope_scaling": {"type": "linear", "factor": 4.0}}
    assert parse_config(config).attention.rope_scaling == LinearScaling(4.0)
    written = export_config(parse_config(config), nested=False, dtype="float32")
    assert parse_config(written) == parse_config(config)


def test_keys_of_qwen3_coder():
    """They change nothing in transformers."""
    keys = {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}
    config = parse_config(family("qwen3_moe", **keys))
    assert config == parse_config(family("qwen3_moe")) and config.experts.shared_width is None
    for name, value in keys.items():
        refused(family("qwen3_moe", **{name: not value}), name)
        refused(family("qwen3", **{name: value}), name)


def test_llama_3_and_smollm_2():
    scaling = parse_config(family("llama")).attention.rope_scaling
    assert (scaling.factor, scaling.high_frequency, scaling.original_length) == (8, 4, 64)
    rope = dict(family("llama")["rope_parameters"])
    del rope["original_max_position_embeddings"]  # that of the model then, as in transformers
    config = parse_config(family("llama", rope_parameters=rope, max_position_embeddings=256))
    assert config.attention.rope_scaling == dataclasses.replace(scaling, original_length=256)
    small = family("llama", rope_parameters=None, rope_theta=1e5, rope_scaling=None)
    small |= {"is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 1}
    parsed = parse_config({**small, "mlp_bias": False, "transformers.js_config": {"a": 1}})
    assert parsed.attention.rope_scaling is None and not parsed.attention.bias
    assert parse_config({**small, "attention_bias": True}).attention.output_bias
    rope = dict(family("llama")["rope_parameters"])
    changes = {"factor": 0, "high_freq_factor": 1.0, "original_max_position_embeddings": 0.5}
    for name, value in changes.items():
        refused(family("llama", rope_parameters=rope | {name: value}), name)
    del rope["low_freq_factor"]
    refused(family("llama", rope_parameters=rope), "low_freq_factor")
    for name, value in {"mlp_bias": True, "rope_interleaved": True, "pretraining_tp": 2}.items():
        refused(family("llama", **{name: value}), name)


_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
_USUAL = 1.138629436111989  # 0.1 ln 4 + 1


def yarn(**changes):
    """A Qwen3 as its model card says for long contexts, but for some keys."""
    scaling = {key: x for key, x in (_YARN | changes).items() if x != "missing"}
    return family("qwen3", rope_scaling=scaling, max_position_embeddings=40_960)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, YarnScaling(4.0, 32_768, _USUAL)),
        ({"factor": None}, YarnScaling(1.25, 32_768, 1.022314355131421)),  # 0.1 ln 1.25 + 1
        (  # the length of the model, and the factor as it is
            {"original_max_position_embeddings": "missing"},
            YarnScaling(4.0, 40_960, _USUAL),
        ),
        ({"factor": 0.5}, YarnScaling(0.5, 32_768, 1.0)),
        ({"attention_factor": 0.5, "mscale": 2, "mscale_all_dim": 1}, YarnScaling(4, 32_768, 0.5)),
        (  # (0.2 ln 4 + 1) / (0.05 ln 4 + 1)
            {"mscale": 2, "mscale_all_dim": 0.5},
            YarnScaling(4.0, 32_768, 1.1944648761087142),
        ),
        ({"mscale": 2, "mscale_all_dim": 0}, YarnScaling(4.0, 32_768, _USUAL)),
        ({"attention_factor": None, "beta_fast": None}, YarnScaling(4.0, 32_768, _USUAL)),
        (
            {"beta_fast": 8, "beta_slow": 2, "truncate": False},
            YarnScaling(4.0, 32_768, _USUAL, 8.0, 2.0, truncate=False),
        ),
        # DeepSeek-R1-0528-Qwen3-8B: the inverse of what it multiplies
        ({"attn_factor": 0.8782488562869419}, YarnScaling(4.0, 32_768, 1.0)),
    ],
)
def test_yarn(changes, expected):
    config = parse_config(yarn(**changes))
    scaling = config.attention.rope_scaling
    assert scaling.attention_factor == pytest.approx(expected.attention_factor, rel=1e-15)
    assert dataclasses.replace(scaling, attention_factor=expected.attention_factor) == expected
    assert parse_config(export_config(config, nested=False, dtype="float32")) == config


def test_what_is_written_of_yarn_is_the_same_for_transformers_and_vllm():
    """transformers reads `attention_factor`; vLLM multiplies 0.1 ln 4 + 1 by `attn_factor`."""

    def written(**changes):
        config = parse_config(yarn(**changes))
        return export_config(config, nested=False, dtype="float32")["rope_parameters"]

    assert "attn_factor" not in written() and written()["attention_factor"] == _USUAL
    for changes in ({"attention_factor": 1.0}, {"mscale": 1, "mscale_all_dim": 1}):
        rope = written(**changes)
        assert rope["attention_factor"] == 1 and rope["attn_factor"] == 1 / _USUAL


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("factor", "missing"),
        ("factor", 0),
        ("original_max_position_embeddings", 0.5),
        ("attention_factor", "1"),
        ("attn_factor", 0),
        ("mscale", "2"),
        ("beta_fast", 0.5),
        ("beta_slow", 33),
        ("truncate", None),
        ("rope_theta", 1.0),
        ("low_freq_factor", 1.0),
    ],
)
def test_what_is_refused_of_yarn(name, value):
    refused(yarn(**{"mscale_all_dim": 1, name: value}), name)


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
    refused({**nested, "quantization_config": {"bits": 4}}, "quantization_config")


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


def test_what_gemma_3_is():
    config = parse_config(family("gemma3_text"))
    assert config.centred_norms and config.output_norms and config.embedding_multiplier == 24**0.5
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
def test_any_pattern_of_gemma_3_is_a_loop_over_one_layer(layers):
    config = parse_config(family("gemma3_text", layer_types=None, num_hidden_layers=layers))
    assert config.block == (FULL,) and config.repeats == layers
    assert config.layer_kinds[:6] == (SLIDING,) * 5 + (FULL,)
    assert config.sliding.shape == (layers,) and config.sliding.sum() == layers - layers // 6


def test_a_gemma_3_as_the_hub_has_it():
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


def test_real_gemma2_configurations_are_read():
    """Gemma 2 9B as it is on the hub: two keys have no effect; embeddings are tied by default."""
    written = {
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 3584,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 16,
        "num_hidden_layers": 42,
        "num_key_value_heads": 8,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "sliding_window_size": 4096,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": 256000,
    }
    config = parse_config(written)
    assert config.layer_kinds == (SLIDING, FULL) * 21 and config.block == (FULL,)
    assert config.attention.window == Window(4096) and config.attention.scale == 1 / 16
    assert (config.attention.soft_cap, config.logits_soft_cap) == (50, 30)
    assert config.tie_embeddings and config.centred_norms and not config.attention.qk_norm
    again = export_config(config, nested=False, dtype="float32")
    assert parse_config(again) == config
    made = dataclasses.replace(config, original="", logits_soft_cap=20.0)  # not read from a file
    assert parse_config(export_config(made, nested=False, dtype="float32")) == made
    uncapped = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    config = parse_config(again | uncapped)
    assert config.attention.soft_cap is config.logits_soft_cap is None
    refused({**written, "final_logit_softcapping": 0}, "final_logit_softcapping")


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
    full_attention = parse_config(family("gemma3_text", layer_types=[FULL] * 3))
    assert full_attention.attention.window is None
    written = export_config(full_attention, nested=False, dtype="float32")
    assert list(written["rope_parameters"]) == [FULL] and parse_config(written) == full_attention


GEMMA_REFUSED = [
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ({"hidden_activation": "gelu"}, "hidden_activation"),
    ({"hidden_act": "silu"}, "hidden_act"),
    ({"sliding_window": None}, "sliding_window"),
    ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ({"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern"),
    ({"layer_types": ["linear_attention"] * 3}, "layer_types"),
    ({"rope_parameters": {"rope_theta": 1.0}}, "rope_parameters"),
    ({"rope_parameters": {SLIDING: {"rope_type": "linear"}}}, "rope_type"),
    ({"rope_parameters": {FULL: {"rope_type": "linear"}}}, "factor"),
    ({"rope_parameters": {FULL: {"rope_type": "llama3"}}}, "rope_type"),
    ({"rope_parameters": {FULL: {"rope_type": "yarn", "factor": 8.0}}}, "rope_type"),
    ({"rope_parameters": {FULL: {"factor": 8.0}}}, "factor"),
]


@pytest.mark.parametrize(("changes", "name"), GEMMA_REFUSED)
def test_what_gemma_3_refuses(changes, name):
    refused(family("gemma3_text") | changes, name)


def test_what_gemma_4_is():
    config = parse_config(family("gemma4_text"))
    assert config.float32_norms and not config.centred_norms and config.output_norms
    assert config.layer_scalars and config.embedding_multiplier == 24**0.5
    assert config.logits_soft_cap == 2.5 and config.attention.soft_cap is None
    sliding, full = config.attention, config.full_attention
    assert config.block == (SLIDING, FULL) and config.repeats == 2
    assert (config.attention_of(SLIDING), config.attention_of(FULL)) == (sliding, full)
    for heads in (sliding, full):
        assert heads.qk_norm and heads.value_norm and heads.scale == 1 and heads.query_heads == 4
        assert heads.rotary_dim == heads.head_dim
    assert (sliding.head_dim, sliding.key_value_heads, sliding.window) == (16, 4, Window(3))
    assert (full.head_dim, full.key_value_heads, full.window) == (32, 2, None)
    assert config.key_value_heads == 2
    assert (sliding.rope_theta, sliding.rope_scaling) == (20.0, None)
    assert (full.rope_theta, full.rope_scaling) == (500.0, ProportionalScaling(0.25))
    shapes = parameter_shapes(config)["layers"]
    assert "v_proj" in shapes["0"]["self_attn"] and "v_proj" not in shapes["1"]["self_attn"]
    assert shapes["1"]["self_attn"]["o_proj"]["kernel"].shape == (2, 4 * 32, 24)
    assert shapes["0"]["layer_scalar"].shape == (2, 1)


def test_experts_of_gemma_4_lie_beside_its_dense_layers():
    config = parse_config(family("gemma4_text mixture"))
    assert config.intermediate_size == 40
    assert config.experts == ExpertsConfig(6, 2, 16, normalised=True, beside_dense=True)
    off = family("gemma4_text mixture") | {"enable_moe_block": False}
    assert parse_config(off) == parse_config(family("gemma4_text"))
    layer = parameter_shapes(config)["layers"]["0"]
    assert layer["router"]["scale"].shape == (2, 24)
    assert layer["mlp"]["up_proj"]["kernel"].shape == (2, 24, 40)


def test_heads_of_gemma_4s_full_layers_in_both_spellings():
    expected = parse_config(family("gemma4_text"))
    by_layer = family("gemma4_text", global_head_dim=99, num_global_key_value_heads=None)
    heads = {"head_dim": 32, "num_key_value_heads": 2}
    for layers in (("1", "3"), ("01", "03"), (1, 3)):
        by_layer["per_layer_config"] = dict.fromkeys(layers, heads)
        assert parse_config(by_layer) == expected
    # With the heads of sliding layers, unless others are named.
    none = parse_config(family("gemma4_text", num_global_key_value_heads=None))
    assert none.full_attention.key_value_heads == 4
    unshared = parse_config(family("gemma4_text", attention_k_eq_v=False))
    assert unshared.full_attention.key_value_heads == 4  # as in transformers
    same = parse_config(by_layer | {"per_layer_config": {}})
    assert same.full_attention.head_dim == 16 and same.block == (SLIDING, FULL)


def test_layers_of_gemma_4_by_default():
    changes = {"layer_types": None, "rope_parameters": None, "num_hidden_layers": 8}
    config = parse_config(family("gemma4_text", **changes))
    assert config.layer_kinds == (SLIDING,) * 5 + (FULL, SLIDING, FULL)
    assert config.attention.rope_theta == 1e4 and config.full_attention.rope_theta == 1e6
    assert parse_config(family("gemma4_text", **changes | {"num_hidden_layers": 12})).repeats == 2
    alone = parse_config(family("gemma4_text", layer_types=[FULL] * 4))
    assert alone.full_attention is None and alone.block == (FULL,)
    assert alone.attention == parse_config(family("gemma4_text")).full_attention
    for decoder in (config, alone):
        written = export_config(decoder, nested=False, dtype="float32")
        assert "rope_scaling" not in written and parse_config(written) == decoder


def test_a_nested_gemma_4():
    text = family("gemma4_text")
    nested = {"model_type": "gemma4", "text_config": text, "vision_config": {"depth": 2}}
    config = parse_config(nested)
    assert config == parse_config(text)
    written = export_config(config, nested=True, dtype="float32")
    assert written["vision_config"] == {"depth": 2} and parse_config(written) == config


@pytest.mark.parametrize(("name", "billions"), [("31B", 30.7), ("26B-A4B", 25.2)])
def test_real_models_of_gemma_4_have_the_parameters_that_their_names_say(name, billions):
    config = parse_config(REAL_GEMMA4[name])
    assert config.block == (SLIDING,) * 5 + (FULL,) and config.logits_soft_cap == 30
    heads = config.full_attention
    assert (heads.head_dim, heads.rope_theta) == (512, 1e6) and heads.shared_values
    assert config.attention.window == Window(1024)
    shapes = jax.tree.leaves(parameter_shapes(config))
    assert round(sum(x.size for x in shapes) / 1e9, 1) == billions


_LAYER_HEADS = {"head_dim": 32, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"hidden_size_per_layer_input": -8}, "hidden_size_per_layer_input"),
        (
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 47},
            "vocab_size_per_layer_input",
        ),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 2, "use_double_wide_mlp": 1}, "use_double_wide_mlp"),
        ({"enable_moe_block": 1}, "enable_moe_block"),
        ({"enable_moe_block": True, "num_experts": None}, "num_experts"),
        ({"enable_moe_block": True, "num_experts": 4}, "top_k_experts"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5}, "top_k_experts"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
            "moe_intermediate_size",
        ),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"global_head_dim": 0}, "global_head_dim"),
        ({"num_global_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_global_key_value_heads": "2"}, "num_global_key_value_heads"),
        ({"attention_k_eq_v": 1}, "attention_k_eq_v"),
        ({"layer_types": [SLIDING] * 4}, "layer_types"),
        ({"sliding_window_pattern": 6}, "sliding_window_pattern"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "rope_scaling"),
        ({"rope_parameters": {FULL: {"rope_type": "linear", "factor": 8.0}}}, "rope_type"),
        (
            {"rope_parameters": {FULL: {"rope_type": "proportional", "factor": 8.0}}},
            "factor",
        ),
        (
            {"rope_parameters": {FULL: {"rope_type": "proportional", "partial_rotary_factor": 2}}},
            "partial_rotary_factor",
        ),
        ({"rope_parameters": {SLIDING: {"rope_type": "proportional"}}}, "rope_type"),
        ({"rope_parameters": {FULL: {"partial_rotary_factor": 0.25}}}, "partial_rotary_factor"),
        ({"per_layer_config": {"1": _LAYER_HEADS}}, "per_layer_config"),
        ({"per_layer_config": {"1": _LAYER_HEADS, "3": {"head_dim": 16}}}, "per_layer_config"),
        ({"per_layer_config": dict.fromkeys("0123", _LAYER_HEADS)}, "per_layer_config"),
        ({"per_layer_config": {key: {"sliding_window": 2} for key in "13"}}, "per_layer_config"),
        ({"per_layer_config": dict.fromkeys("13", 5)}, "per_layer_config"),
        ({"per_layer_config": [1]}, "per_layer_config"),
    ],
)
def test_what_gemma_4_refuses(changes, name):
    refused(family("gemma4_text") | changes, name)
    refused({"model_type": "gemma4", "text_config": family("gemma4_text") | changes}, name)


def test_gemma_4s_have_inputs_for_each_layer_by_default():
    config = family("gemma4_text", vocab_size=262_144)
    del config["hidden_size_per_layer_input"]
    assert parse_config(config).token_width == 256
    refused(config | {"vocab_size": 48}, "vocab_size_per_layer_input")


def test_layers_of_gemma_4_that_reuse_keys_and_values():
    changes = {"num_hidden_layers": 10, "layer_types": [SLIDING, FULL] * 5}
    config = parse_config(family("gemma4_text small", **changes, num_kv_shared_layers=6))
    own, reusing = config.stacks
    assert own.members == (("0", SLIDING), ("1", FULL)) and own.repeats == 2
    assert reusing.members == (("2", SLIDING), ("3", FULL)) and reusing.repeats == 3
    assert (own.layers, reusing.layers) == (slice(0, 4), slice(4, 10))
    assert (config.source_of(SLIDING), config.source_of(FULL)) == ("0", "1")
    shapes = parameter_shapes(config)
    assert shapes["embed_tokens_per_layer"]["embedding"].shape == (48, 10 * 12)
    layers = shapes["layers"]
    assert layers["0"]["mlp"]["up_proj"]["kernel"].shape == (2, 24, 40)
    assert layers["2"]["mlp"]["up_proj"]["kernel"].shape == (3, 24, 80)
    assert {"k_proj", "v_proj", "k_norm"} & layers["2"]["self_attn"].keys() == set()
    assert layers["3"]["per_layer_input_gate"]["kernel"].shape == (3, 24, 12)
    narrow = parse_config(family("gemma4_text small", use_double_wide_mlp=False))
    assert narrow.reusing_intermediate_size is None


def test_phi_3_as_its_authors_write_it():
    """Phi-4-mini: its window is wider than its longest rows, and the code is transformers' own."""
    code = {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        "AutoTokenizer": "Xenova/gpt-4o",
    }
    scaling = {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1, 2, 4.5]}
    keys = {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": scaling, "auto_map": code}
    keys |= {"partial_rotary_factor": 0.75, "head_dim": 8, "full_attn_mod": 1, "embd_pdrop": 0.0}
    keys |= {"original_max_position_embeddings": 64, "sliding_window": 512}
    config = parse_config(family("phi3", **keys))
    assert config.layer_kinds == (FULL, FULL) and config.attention.window is None
    assert config.attention.rope_scaling == LongRopeScaling((1, 1, 1), (1, 2, 4.5), 64, 256)
    assert config.attention.longest_row == 64 and config.attention.rotary_dim == 6
    np.testing.assert_allclose(
        config.attention.rope_scaling.attention_factor, (1 + 2 / 6) ** 0.5
    )  # of a length of 2⁸ where 2⁶ was the original one
    written = export_config(config, nested=False, dtype="float32")
    assert parse_config(written) == config and written["sliding_window"] == 512
    assert "auto_map" not in written and written["rope_scaling"] == scaling
    assert written["rope_parameters"]["original_max_position_embeddings"] == 64
    same = {"type": "su", "short_factor": [2.0] * 3, "long_factor": [2.0] * 3}
    assert (
        parse_config(family("phi3", **keys | {"rope_scaling": same})).attention.longest_row is None
    )
    narrow = parse_config(family("phi3", **keys | {"sliding_window": 255}))
    assert narrow.layer_kinds == (SLIDING, SLIDING) and narrow.attention.window == Window(255)


PHI_SCALING = family("phi3")["rope_parameters"]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"rope_parameters": PHI_SCALING | {"short_factor": [1.0]}}, "short_factor"),
        ({"rope_parameters": PHI_SCALING | {"long_factor": [1.0] * 3}}, "long_factor"),
        ({"rope_parameters": PHI_SCALING | {"long_factor": [1.0, 0.0]}}, "long_factor"),
        ({"rope_parameters": PHI_SCALING | {"long_factor": 2.0}}, "long_factor"),
        ({"rope_parameters": PHI_SCALING | {"long_factor": None}}, "long_factor"),
        ({"original_max_position_embeddings": 1}, "original_max_position_embeddings"),
        # vLLM ignores these two, and transformers ignores the third.
        ({"rope_parameters": PHI_SCALING | {"factor": 4.0}}, "rope_parameters"),
        ({"rope_parameters": PHI_SCALING | {"attention_factor": 1.1}}, "rope_parameters"),
        ({"rope_parameters": PHI_SCALING | {"short_mscale": 1.1}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
        ({"rope_parameters": PHI_SCALING | {"mrope_section": [1]}}, "rope_parameters"),
        ({"layer_types": [FULL, FULL]}, "layer_types"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"resid_pdrop": 0.1}, "resid_pdrop"),
        ({"auto_map": {"AutoModelForCausalLM": "mine.Phi3ForCausalLM"}}, "auto_map"),
    ],
)
def test_what_phi_3_refuses(changes, name):
    refused(family("phi3") | changes, name)


def test_multipliers_of_granite():
    config = parse_config(family("granite", attention_multiplier=0.0078125, residual_multiplier=1))
    assert config.attention.scale == 0.0078125 and config.residual_multiplier == 1.0
    names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier")
    for name in (*names, "logits_scaling"):
        for value in (0.0, None, "1"):
            refused(family("granite") | {name: value}, name)
        refused(family("llama") | {name: 1.0}, name)
    refused(family("granite") | {"mlp_bias": True}, "mlp_bias")
    pretraining = parse_config(family("granite", attention_dropout=0.1))
    assert pretraining == parse_config(family("granite"))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"no_rope_layers": [1, 0, 0]}, "no_rope_layers"),
        ({"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers"),
        ({"no_rope_layers": [True, False, True, True]}, "no_rope_layers"),
        ({"no_rope_layers": "1001"}, "no_rope_layers"),
        ({"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": [FULL, SLIDING, FULL, FULL]}, "layer_types"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_what_smollm3_refuses(changes, name):
    refused(family("smollm3") | changes, name)


def test_layers_of_smollm3_without_rotary_positions():
    """As in SmolLM3-3B's config.json, keys for windows that no layer has included."""
    keys = {"max_window_layers": 28, "sliding_window": None, "use_sliding_window": False}
    keys |= {"layer_types": [FULL] * 6, "num_hidden_layers": 6, "pretraining_tp": 2}
    config = parse_config(family("smollm3", no_rope_layers=[1, 1, 1, 0] * 9, **keys))
    assert config.unrotated_layers == (3,) and config.block == (FULL,)
    assert config.second_rotary.tolist() == [False] * 3 + [True] + [False] * 2
    by_interval = family("smollm3", no_rope_layers=None, no_rope_layer_interval=4, **keys)
    assert parse_config(by_interval) == config
    others = dataclasses.replace(config, unrotated_layers=(0, 4))
    assert parse_config(export_config(others, nested=False, dtype="float32")) == others


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"sliding_window": None}, "layer_types"),
        ({"layer_types": [FULL] * 4}, "sliding_window"),
        ({"layer_types": None, "sliding_window_pattern": "LLLG"}, "sliding_window_pattern"),
        ({"layer_types": None, "sliding_window_pattern": 1}, "sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_what_exaone4_refuses(changes, name):
    refused(family("exaone4") | changes, name)


def test_layers_of_exaone4_without_rotary_positions():
    """Full layers beside sliding ones, as in the 32B; the 1.2B has no windows, and rotates all."""
    config = parse_config(family("exaone4", layer_types=None, num_hidden_layers=6))
    assert config.layer_kinds == (SLIDING, SLIDING, SLIDING, FULL, SLIDING, SLIDING)
    assert config.unrotated_layers == (3,)
    assert config.second_rotary.tolist() == [False] * 3 + [True] + [False] * 2
    whole = {"sliding_window": None, "sliding_window_pattern": None}
    for kinds in (None, [FULL] * 4):
        config = parse_config(family("exaone4", layer_types=kinds, **whole))
        assert config.unrotated_layers == () and set(config.layer_kinds) == {FULL}
        unnamed = dataclasses.replace(config, original="")  # where no key says how layers slide
        assert parse_config(export_config(unnamed, nested=False, dtype="float32")) == unnamed


def test_what_ernie_and_solar_refuse():
    refused(family("ernie4_5") | {"use_bias": True}, "use_bias")
    refused(family("solar_open") | {"first_k_dense_replace": 1}, "first_k_dense_replace")
    refused(family("solar_open") | {"use_qk_norm": True}, "use_qk_norm")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"query_pre_attn_scalar": 12}, "query_pre_attn_scalar"),
        ({"rope_local_base_freq": 20.0}, "rope_local_base_freq"),
        ({"sliding_window_pattern": 4}, "sliding_window_pattern"),
        ({"sliding_window": None}, "sliding_window"),
        ({"no_rope_layers": [1, 1, 0]}, "no_rope_layers"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters"),
    ],
)
def test_what_olmo_3_refuses(changes, name):
    refused(family("olmo3") | changes, name)


def test_rotary_settings_of_olmo_3():
    """Written by transformers 4: the scaling is that of full layers, the base that of all."""
    layers = {"layer_types": None, "num_hidden_layers": 8, "rope_parameters": None}
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    config = parse_config(family("olmo3", rope_theta=7e5, rope_scaling=scaling, **layers))
    assert config.layer_kinds == ((SLIDING,) * 3 + (FULL,)) * 2
    assert config.attention.rope_theta == config.attention.window.rope_theta == 7e5
    assert config.attention.rope_scaling.factor == 8.0
    assert config.attention.scale == 1 / 8**0.5
    assert parse_config(export_config(config, nested=False, dtype="float32")) == config


def test_sliding_layers_need_a_window():
    config = parse_config(family("gemma3_text"))
    heads = dataclasses.replace(config.attention, window=None)
    config = dataclasses.replace(config, attention=heads)
    params, tokens = parameter_shapes(config), jax.ShapeDtypeStruct((1, 4), jnp.int32)
    with pytest.raises(ValueError, match="window"):
        jax.eval_shape(partial(hidden_states, config=config), params, tokens=tokens)


def test_queries_grow_in_ministral_alone():
    """transformers ignores the key in other families."""
    rope = family("ministral3")["rope_parameters"]
    assert parse_config(family("ministral3")).attention.rope_scaling.query_growth == 0.4
    own = ("llama_4_scaling_beta", "max_position_embeddings")
    without = {name: x for name, x in rope.items() if name not in own}
    steady = parse_config(family("ministral3", rope_parameters=without))
    assert steady.attention.rope_scaling.query_growth == 0.0
    for key in own:
        refused(family("qwen3", rope_parameters={**without, key: 1.0}), key)


def test_keys_that_are_missing_have_transformers_defaults():
    """Its own files always have these keys; those of authors need not."""
    assert parse_config(family("qwen3_next")).experts.normalised
    assert not parse_config(family("qwen2_moe")).experts.normalised
    for name in ("seed_oss", "glm", "glm4"):
        attention = parse_config(family(name)).attention
        assert attention.bias and not attention.output_bias
    for name, heads in (("qwen3_moe", 4), ("qwen3_5_text", 4), ("qwen3_5_moe_text", 2)):
        config = family(name, num_attention_heads=8)
        del config["num_key_value_heads"]
        assert parse_config(config).attention.key_value_heads == heads
