"""Configurations of mixtures of experts: GPT-OSS, GLM-4.5, and those with latent attention."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.families import REAL_GLM4_MOE, REAL_GPT_OSS, REAL_LATENT, family
from tests.model.huggingface.test_config_json import refused
from twinkle_jax.model import Window, YarnScaling, parameter_shapes, parse_config, prefill
from twinkle_jax.model.decoder.config import FULL
from twinkle_jax.model.huggingface.config_json import export_config


@pytest.mark.parametrize(("name", "millions"), [("20b", 20_915), ("120b", 116_829)])
def test_real_models_of_gpt_oss(name, millions):
    config = parse_config(REAL_GPT_OSS[name])
    assert config.block == (FULL,) and config.sliding.sum() == config.layers / 2
    heads, experts = config.attention, config.experts
    assert heads.sinks and heads.bias and heads.output_bias and heads.window == Window(128)
    yarn = YarnScaling(32.0, 4096, 0.1 * np.log(32) + 1, truncate=False)
    assert (heads.rope_theta, heads.rope_scaling, heads.scale) == (150_000, yarn, 1 / 8)
    assert (experts.chosen, experts.width, experts.swiglu_limit) == (4, 2880, 7.0)
    assert experts.normalised and config.float32_norms and not config.tie_embeddings
    shapes = jax.tree.leaves(parameter_shapes(config))
    assert round(sum(x.size for x in shapes) / 1e6) == millions
    written = export_config(config, nested=False, dtype="bfloat16")
    assert "quantization_config" not in written and parse_config(written) == config
    left_out = ("rope_scaling", "rope_theta", "layer_types", "head_dim", "attention_bias")
    left_out += ("sliding_window", "swiglu_limit", "rms_norm_eps", "num_key_value_heads")
    few = {key: x for key, x in REAL_GPT_OSS[name].items() if key not in left_out}
    assert parse_config(few) == parse_config(few | {"rope_parameters": None}) == config


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ({"swiglu_limit": 0}, "swiglu_limit"),
        ({"swiglu_limit": None}, "swiglu_limit"),
        ({"num_local_experts": None}, "num_local_experts"),
        ({"num_experts": 7}, "num_local_experts"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ({"experts_per_token": 2}, "experts_per_token"),
        ({"sliding_window": None}, "sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"output_router_logits": True}, "output_router_logits"),
        ({"norm_topk_prob": True}, "norm_topk_prob"),
        ({"moe_intermediate_size": 8}, "moe_intermediate_size"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method"),
        ({"quantization_config": "mxfp4"}, "quantization_config"),
    ],
)
def test_what_gpt_oss_refuses(changes, name):
    refused(family("gpt_oss") | changes, name)


@pytest.mark.parametrize(
    ("name", "billions", "dense", "scaling"), [("4.5-Air", 106.9, 1, 1.0), ("4.5", 352.8, 3, 2.5)]
)
def test_real_models_of_glm_4_5(name, billions, dense, scaling):
    config = parse_config(REAL_GLM4_MOE[name])
    first, rest = config.stacks
    assert (first.members, first.repeats, first.experts) == ((("0", FULL),), dense, None)
    assert (rest.members, rest.repeats) == ((("1", FULL),), config.layers - dense)
    assert rest.experts == config.experts and config.block == (FULL, FULL)
    heads, experts = config.attention, config.experts
    assert heads.bias and not heads.output_bias and heads.qk_norm is (dense == 3)
    assert (heads.rotary_dim, heads.rope_theta, heads.interleaved) == (64, 1e6, False)
    assert experts.corrected and experts.normalised and experts.scaling == scaling
    assert (experts.chosen, experts.shared_width) == (8, experts.width)
    shapes = jax.tree.leaves(parameter_shapes(config))
    assert round(sum(x.size for x in shapes) / 1e9, 1) == billions
    written = export_config(config, nested=False, dtype="bfloat16")
    assert parse_config(written) == config and written["num_nextn_predict_layers"] == 1
    alone = dataclasses.replace(config, original="")
    assert parse_config(export_config(alone, nested=False, dtype="bfloat16")) == config


@pytest.mark.parametrize(
    ("name", "billions", "heads", "scale"),
    [("DeepSeek-V3", 671.0, 128, 192**-0.5 * 1.3689**2), ("GLM-4.7-Flash", 29.9, 20, 1 / 16)],
)
def test_real_models_with_latent_attention(name, billions, heads, scale):
    config = parse_config(REAL_LATENT[name])
    attention = config.attention
    assert attention.query_heads == attention.key_value_heads == heads
    assert (attention.latent.width, attention.rotary_dim, attention.interleaved) == (512, 64, True)
    assert attention.scale == pytest.approx(scale, rel=1e-4)
    shapes = jax.tree.leaves(parameter_shapes(config))
    assert round(sum(x.size for x in shapes) / 1e9, 1) == billions
    cache = jax.eval_shape(
        lambda params: prefill(params, config, jnp.zeros((1, 8), jnp.int32), max_length=8)[1],
        parameter_shapes(config, "bfloat16"),
    )
    held = sum(x.size for x in jax.tree.leaves(cache.layers))
    assert held == 8 * config.layers * (512 + 64 + 512)
    written = export_config(config, nested=False, dtype="bfloat16")
    assert parse_config(written) == config and written["num_nextn_predict_layers"] == 1
    assert written.get("mlp_layer_types", ["dense"]).count("dense") == 1
    alone = dataclasses.replace(config, original="")
    assert parse_config(export_config(alone, nested=False, dtype="bfloat16")) == config


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"q_lora_rank": "8"}, "q_lora_rank"),
        ({"v_head_dim": -1}, "v_head_dim"),
        ({"qk_nope_head_dim": 0}, "qk_nope_head_dim"),
        ({"qk_rope_head_dim": 5, "head_dim": 5}, "qk_rope_head_dim"),
        ({"qk_head_dim": 11}, "qk_head_dim"),
        ({"head_dim": 10}, "head_dim"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"rope_interleave": 1}, "rope_interleave"),
        ({"n_group": 6}, "n_group"),  # one expert each
        ({"n_group": 4}, "n_group"),
        ({"topk_group": 4}, "topk_group"),
        ({"topk_group": 1}, "num_experts_per_tok"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"mlp_layer_types": ["dense", "sparse", "sparse"]}, "mlp_layer_types"),
    ],
)
def test_what_deepseek_v3_refuses(changes, name):
    refused(family("deepseek_v3") | changes, name)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("youtu", {"rope_interleave": False, "q_lora_rank": None}),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "dense", "sparse"]}),
        ("glm4_moe_lite", {"mlp_layer_types": None, "first_k_dense_replace": 2}),
        ("deepseek_v3", {"n_group": 2, "topk_group": 2, "first_k_dense_replace": 0}),
    ],
)
def test_what_is_written_of_latent_attention_reads_as_it_was(name, changes):
    config = parse_config(family(name, **changes))
    alone = dataclasses.replace(config, original="")
    written = export_config(alone, nested=False, dtype="bfloat16")
    assert parse_config(written) == config
    dense = {key: changes[key] for key in ("mlp_layer_types",) if changes.get(key)}
    assert dense.items() <= written.items()
    if name == "deepseek_v3":  # vLLM computes the attention factor from these two
        rope = dict(written["rope_scaling"])
        del rope["attention_factor"]
        assert (rope["mscale"], rope["mscale_all_dim"]) == pytest.approx((0.7, 0.9))
        again = parse_config(written | {"rope_scaling": rope}).attention
        assert again.scale == pytest.approx(config.attention.scale)
        expected = config.attention.rope_scaling.attention_factor
        assert again.rope_scaling.attention_factor == pytest.approx(expected)


def test_listed_layers_are_before_the_number_of_dense_ones():
    """As in transformers, which has the list alone."""
    listed = {"mlp_layer_types": ["dense", "dense", "sparse"], "first_k_dense_replace": 1}
    assert parse_config(family("glm4_moe_lite", **listed)).dense_layers == 2


@pytest.mark.parametrize(
    "listed", [["dense"], ["sparse", "dense", "sparse"], ["dense", "sparse", 1], 3, [[], [], []]]
)
def test_layers_that_are_listed_must_begin_with_the_dense_ones(listed):
    refused(family("glm4_moe_lite") | {"mlp_layer_types": listed}, "mlp_layer_types")


def test_dense_layers_before_those_with_experts():
    for dense, repeats in ((0, [3]), (2, [2, 1]), (3, [3]), (9, [3])):
        config = parse_config(family("glm4_moe", first_k_dense_replace=dense))
        assert [stack.repeats for stack in config.stacks] == repeats
        assert [stack.experts is None for stack in config.stacks] == {
            0: [False],
            2: [True, False],
        }.get(dense, [True])
        assert config.repeats == repeats[-1]
    slides = config_with_sliding_dense_layers()
    assert [stack.arranged(slides.sliding).tolist() for stack in slides.stacks] == [
        [[True], [False]],
        [[True]],
    ]
    assert [slides.stack_of(member) for member in ("0", "1")] == list(slides.stacks)


def config_with_sliding_dense_layers():
    experts = parse_config(family("glm4_moe")).experts
    config = parse_config(family("gemma3_text"))
    return dataclasses.replace(config, experts=experts, dense_layers=2)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"n_group": 4}, "n_group"),
        ({"topk_group": 2}, "topk_group"),
        ({"n_shared_experts": 0}, "n_shared_experts"),
        ({"n_routed_experts": 1}, "n_routed_experts"),
        ({"num_experts": 6}, "num_experts"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ({"first_k_dense_replace": True}, "first_k_dense_replace"),
        ({"first_k_dense_replace": False}, "first_k_dense_replace must be an integer from 0"),
        ({"first_k_dense_replace": None}, "first_k_dense_replace"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
        ({"use_qk_norm": 1}, "use_qk_norm"),
        ({"output_router_logits": True}, "output_router_logits"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_what_glm_4_5_refuses(changes, name):
    refused(family("glm4_moe") | changes, name)
