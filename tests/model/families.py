"""Small configurations of each family, and parameters in which no entry is special."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax.model import (
    DecoderConfig,
    decode_step,
    hidden_states,
    parameter_shapes,
    parse_config,
    prefill,
)

# For every law.
NAMES = (
    "qwen3",
    "gemma2",
    "qwen2",
    "qwen3_5_text",
    "qwen3_next",
    "glm4",
    "qwen3_moe",
    "gemma3_text",
    "gemma4_text",
    "gemma4_text mixture",
    "gemma4_text small",
    "olmo3",
    "smollm3",
    "exaone4",
    "granite",
    "phi3",
    "gpt_oss",
    "ministral3",
    "youtu",
    "glm4_moe",
    "deepseek_v3",
)
ALL = (
    "llama",
    "olmo2",
    "mistral",
    "glm",
    "seed_oss",
    "ernie4_5",
    "olmoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "glm4_moe_lite",
    "solar_open",
    *NAMES,
)  # every row of the table of families, for configurations and checkpoints


def each(cases, default=1, mark=pytest.mark.exhaustive):
    """Run the first cases by default; the others get the mark."""
    others = (pytest.param(case, marks=mark) for case in cases[default:])
    return [*cases[:default], *others]


_BASE = {
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
}
_STRETCHED = {  # Llama 3's wavelengths, so that some stay, some are stretched and some between
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0],
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
}

_SLIDING = {  # layers that do not repeat evenly; windows that rows of seven tokens are longer than
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 3,
    "query_pre_attn_scalar": 12,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    },
    "tie_word_embeddings": True,
}
_CAPPED = {  # bounds that bend most logits
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 3,
    "query_pre_attn_scalar": 12,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 2.5,
    "tie_word_embeddings": True,
}
_GEMMA4 = {  # full layers with heads of their own
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 3,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 2.5,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    },
    "tie_word_embeddings": True,
}
_OLMO3 = {  # windows that rows of seven tokens are longer than
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 3,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    },
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_OWN = {"qwen3_moe": _EXPERTS | {"norm_topk_prob": True}}
_OWN |= {"qwen3_5_moe_text": _LINEAR | _EXPERTS | {"shared_expert_intermediate_size": 28}}
_OWN["qwen3_next"] = _LINEAR | _EXPERTS | {"shared_expert_intermediate_size": 28}
_OWN["qwen2_moe"] = _EXPERTS | {"shared_expert_intermediate_size": 28}
_OWN |= {"qwen3_5_text": _LINEAR, "gemma3_text": _SLIDING, "gemma2": _CAPPED}
# transformers' defaults are beyond the small vocabulary
_NO_ENDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
_OWN |= {"gemma4_text": _GEMMA4}
_OWN["gemma4_text mixture"] = _GEMMA4 | {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
}
_OWN["gemma4_text small"] = _GEMMA4 | {  # E2B's kind: the last two layers reuse keys and values
    "num_hidden_layers": 4,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 48,
}
_OWN |= {"olmo2": _NO_ENDS, "olmo3": _NO_ENDS | _OLMO3, "seed_oss": _NO_ENDS}
_OWN["olmoe"] = _NO_ENDS | {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 16}
_OWN["olmoe"] |= {"hidden_size": 32}  # as many as four heads of 8
_OWN |= {"smollm3": _NO_ENDS | {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 0, 1]}}
_OWN["phi3"] = _NO_ENDS | {  # four of six entries of a head are rotated
    "head_dim": 6,
    "sliding_window": 3,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.7,
        "short_factor": [1.0, 1.5],
        "long_factor": [2.0, 9.0],
    },
    "original_max_position_embeddings": 128,
}
_OWN["glm"] = _NO_ENDS | {  # four of eight entries of a head are rotated
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
}
_OWN["glm4"] = _OWN["glm"]
_OWN["glm4_moe"] = {  # a dense layer before two with experts, of which no weights add up to 1
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "use_qk_norm": True,
    "attention_bias": True,
    "rope_parameters": _OWN["glm"]["rope_parameters"],
}
_OWN["exaone4"] = _NO_ENDS | {  # full layers without rotary positions
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    "sliding_window": 3,
    "rope_parameters": _STRETCHED,
}
_OWN["ernie4_5"] = _NO_ENDS
_OWN["solar_open"] = {
    key: _OWN["glm4_moe"][key]
    for key in (
        *("num_hidden_layers", "n_routed_experts", "num_experts_per_tok"),
        *("moe_intermediate_size", "n_shared_experts", "routed_scaling_factor", "attention_bias"),
    )
}
_OWN["granite"] = {  # not the defaults, nor powers of two, nor what a head's width says
    "embedding_multiplier": 3.3,
    "attention_multiplier": 0.21,
    "residual_multiplier": 0.37,
    "logits_scaling": 0.7,
}
_OWN["gpt_oss"] = {  # a bound that many gates reach
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 3,
    "attention_bias": True,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "swiglu_limit": 1.25,
    "intermediate_size": 16,
}
_OWN |= {"llama": {"rope_parameters": _STRETCHED}, "mistral": {"sliding_window": None}}
_OWN["youtu"] = _NO_ENDS | {  # 14 of the 16 entries of a cached key are of the latent vector
    "num_key_value_heads": 4,
    "head_dim": 4,
    "kv_lora_rank": 14,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
_OWN["ministral3"] = _NO_ENDS | {  # queries grow from the fourth token on
    "rope_parameters": {
        "rope_type": "yarn",
        "type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 3,
        "max_position_embeddings": 256,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.4,
    }
}


_GEMMA4_CARD = {
    "model_type": "gemma4_text",
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 262_144,
}
_GEMMA4_EDGE = _GEMMA4_CARD | {
    "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False,
    "num_attention_heads": 8,
    "sliding_window": 512,
}
REAL_GEMMA4 = {  # as their converter writes them
    "31B": _GEMMA4_CARD
    | {
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "use_bidirectional_attention": "vision",
    },
    "26B-A4B": _GEMMA4_CARD
    | {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "use_bidirectional_attention": "vision",
        "enable_moe_block": True,
        "num_experts": 128,
        "moe_intermediate_size": 704,
        "top_k_experts": 8,
    },
    "E2B": _GEMMA4_EDGE
    | {
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
    },
    "E4B": _GEMMA4_EDGE
    | {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 42,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 18,
    },
}


_GPT_OSS = {  # as the hub has it
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200_002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "max_position_embeddings": 131_072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "output_router_logits": False,
    "pad_token_id": 199_999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150_000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201_088,
}
REAL_GPT_OSS = {
    name: _GPT_OSS
    | {
        "num_hidden_layers": layers,
        "num_local_experts": experts,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
    }
    for name, layers, experts in (("20b", 24, 32), ("120b", 36, 128))
}


_OWN["deepseek_v3"] = _OWN["youtu"] | {  # two of three groups of experts
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 2,
        "beta_slow": 0.05,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    },
}
_OWN["glm4_moe_lite"] = _OWN["youtu"] | {
    "num_hidden_layers": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "routed_scaling_factor": 1.7,
    "rms_norm_eps": 1e-5,
}
_GLM4_MOE = {  # as the hub has it
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151_329, 151_336, 151_338],
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131_072,
    "model_type": "glm4_moe",
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 151_329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.1",
    "use_cache": True,
    "vocab_size": 151_552,
}
REAL_GLM4_MOE = {
    "4.5-Air": _GLM4_MOE
    | {
        "first_k_dense_replace": 1,
        "hidden_size": 4096,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "num_hidden_layers": 46,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
    },
    "4.5": _GLM4_MOE
    | {
        "first_k_dense_replace": 3,
        "hidden_size": 5120,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "num_hidden_layers": 92,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
    },
}


REAL_LATENT = {  # as the hub has them
    "DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18_432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163_840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10_000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 129_280,
    },
    "GLM-4.7-Flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": [154_820, 154_827, 154_829],
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 10_240,
        "kv_lora_rank": 512,
        "max_position_embeddings": 202_752,
        "model_type": "glm4_moe_lite",
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 20,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 47,
        "num_key_value_heads": 20,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 154_820,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 1_000_000,
        "routed_scaling_factor": 1.8,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "transformers_version": "5.0.0rc0",
        "v_head_dim": 256,
        "vocab_size": 154_880,
    },
}


def family(model_type: str, **changes: Any) -> dict[str, Any]:
    """The contents of a `config.json`, in a copy: transformers writes into what it is given.

    A second word names a variant of a family.
    """
    own = {"model_type": model_type.split()[0], **_BASE, **_OWN.get(model_type, {})}
    return copy.deepcopy(own | changes)


@functools.cache
def config_of(model_type: str) -> DecoderConfig:
    return parse_config(family(model_type))


def random_params(config: DecoderConfig, seed: int = 0) -> dict[str, Any]:
    """Draw every entry of every parameter, norms and biases included."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        centre = (
            0.7 if path[-1].key in ("scale", "dt_bias", "layer_scalar", "per_expert_scale") else 0.0
        )
        spread = 0.3 if leaf.ndim > 1 else 0.5
        values = centre + spread * rng.standard_normal(leaf.shape)
        if path[-2].key == "q_norm" and config.attention.multiplier == 1:
            values /= leaf.shape[-1] ** 0.5  # so that attention is as sharp as in other families
        return jnp.asarray(values, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, parameter_shapes(config))


