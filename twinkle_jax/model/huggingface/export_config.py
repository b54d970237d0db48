"""From a DecoderConfig back to the contents of a Hugging Face `config.json`."""

import json
from typing import Any

from twinkle_jax.model.decoder.config import FULL, SLIDING, DecoderConfig
from twinkle_jax.model.decoder.families import FAMILIES
from twinkle_jax.model.huggingface.rope_config import SILENT, rope_entries


def export_config(config: DecoderConfig, *, nested: bool, dtype: str) -> dict[str, Any]:
    """Write the contents of `config.json`: what was read, updated with what the decoder has.

    Args:
        config: the decoder.
        nested: whether to keep the enclosing vision-language configuration, if there was one.
        dtype: name of the type of the saved parameters.

    Returns:
        A JSON object that transformers 4 and 5 read.
    """
    original: dict[str, Any] = json.loads(config.original) if config.original else {}
    text = dict(original.get("text_config", original))
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    silent = {key: rope[key] for key in sorted(SILENT & rope.keys())}
    text.update(_text_entries(config, silent), dtype=dtype, torch_dtype=dtype)
    if not (nested and "text_config" in original):
        return text | {"architectures": [FAMILIES[config.model_type].architecture]}
    return original | {
        "text_config": text,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _text_entries(config: DecoderConfig, rope: dict[str, Any]) -> dict[str, Any]:
    """Hugging Face's names for everything that the decoder computes with."""
    attention, delta = config.attention, config.delta_net
    family = FAMILIES[config.model_type]
    rope = rope | rope_entries(attention)
    entries: dict[str, Any] = {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": attention.query_heads,
        "num_key_value_heads": attention.key_value_heads,
        "head_dim": attention.head_dim,
        family.activation_key: config.activation,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tie_embeddings,
        "layer_types": list(config.layer_kinds),
        "rope_theta": attention.rope_theta,
        "rope_parameters": rope,
        # transformers 4 reads this one, and 5 too, where there is something in it
        "rope_scaling": None if attention.rope_scaling is None else rope,
    }
    if not family.fixed_bias:
        entries["attention_bias"] = attention.bias
    if family.rotary_part is not None:
        partial = attention.rotary_dim / attention.head_dim
        rope["partial_rotary_factor"] = entries["partial_rotary_factor"] = partial
    if family.window_pattern:
        entries |= _sliding_entries(config, rope)
    if delta is not None:
        entries |= {
            "linear_num_key_heads": delta.key_heads,
            "linear_num_value_heads": delta.value_heads,
            "linear_key_head_dim": delta.key_dim,
            "linear_value_head_dim": delta.value_dim,
            "linear_conv_kernel_dim": delta.kernel,
        }
    return entries


def _sliding_entries(config: DecoderConfig, rope: dict[str, Any]) -> dict[str, Any]:
    """What a family with sliding layers says differently: its rotary parts, by kind of layer."""
    a = config.attention
    entries: dict[str, Any] = {
        "query_pre_attn_scalar": a.query_width or a.head_dim,
        "rope_parameters": {FULL: rope},
    }
    if a.window is None:
        return entries
    theta = a.window.rope_theta
    entries["rope_parameters"][SLIDING] = {"rope_type": "default", "rope_theta": theta}
    return entries | {"sliding_window": a.window.size, "rope_local_base_freq": theta}
