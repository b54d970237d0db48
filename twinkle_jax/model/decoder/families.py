"""The table of model families: differences from Llama.

A plain decoder is Llama's: RMS norms, rotary positions over whole heads, grouped heads without
biases unless the configuration asks for them, SwiGLU. Nothing else compares a `model_type`: a new
family is a new row here, and a row in the table of the tests.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from twinkle_jax.model.decoder.config import Activation


@dataclass(frozen=True)
class Family:
    """One row: what differs from a plain decoder, and how its configuration says so.

    Attributes:
        architecture: the class of transformers that reads what is exported.
        head_dim: width of a head where the configuration gives none; None: the model's width
            divided by the heads.
        fixed_bias: whether queries, keys and values always have a bias, and the output never; if
            not, `attention_bias` gives one to all four, or to none.
        qk_norm: whether queries and keys are normalised per head.
        output_gate: whether attention has an output gate.
        centred_norms: whether norms are stored as their distance from 1.
        linear_layers: whether layers may be linear, and keys `linear_…` exist.
        window_keys: whether keys for sliding windows exist; no layer may use one.
        window_pattern: of how many layers the last is full and the others slide, where the
            configuration does not list them; None: no layer slides.
        output_norms: whether attention and feed-forward have a norm behind them too.
        scaled_embedding: whether embeddings are multiplied by the root of the model's width.
        activation_key: what the configuration calls the activation.
        activation: the value that it must have.
        rotary_part: part of a head that is rotated where the configuration gives none; None: all of
            it, and the configuration may say nothing else.
        rope_types: values of `rope_type`.
        defaults: values of keys that may be missing, where transformers has others for this family.
        other_keys: keys that no other family has, and the values with which they change nothing.
        enclosing: `model_type` of a configuration that holds this one as its `text_config`.
        carried: prefixes of tensors that belong to the enclosing model, kept as they are.
    """

    architecture: str
    head_dim: int | None = None
    fixed_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    centred_norms: bool = False
    linear_layers: bool = False
    window_keys: bool = False
    window_pattern: int | None = None
    output_norms: bool = False
    scaled_embedding: bool = False
    activation_key: str = "hidden_act"
    activation: Activation = "silu"
    rotary_part: float | None = None
    rope_types: tuple[str, ...] = ("default",)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    other_keys: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    enclosing: str | None = None
    carried: tuple[str, ...] = ()


FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        rope_types=("default", "llama3"),
        other_keys={
            "mlp_bias": (False,),
            "pretraining_tp": (1,),
            "is_llama_config": (True,),  # SmolLM2
            "rope_interleaved": (False,),
        },
    ),
    "mistral": Family(
        "MistralForCausalLM",
        # Where a configuration is silent, all layers slide: so it has to say that none does.
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
        other_keys={"sliding_window": (None,)},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        fixed_bias=True,
        window_keys=True,
        other_keys={"use_mrope": (False,)},
    ),
    "qwen3": Family("Qwen3ForCausalLM", head_dim=128, qk_norm=True, window_keys=True),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        head_dim=256,
        qk_norm=True,
        output_gate=True,
        centred_norms=True,
        linear_layers=True,
        rotary_part=0.25,
        other_keys={
            "attn_output_gate": (True,),
            "output_gate_type": ("swish",),  # Qwen3.6's word for the gate of the linear layers
            "mamba_ssm_dtype": ("float32",),
            "mlp_only_layers": ([],),
        },
        enclosing="qwen3_5",
        carried=("model.visual.", "visual.", "mtp.", "model.mtp."),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        head_dim=256,
        qk_norm=True,
        centred_norms=True,
        window_pattern=6,
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
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (False, None),
            "cache_implementation": ("hybrid",),  # of transformers' generation
        },
        enclosing="gemma3",
        carried=(
            "model.vision_tower.",
            "model.multi_modal_projector.",
            "vision_tower.",
            "multi_modal_projector.",
        ),
    ),
}
ENCLOSING = {family.enclosing: name for name, family in FAMILIES.items() if family.enclosing}
