"""From a Hugging Face `config.json`, in the old or the new spelling, to a DecoderConfig."""

import json
from collections.abc import Mapping
from typing import Any

from twinkle_jax.model.decoder.config import (
    LINEAR,
    SLIDING,
    AttentionConfig,
    DecoderConfig,
    DeltaNetConfig,
)
from twinkle_jax.model.decoder.families import ENCLOSING, FAMILIES, Family
from twinkle_jax.model.huggingface.config_keys import check_keys
from twinkle_jax.model.huggingface.config_values import (
    LARGEST_SIZE,
    flag,
    number,
    section,
    shown,
    size,
)
from twinkle_jax.model.huggingface.layer_kinds import full_rope, read_layer_kinds, read_window
from twinkle_jax.model.huggingface.rope_config import read_rope


def parse_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a decoder's configuration from the contents of a `config.json`.

    Both spellings of the rotary parameters are understood (`rope_theta` and `rope_scaling`, or
    `rope_parameters` as transformers 5 writes it), and the nested `text_config` of Qwen3.5, Qwen3.6
    and Gemma 3. Where `rope_scaling` stands beside `rope_parameters` it wins, as in transformers.

    Args:
        config: the parsed JSON object, with Hugging Face's names.

    Returns:
        The configuration; hashable, so that it can be a static argument of `jax.jit`.

    Raises:
        ValueError: for an unknown `model_type`, a missing or impossible value, a value that asks
            for what is not built (other activations, windows in families without them,
            quantisation, …), and a key that is not known, which might change the result. The key
            and what arrived are named.
        TypeError: if `config` is no mapping.

    Example:
        >>> config = parse_config({
        ...     "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "head_dim": 16,
        ...     "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        ...     "num_key_value_heads": 2, "rope_theta": 1e6,
        ... })
        >>> config.attention.rotary_dim, config.layers, config.block
        (16, 2, ('full_attention',))
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"config must be a mapping, got {type(config).__name__}")
    flat, model_type = _flatten(config)
    family = FAMILIES[model_type]
    flat = {**family.defaults, **flat}
    check_keys(flat, family, model_type)
    kinds = read_layer_kinds(flat, family)
    return DecoderConfig(
        model_type=model_type,
        vocab_size=size(flat, "vocab_size"),
        hidden_size=size(flat, "hidden_size"),
        intermediate_size=size(flat, "intermediate_size"),
        layer_kinds=kinds,
        attention=_attention(flat, family, sliding=SLIDING in kinds),
        delta_net=_delta_net(flat) if LINEAR in kinds else None,
        norm_epsilon=number(flat, "rms_norm_eps", 1e-6, zero=True),
        centred_norms=family.centred_norms,
        output_norms=family.output_norms,
        activation=family.activation,
        scaled_embedding=family.scaled_embedding,
        tie_embeddings=flag(flat, "tie_word_embeddings", False),
        original=json.dumps(dict(config), sort_keys=True),
    )


def _flatten(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Lift a nested text configuration to the top; say which family it is."""
    model_type, flat = config.get("model_type"), dict(config)
    if isinstance(model_type, str) and model_type in ENCLOSING:
        if not config.get("text_config"):
            raise ValueError(
                f"text_config must be there where model_type is {model_type!r}, got none"
            )
        flat = section(config, "text_config")
        # The enclosing model owns the head, so its word on tying is the one that holds.
        if "tie_word_embeddings" in config:
            flat["tie_word_embeddings"] = config["tie_word_embeddings"]
        if "quantization_config" in config:
            flat["quantization_config"] = config["quantization_config"]
        model_type = flat.setdefault("model_type", ENCLOSING[model_type])
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(sorted({*FAMILIES, *ENCLOSING}))
        raise ValueError(f"model_type must be one of {known}, got {shown(model_type)}")
    return flat, model_type


def _attention(flat: Mapping[str, Any], family: Family, *, sliding: bool) -> AttentionConfig:
    query_heads = size(flat, "num_attention_heads")
    given = flat.get("num_key_value_heads")
    key_value_heads = query_heads if given is None else size(flat, "num_key_value_heads")
    if query_heads % key_value_heads:
        raise ValueError(
            f"num_attention_heads must be a multiple of num_key_value_heads, "
            f"got {query_heads} and {key_value_heads}"
        )
    head_dim = family.head_dim or size(flat, "hidden_size") // query_heads
    if family.head_dim or flat.get("head_dim") is not None:
        head_dim = size(flat, "head_dim", head_dim)
    rope = read_rope(full_rope(flat) if family.window_pattern else flat, family)
    rotary_dim = int(head_dim * rope.part)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(
            "head_dim times partial_rotary_factor must be even, and at most head_dim, "
            f"got {head_dim} times {rope.part}"
        )
    bias = family.fixed_bias or flag(flat, "attention_bias", False)
    return AttentionConfig(
        query_heads=query_heads,
        key_value_heads=key_value_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        bias=bias,
        output_bias=bias and not family.fixed_bias,
        qk_norm=family.qk_norm,
        output_gate=family.output_gate,
        query_width=size(flat, "query_pre_attn_scalar", 256) if family.window_pattern else None,
        window=read_window(flat, family) if sliding else None,
    )


def _delta_net(flat: Mapping[str, Any]) -> DeltaNetConfig:
    config = DeltaNetConfig(
        key_heads=size(flat, "linear_num_key_heads", 16),
        value_heads=size(flat, "linear_num_value_heads", 32),
        key_dim=size(flat, "linear_key_head_dim", 128),
        value_dim=size(flat, "linear_value_head_dim", 128),
        kernel=size(flat, "linear_conv_kernel_dim", 4, most=LARGEST_SIZE),
    )
    if config.value_heads % config.key_heads:
        raise ValueError(
            f"linear_num_value_heads must be a multiple of linear_num_key_heads, "
            f"got {config.value_heads} and {config.key_heads}"
        )
    return config