@functools.cache
def params_of(model_type: str) -> dict[str, Any]:
    return random_params(config_of(model_type))


def nudged(params: dict[str, Any], factor: float = 1 + 2**-23) -> dict[str, Any]:
    """Move the embeddings by one rounding: what that changes, no test can hold more exactly."""
    return params | {"embed_tokens": jax.tree.map(lambda x: x * factor, params["embed_tokens"])}


def _compiled(function: Callable[..., Any], *static: str) -> Callable[..., Any]:
    return jax.jit(function, static_argnames=("config", *static))


hidden = _compiled(hidden_states, "compute_dtype", "attention", "remat")
fill = _compiled(prefill, "max_length", "compute_dtype", "attention")
step = _compiled(decode_step, "compute_dtype")


def assert_close(actual: Any, expected: Any, tolerance: float = 2e-5) -> None:
    """Compare with the largest expected entry as the measure."""
    scale = np.max(np.abs(expected), initial=0.0)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale + 1e-30)


def batch(rows: list[list[int]], time: int, side: str, pad: int = 0) -> tuple[jax.Array, jax.Array]:
    """Pad rows on a side; give tokens and mask."""
    tokens, mask = np.full((len(rows), time), pad, np.int32), np.zeros((len(rows), time), bool)
    for i, row in enumerate(rows):
        where = slice(time - len(row), time) if side == "left" else slice(0, len(row))
        tokens[i, where], mask[i, where] = row, True
    return jnp.asarray(tokens), jnp.asarray(mask)
