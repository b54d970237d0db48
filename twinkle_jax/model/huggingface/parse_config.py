"""From a Hugging Face `config.json`, in the old or the new spelling, to a DecoderConfig."""

import json
from collections.abc import Mapping
from typing import Any

from twinkle_jax.model.decoder.config import (
    FULL,
    LINEAR,
    AttentionConfig,
    DecoderConfig,
    DeltaNetConfig,
)

FAMILIES = ("qwen2", "qwen3", "qwen3_5_text")
NESTED = {"qwen3_5": "qwen3_5_text"}


def parse_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a decoder's configuration from the contents of a `config.json`.

    Both spellings of the rotary parameters are understood (`rope_theta`, or `rope_parameters` as
    transformers 5 writes it), and the nested `text_config` of Qwen3.5.

    Args:
        config: the parsed JSON object, with Hugging Face's names.

    Returns:
        The configuration; hashable, so that it can be a static argument of `jax.jit`.

    Raises:
        ValueError: for an unknown `model_type`, a missing or impossible entry, and for features
            that change the result and that are not built (rope scaling, sliding windows, other
            activations); the entry and what arrived are named.

    Example:
        >>> config = parse_config({
        ...     "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "head_dim": 16,
        ...     "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        ...     "num_key_value_heads": 2, "rope_theta": 1e6,
        ... })
        >>> config.attention.rotary_dim, config.layers, config.block
        (16, 2, ('full_attention',))
    """
    flat, model_type = _flatten(config)
    kinds = _layer_kinds(flat, model_type)
    _refuse_unbuilt(flat, kinds)
    return DecoderConfig(
        model_type=model_type,
        vocab_size=_size(flat, "vocab_size"),
        hidden_size=_size(flat, "hidden_size"),
        intermediate_size=_size(flat, "intermediate_size"),
        layer_kinds=kinds,
        attention=_attention(flat, model_type),
        delta_net=_delta_net(flat) if LINEAR in kinds else None,
        norm_epsilon=float(flat.get("rms_norm_eps", 1e-6)),
        centred_norms=model_type == "qwen3_5_text",
        tie_embeddings=bool(flat.get("tie_word_embeddings", False)),
        original=json.dumps(dict(config), sort_keys=True),
    )


def _flatten(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Lift a nested text configuration to the top; say which family it is."""
    model_type = config.get("model_type")
    flat = dict(config)
    if model_type in NESTED:
        if not isinstance(config.get("text_config"), Mapping):
            raise ValueError(f"expected 'text_config' in a config of model_type {model_type!r}")
        flat = dict(config["text_config"])
        # The enclosing model owns the head, so its word on tying is the one that holds.
        flat["tie_word_embeddings"] = config.get(
            "tie_word_embeddings", flat.get("tie_word_embeddings", False)
        )
        model_type = flat.setdefault("model_type", NESTED[model_type])
    if model_type not in FAMILIES:
        known = ", ".join(sorted({*FAMILIES, *NESTED}))
        raise ValueError(f"unknown model_type {model_type!r}; known: {known}")
    return flat, str(model_type)


def _layer_kinds(flat: Mapping[str, Any], model_type: str) -> tuple[str, ...]:
    layers = _size(flat, "num_hidden_layers")
    kinds = flat.get("layer_types")
    if kinds is None:
        every = int(flat.get("full_attention_interval", 4)) if model_type == "qwen3_5_text" else 1
        kinds = [LINEAR if (i + 1) % every else FULL for i in range(layers)]
    if len(kinds) != layers:
        raise ValueError(
            f"expected {layers} layer_types (num_hidden_layers), got {len(kinds)}: {kinds}"
        )
    allowed = {FULL, LINEAR} if model_type == "qwen3_5_text" else {FULL}
    for kind in kinds:
        if kind not in allowed:
            raise ValueError(
                f"layer type {kind!r} is not built for {model_type}: {sorted(allowed)}"
            )
    return tuple(kinds)


def _attention(flat: Mapping[str, Any], model_type: str) -> AttentionConfig:
    query_heads = _size(flat, "num_attention_heads")
    key_value_heads = _size(flat, "num_key_value_heads", query_heads)
    if query_heads % key_value_heads:
        raise ValueError(
            f"expected num_attention_heads to be a multiple of num_key_value_heads, "
            f"got {query_heads} and {key_value_heads}"
        )
    default = {"qwen2": _size(flat, "hidden_size") // query_heads, "qwen3": 128}
    head_dim = _size(flat, "head_dim", default.get(model_type, 256))
    theta, partial = _rotary(flat, model_type)
    rotary_dim = int(head_dim * partial)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(
            f"expected an even number of rotated entries of head_dim {head_dim}, "
            f"got {rotary_dim} (partial_rotary_factor {partial})"
        )
    bias = bool(flat.get("attention_bias", False))
    return AttentionConfig(
        query_heads=query_heads,
        key_value_heads=key_value_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=theta,
        bias=bias or model_type == "qwen2",
        output_bias=bias and model_type != "qwen2",
        qk_norm=model_type != "qwen2",
        output_gate=model_type == "qwen3_5_text",
    )


def _rotary(flat: Mapping[str, Any], model_type: str) -> tuple[float, float]:
    """Base of the wavelengths and rotated part of a head, from either spelling."""
    rope = flat.get("rope_parameters") or flat.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise ValueError(f"rope_type {kind!r} is not built, only 'default'")
    theta = float(rope.get("rope_theta", flat.get("rope_theta", 10_000.0)))
    whole = 0.25 if model_type == "qwen3_5_text" else 1.0
    partial = rope.get("partial_rotary_factor", flat.get("partial_rotary_factor", whole))
    return theta, float(partial)


def _delta_net(flat: Mapping[str, Any]) -> DeltaNetConfig:
    config = DeltaNetConfig(
        key_heads=_size(flat, "linear_num_key_heads", 16),
        value_heads=_size(flat, "linear_num_value_heads", 32),
        key_dim=_size(flat, "linear_key_head_dim", 128),
        value_dim=_size(flat, "linear_value_head_dim", 128),
        kernel=_size(flat, "linear_conv_kernel_dim", 4),
    )
    if config.value_heads % config.key_heads:
        raise ValueError(
            f"expected linear_num_value_heads to be a multiple of linear_num_key_heads, "
            f"got {config.value_heads} and {config.key_heads}"
        )
    return config


def _refuse_unbuilt(flat: Mapping[str, Any], kinds: tuple[str, ...]) -> None:
    activation = flat.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act {activation!r} is not built, only 'silu'")
    first = flat.get("max_window_layers", 28)
    slides = flat.get("use_sliding_window", False) and flat.get("layer_types") is None
    if slides and first < len(kinds):
        raise ValueError("use_sliding_window=true is not built")
    if flat.get("quantization_config"):
        raise ValueError("quantization_config: quantised checkpoints are not read")


def _size(flat: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = flat.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"expected {name} to be a positive integer, got {value!r}")
    return value
