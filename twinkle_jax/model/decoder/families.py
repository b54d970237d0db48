"""The model families, as differences from Llama: one row each in `FAMILIES`.

Llama has RMS norms, rotary positions over whole heads, grouped heads, biases only where the
configuration asks for them, and SwiGLU. No other code compares a `model_type`: a new family is a
row here, and one in the table of the tests.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from twinkle_jax.model.decoder.config import FULL, SLIDING, Activation

# Projections that some families store in one tensor, side by side, with one adapter for all.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


@dataclass(frozen=True)
class Family:
    """How a family differs from Llama, and which keys its `config.json` has.

    Attributes:
        architecture: transformers' class, written into exported configurations.
        head_dim: default width of a head; None: the model's width divided by the number of heads.
        fixed_bias: whether queries, keys and values always have a bias; otherwise `attention_bias`
            says it.
        output_bias: whether the output projection has one if they do.
        qk_norm: whether queries and keys are normalised; None: `use_qk_norm` says it.
        joint_qk_norm: whether that norm is over all heads together.
        output_gate: whether attention has an output gate.
        value_norm: whether values are normalised.
        attention_multiplier: attention logits are multiplied by it; None: as keys of the
            configuration or the width of a head say.
        global_heads: whether full layers have heads of their own, by `global_head_dim`,
            `num_global_key_value_heads` and `attention_k_eq_v`. Sliding layers then do not share
            their parameters, and the last layer must be full.
        layer_scalars: whether each layer's output is multiplied by a number of its own.
        centred_norms: whether norms are stored as their distance from 1.
        float32_norms: whether norms multiply by their weight in float32.
        linear_layers: whether layers may be linear; their keys are `linear_…`.
        linear_by_key_head: whether their projections are stored by key head.
        experts: whether feed-forward layers consist of experts.
        expert_width: key of the width of an expert.
        normalised: whether the weights of the chosen experts always add up to 1; otherwise
            `norm_topk_prob` says it.
        shared_expert: whether all tokens go through one more expert.
        added_experts: whether experts are added to dense feed-forward layers where
            `enable_moe_block` is true.
        clamped_experts: whether feed-forward layers consist of experts with `swiglu_limit`, which
            checkpoints may store in MXFP4.
        corrected_experts: whether feed-forward layers, but for the first `first_k_dense_replace`,
            consist of experts that are chosen by scores with corrections, and a shared one.
        expert_layers: a key that also says, layer by layer, which of them are dense.
        sinks: whether attention has sinks.
        latent: whether attention is latent; its keys are `kv_lora_rank` and those of the widths.
        window_keys: whether there are keys for sliding windows, which no layer may use.
        window_pattern: default pattern: of so many layers the last is full and the others slide;
            None: no layer slides.
        sliding_keys: keys that say how they slide, where there is a pattern.
        rope_by_kind: whether sliding and full layers have rotary settings of their own, where there
            is a pattern.
        soft_caps: keys that bound the logits of attention, or of tokens.
        uniform_window: whether all layers slide, by `sliding_window`, unless it is null.
        fused: names of tensors that hold several projections, of those in `FUSED`.
        unrotated_interval: default interval of layers without rotary positions; None: all have
            them.
        unrotated_full: whether full layers beside sliding ones have no rotary positions. No layer
            slides where `sliding_window` is null.
        input_norms: whether the inputs of attention and feed-forward are normalised.
        output_norms: whether their outputs are.
        norm_names: names of these norms in checkpoints, where they are not Gemma's.
        scaled_embedding: whether embeddings are multiplied by the square root of the model's width.
        multipliers: whether keys say what embeddings, attention logits, outputs of half a layer
            and logits are multiplied or divided by; each is 1 by default.
        activation_key: key of the activation.
        activation: the value that it must have.
        rotary_part: default fraction of a head that is rotated; None: the whole head, and no other
            value is supported.
        interleaved: whether rotated pairs are neighbours.
        rope_types: supported values of `rope_type`.
        query_growth: whether YaRN may have `llama_4_scaling_beta`.
        defaults: values of missing keys, where transformers' defaults differ for this family.
        other_keys: keys that no other family has, and the values with which they change nothing.
        enclosing: `model_type` of a configuration that holds this one as its `text_config`.
        carried: prefixes of tensors of the enclosing model, or for further tokens, which are copied
            unchanged; `{layers}` stands for the number of layers.
    """

    architecture: str
    head_dim: int | None = None
    fixed_bias: bool = False
    output_bias: bool = True
    qk_norm: bool | None = False
    joint_qk_norm: bool = False
    output_gate: bool = False
    value_norm: bool = False
    attention_multiplier: float | None = None
    global_heads: bool = False
    layer_scalars: bool = False
    centred_norms: bool = False
    float32_norms: bool = False
    linear_layers: bool = False
    linear_by_key_head: bool = False
    experts: bool = False
    expert_width: str = "moe_intermediate_size"
    normalised: bool = False
    shared_expert: bool = False
    added_experts: bool = False
    clamped_experts: bool = False
    corrected_experts: bool = False
    expert_layers: str | None = None
    sinks: bool = False
    latent: bool = False
    window_keys: bool = False
    window_pattern: int | None = None
    sliding_keys: tuple[str, ...] = ("sliding_window",)
    rope_by_kind: bool = True
    soft_caps: tuple[str, ...] = ()
    uniform_window: bool = False
    fused: tuple[str, ...] = ()
    unrotated_interval: int | None = None
    unrotated_full: bool = False
    input_norms: bool = True
    output_norms: bool = False
    norm_names: Mapping[str, str] = field(default_factory=dict)
    scaled_embedding: bool = False
    multipliers: bool = False
    activation_key: str = "hidden_act"
    activation: Activation = "silu"
    rotary_part: float | None = None
    interleaved: bool = False
    rope_types: tuple[str, ...] = ("default", "yarn")
    query_growth: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    other_keys: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    enclosing: str | None = None
    carried: tuple[str, ...] = ()


_EXPERTS_EVERYWHERE: dict[str, tuple[Any, ...]] = {  # in all layers, and no loss for their balance
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    "output_router_logits": (False,),
}
_OLMO2 = Family(
    "Olmo2ForCausalLM",
    qk_norm=True,
    joint_qk_norm=True,
    float32_norms=True,
    input_norms=False,
    output_norms=True,
    defaults={
        "vocab_size": 50_304,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-5,
    },
)
_QWEN3_5 = Family(
    "Qwen3_5ForCausalLM",
    head_dim=256,
    qk_norm=True,
    output_gate=True,
    centred_norms=True,
    linear_layers=True,
    rotary_part=0.25,
    defaults={"num_key_value_heads": 4},
    other_keys={
        "attn_output_gate": (True,),
        "output_gate_type": ("swish",),  # Qwen3.6's name for the gate of the linear layers
        "mamba_ssm_dtype": ("float32",),
        "mlp_only_layers": ([],),
    },
    enclosing="qwen3_5",
    carried=("model.visual.", "visual.", "mtp.", "model.mtp."),
)
_GLM = Family(
    "GlmForCausalLM",
    head_dim=128,
    output_bias=False,
    fused=("gate_up_proj",),
    rotary_part=0.5,
    interleaved=True,
    defaults={
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "intermediate_size": 13_696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
    },
)
_PHI3_CODE = {
    "AutoConfig": "configuration_phi3.Phi3Config",
    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
}
_LATENT_MIXTURE = {
    "n_shared_experts": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "norm_topk_prob": True,
}
_LATENT_MIXTURE_KEYS: dict[str, tuple[Any, ...]] = {
    "output_router_logits": (False,),
    "topk_method": ("noaux_tc",),
    "scoring_func": ("sigmoid",),
    "moe_layer_freq": (1,),
    "pretraining_tp": (1,),
}
_DEEPSEEK_CODE = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModel": "modeling_deepseek.DeepseekV3Model",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}
_TOWER = (  # of images, beside a text model
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "vision_tower.",
    "multi_modal_projector.",
)
_GEMMA_KEYS: dict[str, tuple[Any, ...]] = {
    "use_bidirectional_attention": (False, None),
    "cache_implementation": ("hybrid",),  # of transformers' generation
}
_GEMMA3 = Family(
    "Gemma3ForCausalLM",
    head_dim=256,
    qk_norm=True,
    centred_norms=True,
    window_pattern=6,
    sliding_keys=(
        "sliding_window",
        "sliding_window_pattern",
        "query_pre_attn_scalar",
        "rope_local_base_freq",
    ),
    output_norms=True,
    scaled_embedding=True,
    activation_key="hidden_activation",
    activation="gelu_pytorch_tanh",
    rope_types=("default", "linear"),
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    other_keys={
        **_GEMMA_KEYS,
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
    },
    enclosing="gemma3",
    carried=_TOWER,
)
FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        rope_types=("default", "llama3", "yarn", "linear"),
        other_keys={
            "mlp_bias": (False,),
            "pretraining_tp": (1,),
            "is_llama_config": (True,),  # SmolLM2
            "rope_interleaved": (False,),
        },
    ),
    "granite": Family(
        "GraniteForCausalLM",
        multipliers=True,
        defaults={
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
        # Dropout of the pretraining, 0.1 in some checkpoints: there is none here.
        other_keys={"mlp_bias": (False,), "attention_dropout": (0.0, 0, 0.1, None)},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        unrotated_interval=4,
        defaults={
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 11_008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
        other_keys={"mlp_bias": (False,), "use_sliding_window": (False,)},
    ),
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2,
        architecture="Olmo3ForCausalLM",
        window_pattern=4,
        defaults={**_OLMO2.defaults, "rope_theta": 5e5},
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        qk_norm=True,
        window_pattern=4,
        sliding_keys=("sliding_window", "sliding_window_pattern"),
        rope_by_kind=False,
        unrotated_full=True,
        input_norms=False,
        output_norms=True,
        rope_types=("default", "llama3", "yarn"),
        defaults={
            "vocab_size": 102_400,
            "hidden_size": 4096,
            "intermediate_size": 16_384,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
        },
        other_keys={"attention_bias": (False,)},
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        head_dim=128,
        interleaved=True,
        defaults={
            "vocab_size": 103_424,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 18,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
        },
        other_keys={"use_bias": (False,), "attention_bias": (False,)},
    ),
    "glm": _GLM,
    "glm4": replace(
        _GLM,
        architecture="Glm4ForCausalLM",
        output_norms=True,
        norm_names={
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
    ),
    "youtu": Family(
        "YoutuForCausalLM",
        latent=True,
        defaults={
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "qk_nope_head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        output_bias=False,
        qk_norm=None,
        corrected_experts=True,
        rotary_part=0.5,
        defaults={
            "vocab_size": 151_552,
            "hidden_size": 4096,
            "intermediate_size": 10_944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131_072,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        other_keys={"output_router_logits": (False,)},
        carried=("model.layers.{layers}.",),
    ),
    "solar_open": Family(
        "SolarOpenForCausalLM",
        head_dim=128,
        output_bias=False,
        corrected_experts=True,
        defaults={
            "vocab_size": 196_608,
            "hidden_size": 4096,
            "intermediate_size": 10_240,  # of dense layers, of which there are none
            "num_hidden_layers": 48,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "moe_intermediate_size": 1280,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 0,
            "norm_topk_prob": True,
        },
        other_keys={
            "first_k_dense_replace": (0,),
            "use_qk_norm": (False,),
            "output_router_logits": (False,),
        },
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM",
        latent=True,
        corrected_experts=True,
        expert_layers="mlp_layer_types",
        defaults={
            **_LATENT_MIXTURE,
            "vocab_size": 154_880,
            "hidden_size": 2048,
            "intermediate_size": 10_240,
            "num_hidden_layers": 47,
            "num_attention_heads": 20,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 768,
            "v_head_dim": 256,
            "qk_nope_head_dim": 192,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.8,
        },
        other_keys=_LATENT_MIXTURE_KEYS,
        carried=("model.layers.{layers}.",),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        latent=True,
        corrected_experts=True,
        defaults={
            **_LATENT_MIXTURE,
            "vocab_size": 129_280,
            "hidden_size": 7168,
            "intermediate_size": 18_432,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "q_lora_rank": 1536,
            "v_head_dim": 128,
            "qk_nope_head_dim": 128,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
        },
        other_keys=_LATENT_MIXTURE_KEYS | {"auto_map": (None, _DEEPSEEK_CODE)},
        carried=("model.layers.{layers}.",),
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        qk_norm=True,
        joint_qk_norm=True,
        experts=True,
        expert_width="intermediate_size",
        defaults={
            "vocab_size": 50_304,
            "hidden_size": 2048,
            "intermediate_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        other_keys={"clip_qkv": (None,), "output_router_logits": (False,)},
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        head_dim=128,
        output_bias=False,
        defaults={"num_key_value_heads": 8, "attention_bias": True},
        other_keys={
            "attention_out_bias": (False,),
            "mlp_bias": (False,),
            "pretraining_tp": (1,),
            # Dropout of the pretraining: there is none here.
            "attention_dropout": (0.1, 0.0, 0, None),
            "residual_dropout": (0.1, 0.0, 0, None),
        },
    ),
    "mistral": Family(
        "MistralForCausalLM",
        uniform_window=True,
        defaults={
            "sliding_window": 4096,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
        },
        enclosing="mistral3",
        carried=_TOWER,
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        uniform_window=True,
        head_dim=128,
        query_growth=True,
        defaults={
            "vocab_size": 131_072,
            "intermediate_size": 14_336,
            "num_hidden_layers": 34,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        carried=_TOWER,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        uniform_window=True,
        fused=("qkv_proj", "gate_up_proj"),
        rotary_part=1.0,
        rope_types=("default", "longrope", "su"),  # the last is an older name of the second
        defaults={
            "vocab_size": 32_064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
        other_keys={
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "lm_head_bias": (False,),
            "embd_pdrop": (0.0, 0),
            "resid_pdrop": (0.0, 0),
            "full_attn_mod": (1,),
            "interpolate_factor": (1,),
            # The authors' copies of transformers' classes, which need not be run.
            "auto_map": (None, _PHI3_CODE, {**_PHI3_CODE, "AutoTokenizer": "Xenova/gpt-4o"}),
        },
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        fixed_bias=True,
        output_bias=False,
        window_keys=True,
        other_keys={"use_mrope": (False,)},
    ),
    "qwen3": Family("Qwen3ForCausalLM", head_dim=128, qk_norm=True, window_keys=True),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        qk_norm=True,
        experts=True,
        window_keys=True,
        defaults={"num_key_value_heads": 4},
        # With it all layers of transformers' model slide, whatever the other keys say.
        other_keys={
            **_EXPERTS_EVERYWHERE,
            "use_sliding_window": (False,),
            # Of Qwen3-Coder, without effect in transformers.
            "qkv_bias": (False,),
            "use_qk_norm": (True,),
            "shared_expert_intermediate_size": (0,),
        },
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        fixed_bias=True,
        output_bias=False,
        experts=True,
        shared_expert=True,
        window_keys=True,
        defaults={"num_key_value_heads": 16},
        other_keys={
            **_EXPERTS_EVERYWHERE,
            "use_sliding_window": (False,),
            "qkv_bias": (True,),
        },
    ),
    "qwen3_next": replace(
        _QWEN3_5,
        architecture="Qwen3NextForCausalLM",
        linear_by_key_head=True,
        experts=True,
        shared_expert=True,
        defaults={"norm_topk_prob": True, "num_key_value_heads": 2},
        other_keys={**_EXPERTS_EVERYWHERE, "use_sliding_window": (False,)},
        enclosing=None,
        carried=("mtp.",),
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": replace(
        _QWEN3_5,
        architecture="Qwen3_5MoeForCausalLM",
        experts=True,
        normalised=True,
        shared_expert=True,
        defaults={"num_key_value_heads": 2},
        other_keys={**_QWEN3_5.other_keys, **_EXPERTS_EVERYWHERE},
        enclosing="qwen3_5_moe",
    ),
    "gemma2": replace(
        _GEMMA3,
        architecture="Gemma2ForCausalLM",
        qk_norm=False,
        window_pattern=2,
        sliding_keys=("sliding_window", "query_pre_attn_scalar"),
        rope_by_kind=False,
        soft_caps=("attn_logit_softcapping", "final_logit_softcapping"),
        rope_types=("default",),
        defaults={
            **_GEMMA3.defaults,
            "vocab_size": 256_000,
            "rope_theta": 1e4,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        other_keys={
            **_GEMMA_KEYS,
            "hidden_act": ("gelu_pytorch_tanh",),  # without effect beside `hidden_activation`
            "sliding_window_size": (4096,),  # without effect beside `sliding_window`
        },
        enclosing=None,
        carried=(),
    ),
    "gemma3_text": _GEMMA3,
    "gemma4_text": Family(
        "Gemma4ForCausalLM",
        head_dim=256,
        qk_norm=True,
        value_norm=True,
        attention_multiplier=1.0,
        global_heads=True,
        layer_scalars=True,
        soft_caps=("final_logit_softcapping",),
        added_experts=True,
        normalised=True,
        float32_norms=True,
        window_pattern=6,
        output_norms=True,
        scaled_embedding=True,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        rope_types=("default", "proportional"),
        defaults={
            "vocab_size": 262_144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "global_head_dim": 512,
            "sliding_window": 512,
            "tie_word_embeddings": True,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262_144,
            "rope_parameters": {
                FULL: {
                    "rope_type": "proportional",
                    "rope_theta": 1e6,
                    "partial_rotary_factor": 0.25,
                },
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        other_keys={
            "use_bidirectional_attention": (None, "vision", False),  # of the tokens of an image
            "rope_scaling": (None,),
        },
        enclosing="gemma4",
        carried=tuple(
            f"{prefix}{name}."
            for prefix in ("model.", "")
            for name in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
        ),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        head_dim=64,
        sinks=True,
        clamped_experts=True,
        expert_width="intermediate_size",
        normalised=True,
        float32_norms=True,
        window_pattern=2,
        rope_by_kind=False,
        defaults={
            "vocab_size": 201_088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
            "attention_bias": True,
            "sliding_window": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        other_keys={
            "swiglu_alpha": (1.702,),
            "output_router_logits": (False,),
            # The authors' names, without effect in transformers.
            "experts_per_token": (4,),
            "initial_context_length": (4096,),
        },
    ),
}
ENCLOSING = {family.enclosing: name for name, family in FAMILIES.items() if family.enclosing}
