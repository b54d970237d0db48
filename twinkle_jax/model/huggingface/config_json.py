"""Reading a Hugging Face `config.json` into a DecoderConfig, and writing it back."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle_jax.model.decoder.config import (
    FULL,
    LINEAR,
    SLIDING,
    AttentionConfig,
    DecoderConfig,
    DeltaNetConfig,
    ExpertsConfig,
    LatentConfig,
    LongRopeScaling,
    Window,
)
from twinkle_jax.model.decoder.families import ENCLOSING, FAMILIES, Family
from twinkle_jax.model.huggingface.config_values import (
    one_of,
    read_flag,
    read_number,
    read_section,
    read_size,
    read_soft_cap,
    shown,
)
from twinkle_jax.model.huggingface.quantized import fp8_block
from twinkle_jax.model.huggingface.rope_json import (
    IMAGE_ROPE,
    LONGROPE,
    ORIGINAL,
    Rope,
    full_layers_rope,
    read_rope,
    rope_by_kind,
    rope_entries,
)

_MOST_LAYERS, _MOST_EXPERTS = 4096, 65536

# Keys that are read. A key in none of the lists below is refused: it might change the result.
_READ = """model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim rms_norm_eps tie_word_embeddings layer_types rope_theta
    partial_rotary_factor rope_parameters rope_scaling""".split()  # noqa: SIM905
_LINEAR_KEYS = """full_attention_interval linear_num_key_heads linear_num_value_heads
    linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim""".split()  # noqa: SIM905
_EXPERT_KEYS = (
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "router_aux_loss_coef",
)
_WINDOW_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers")
_UNROTATED_KEYS = (
    "no_rope_layers",
    "no_rope_layer_interval",
    "sliding_window",  # no layer has a window, since `use_sliding_window` must be false
    "max_window_layers",
    "pretraining_tp",  # of the training
)
_GLOBAL_KEYS = (
    "global_head_dim",
    "num_global_key_value_heads",
    "attention_k_eq_v",
    "per_layer_config",
    "hidden_size_per_layer_input",
    "vocab_size_per_layer_input",
    "num_kv_shared_layers",
    "use_double_wide_mlp",
)
_CORRECTED_EXPERT_KEYS = """n_routed_experts num_experts_per_tok moe_intermediate_size
    n_shared_experts routed_scaling_factor norm_topk_prob first_k_dense_replace
    n_group topk_group num_nextn_predict_layers""".split()  # noqa: SIM905
_CLAMPED_EXPERT_KEYS = (*_EXPERT_KEYS, "swiglu_limit", "quantization_config")
_ADDED_EXPERT_KEYS = ("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size")
_LATENT_KEYS = (
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "qk_head_dim",
    "v_head_dim",
    "rope_interleave",
)
_MULTIPLIER_KEYS = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)

# Keys of every family that would change the model with any value but these.
_FIXED: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "attention_dropout": (0.0, 0, None),
    "per_layer_config": (None, {}),
    "pruned_heads": (None, {}),
    "add_cross_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "auto_map": (None,),
}

# Keys without effect on the forward pass: dtypes, lengths, labels, generation defaults, versions.
_IGNORED = frozenset(
    """architectures attn_implementation begin_suppress_tokens bad_words_ids chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    id2label initializer_range is_decoder label2id length_penalty max_length
    max_position_embeddings min_length name_or_path no_repeat_ngram_size num_beam_groups num_beams
    num_labels num_return_sequences output_attentions output_hidden_states output_scores prefix
    problem_type remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class top_k top_p torch_dtype torchscript typical_p use_bfloat16 use_cache
    mtp_num_hidden_layers mtp_use_dedicated_embeddings embedding_initializer_range
    aux_loss_alpha seq_aux ep_size""".split()  # noqa: SIM905
)
_IGNORED_PATTERNS = re.compile(r"_.*|.*_token_ids?|.*_version|transformers.*|unsloth_.*")


def parse_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a decoder's configuration from the contents of a `config.json`.

    Both spellings of the rotary parameters are understood (`rope_theta` and `rope_scaling`, or
    `rope_parameters` as transformers 5 writes it), and the nested `text_config` of Qwen3.5,
    Qwen3.6, Gemma 3, Gemma 4, Mistral Small 3 and Ministral 3. If both `rope_scaling` and
    `rope_parameters` are there, `rope_scaling` wins, as in transformers.

    Args:
        config: the parsed JSON object, with Hugging Face's names.

    Returns:
        The configuration; hashable, so that it can be a static argument of `jax.jit`.

    Raises:
        ValueError: for an unknown `model_type`, a missing or impossible value, an unsupported
            option (other activations, windows in families without them, quantisation, …), and an
            unknown key, which might change the result. The message names the key and its value.
        TypeError: if `config` is not a mapping.

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
    if flat.get("rope_parameters") is None and "rope_parameters" in family.defaults:
        flat["rope_parameters"] = family.defaults["rope_parameters"]
    _check_keys(flat, family, model_type)
    kinds = _layer_kinds(flat, family)
    attention, full_attention = _attentions(flat, family, kinds)
    has_experts = family.experts or family.clamped_experts or family.corrected_experts
    has_experts |= family.added_experts and read_flag(flat, "enable_moe_block")
    experts = _experts(flat, family) if has_experts else None
    multipliers = {name: read_number(flat, name, 1.0) for name in _MULTIPLIER_KEYS}
    if family.scaled_embedding:
        multipliers["embedding_multiplier"] = read_size(flat, "hidden_size") ** 0.5
    return DecoderConfig(
        model_type=model_type,
        vocab_size=read_size(flat, "vocab_size"),
        hidden_size=read_size(flat, "hidden_size"),
        intermediate_size=read_size(
            flat, "intermediate_size", experts.width if family.experts and experts else None
        ),
        layer_kinds=kinds,
        attention=attention,
        full_attention=full_attention,
        **(_per_layer(flat, kinds) if family.global_heads else {}),
        unrotated_layers=_unrotated_layers(flat, family, kinds),
        delta_net=_delta_net(flat, family) if LINEAR in kinds else None,
        experts=experts,
        dense_layers=_dense_layers(flat, family) if family.corrected_experts else 0,
        norm_epsilon=read_number(flat, "rms_norm_eps", 1e-6, zero=True),
        centred_norms=family.centred_norms,
        float32_norms=family.float32_norms,
        input_norms=family.input_norms,
        output_norms=family.output_norms,
        layer_scalars=family.layer_scalars,
        activation=family.activation,
        embedding_multiplier=multipliers["embedding_multiplier"],
        residual_multiplier=multipliers["residual_multiplier"],
        logits_scaling=multipliers["logits_scaling"],
        logits_soft_cap=read_soft_cap(flat, "final_logit_softcapping"),
        tie_embeddings=read_flag(flat, "tie_word_embeddings"),
        original=json.dumps(dict(config), sort_keys=True),
    )


def _per_layer(flat: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """Read what layers read of tokens, and how many of the last ones reuse keys and values."""
    entries: dict[str, Any] = {}
    width = flat.get("hidden_size_per_layer_input")
    if width not in (None, 0):
        entries["token_width"] = read_size(flat, "hidden_size_per_layer_input")
        vocab = flat["vocab_size_per_layer_input"]
        if vocab != flat["vocab_size"]:
            raise ValueError(
                f"vocab_size_per_layer_input must be vocab_size, {flat['vocab_size']}, "
                f"got {shown(vocab)}"
            )
    if flat.get("num_kv_shared_layers") in (None, 0):
        return entries
    reusing = read_size(flat, "num_kv_shared_layers")
    if not set(kinds) <= set(kinds[: max(len(kinds) - reusing, 0)]):
        raise ValueError(
            "num_kv_shared_layers must leave a layer of each kind with keys and values of its own, "
            f"got {reusing} of {len(kinds)} layers"
        )
    entries["reusing_layers"] = reusing
    if read_flag(flat, "use_double_wide_mlp"):
        entries["reusing_intermediate_size"] = 2 * read_size(flat, "intermediate_size")
    return entries


def _flatten(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the text model's configuration and its `model_type`."""
    model_type, flat = config.get("model_type"), dict(config)
    if isinstance(model_type, str) and model_type in ENCLOSING:
        if not config.get("text_config"):
            raise ValueError(
                f"text_config must be given where model_type is {model_type!r}, got none"
            )
        flat = read_section(config, "text_config")
        # The enclosing model owns the head and the quantisation, so its settings win.
        for name in ("tie_word_embeddings", "quantization_config"):
            if name in config:
                flat[name] = config[name]
        model_type = flat.setdefault("model_type", ENCLOSING[model_type])
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(sorted({*FAMILIES, *ENCLOSING}))
        raise ValueError(f"model_type must be one of {known}, got {shown(model_type)}")
    return flat, model_type


def _attentions(
    flat: Mapping[str, Any], family: Family, kinds: Sequence[str]
) -> tuple[AttentionConfig, AttentionConfig | None]:
    """Read the attention of all layers, or those of sliding and of full ones if they differ."""
    by_kind = family.window_pattern and family.rope_by_kind
    rope = read_rope(full_layers_rope(flat) if by_kind else flat, family)
    window = _window(flat, family) if SLIDING in kinds else None
    if not family.global_heads:
        return _attention(flat, family, rope, window), None
    shared_values = read_flag(flat, "attention_k_eq_v")
    full = _attention({**flat, **_global_heads(flat, kinds)}, family, rope, None)
    full = dataclasses.replace(full, shared_values=shared_values)
    if window is None or window.rope_theta is None:
        return full, None
    rope = Rope(window.rope_theta, 1.0, None)
    return _attention(flat, family, rope, Window(window.size)), full


def _global_heads(flat: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """Read what full layers have instead of `head_dim` and `num_key_value_heads`.

    transformers writes it for each layer, and takes it from two keys where it is not written so.
    """
    if "per_layer_config" not in flat:
        heads: dict[str, Any] = {"head_dim": read_size(flat, "global_head_dim")}
        number = "num_global_key_value_heads"
        if flat.get(number) is not None and read_flag(flat, "attention_k_eq_v"):
            heads["num_key_value_heads"] = read_size(flat, number)
        return heads
    by_layer = {
        int(layer) if str(layer).isdecimal() else layer: heads  # such as "05"
        for layer, heads in read_section(flat, "per_layer_config").items()
    }
    full = [layer for layer, kind in enumerate(kinds) if kind == FULL]
    heads = read_section({"per_layer_config": by_layer.get(full[0])}, "per_layer_config")
    same = dict.fromkeys(full, heads) if heads else {}
    if by_layer != same or heads.keys() - {"head_dim", "num_key_value_heads"}:
        raise ValueError(
            "per_layer_config must have the same head_dim and num_key_value_heads for all full "
            f"layers, {full}, and nothing else, got {shown(flat['per_layer_config'])}"
        )
    return heads


def _attention(
    flat: Mapping[str, Any], family: Family, rope: "Rope", window: Window | None
) -> AttentionConfig:
    query_heads = read_size(flat, "num_attention_heads")
    key_value_heads = query_heads
    if flat.get("num_key_value_heads") is not None:
        key_value_heads = read_size(flat, "num_key_value_heads")
    if query_heads % key_value_heads:
        raise ValueError(
            f"num_attention_heads must be a multiple of num_key_value_heads, "
            f"got {query_heads} and {key_value_heads}"
        )
    latent = _latent(flat) if family.latent else None
    if latent is not None:
        head_dim, rotary_dim = _latent_head(flat, query_heads)
    else:
        head_dim = family.head_dim or read_size(flat, "hidden_size") // query_heads
        if family.head_dim or flat.get("head_dim") is not None:
            head_dim = read_size(flat, "head_dim", head_dim)
        rotary_dim = int(head_dim * rope.part)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(
            "head_dim times partial_rotary_factor must be even, and at most head_dim, "
            f"got {head_dim} times {rope.part}"
        )
    if isinstance(rope.scaling, LongRopeScaling):
        lists = (rope.scaling.factors, rope.scaling.long_factors)
        for name, factors in zip(LONGROPE, lists, strict=True):
            if len(factors) != rotary_dim // 2:
                raise ValueError(
                    f"{name} must have {rotary_dim // 2} numbers, half of the rotated entries of a "
                    f"head, got {len(factors)}"
                )
    bias = family.fixed_bias or read_flag(flat, "attention_bias")
    multiplier = family.attention_multiplier
    if family.multipliers:
        multiplier = read_number(flat, "attention_multiplier", 1.0)
    has_query_width = "query_pre_attn_scalar" in family.sliding_keys
    return AttentionConfig(
        query_heads=query_heads,
        key_value_heads=key_value_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        interleaved=read_flag({"rope_interleave": True, **flat}, "rope_interleave")
        if family.latent
        else family.interleaved,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        bias=bias,
        output_bias=bias and family.output_bias,
        qk_norm=read_flag(flat, "use_qk_norm") if family.qk_norm is None else family.qk_norm,
        joint_qk_norm=family.joint_qk_norm,
        output_gate=family.output_gate,
        query_width=read_size(flat, "query_pre_attn_scalar", 256) if has_query_width else None,
        soft_cap=read_soft_cap(flat, "attn_logit_softcapping"),
        multiplier=multiplier,
        value_norm=family.value_norm,
        window=window,
        sinks=family.sinks,
        latent=latent,
    )


def _latent(flat: Mapping[str, Any]) -> LatentConfig:
    has_query = flat.get("q_lora_rank") is not None
    return LatentConfig(
        width=read_size(flat, "kv_lora_rank"),
        query_width=read_size(flat, "q_lora_rank") if has_query else None,
        value_dim=read_size(flat, "v_head_dim"),
    )


def _latent_head(flat: Mapping[str, Any], query_heads: int) -> tuple[int, int]:
    """Read the width of a head of latent attention, and how much of it is rotated."""
    rotary_dim = read_size(flat, "qk_rope_head_dim")
    if rotary_dim % 2:
        raise ValueError(f"qk_rope_head_dim must be even, got {rotary_dim}")
    head_dim = read_size(flat, "qk_nope_head_dim") + rotary_dim
    # What transformers derives and writes; all heads have keys and values of their own.
    derived = {
        "qk_head_dim": head_dim,
        "head_dim": rotary_dim,
        "num_key_value_heads": query_heads,
    }
    for name, value in derived.items():
        one_of(flat, name, (value, None))
    return head_dim, rotary_dim


def _delta_net(flat: Mapping[str, Any], family: Family) -> DeltaNetConfig:
    config = DeltaNetConfig(
        key_heads=read_size(flat, "linear_num_key_heads", 16),
        value_heads=read_size(flat, "linear_num_value_heads", 32),
        key_dim=read_size(flat, "linear_key_head_dim", 128),
        value_dim=read_size(flat, "linear_value_head_dim", 128),
        kernel=read_size(flat, "linear_conv_kernel_dim", 4),
        by_key_head=family.linear_by_key_head,
    )
    if config.value_heads % config.key_heads:
        raise ValueError(
            f"linear_num_value_heads must be a multiple of linear_num_key_heads, "
            f"got {config.value_heads} and {config.key_heads}"
        )
    return config


def _experts(flat: Mapping[str, Any], family: Family) -> ExpertsConfig:
    known = ("n_routed_experts",) if family.corrected_experts else _EXPERT_KEYS[:2]
    names = [name for name in known if name in flat]
    name = names[0] if names else known[0]
    number = read_size(flat, name, most=_MOST_EXPERTS)
    if number == 1:
        raise ValueError(f"{name} must be at least 2, got 1")
    if len(names) == 2 and flat[names[1]] != number:
        raise ValueError(
            f"num_local_experts must be num_experts, {number}, got {shown(flat[names[1]])}"
        )
    shared, added = family.shared_expert, family.added_experts
    experts = ExpertsConfig(
        number=number,
        chosen=read_size(flat, "top_k_experts" if added else "num_experts_per_tok", most=number),
        width=read_size(flat, family.expert_width),
        normalised=family.normalised or read_flag(flat, "norm_topk_prob"),
        shared_width=read_size(flat, "shared_expert_intermediate_size") if shared else None,
        beside_dense=added,
        swiglu_limit=read_number(flat, "swiglu_limit", 7.0) if family.clamped_experts else None,
    )
    if not family.corrected_experts:
        return experts
    groups, chosen_groups = _groups(flat, experts)
    return dataclasses.replace(
        experts,
        corrected=True,
        scaling=read_number(flat, "routed_scaling_factor", 1.0),
        shared_width=read_size(flat, "n_shared_experts") * experts.width,
        groups=groups,
        chosen_groups=chosen_groups,
    )


def _groups(flat: Mapping[str, Any], experts: ExpertsConfig) -> tuple[int, int]:
    """Read how many groups there are, of two experts or more, and how many a token chooses."""
    groups = read_size(flat, "n_group", 1, most=experts.number // 2)
    if experts.number % groups:
        raise ValueError(f"n_group must divide n_routed_experts, {experts.number}, got {groups}")
    chosen = read_size(flat, "topk_group", 1, most=groups)
    within = chosen * experts.number // groups
    if experts.chosen > within:
        raise ValueError(
            f"num_experts_per_tok must be at most {within}, the experts of {chosen} of {groups} "
            f"groups (topk_group), got {experts.chosen}"
        )
    return groups, chosen


def _dense_layers(flat: Mapping[str, Any], family: Family) -> int:
    """Read how many of the first layers are dense."""
    name = "first_k_dense_replace"
    count, most = flat[name], _MOST_LAYERS
    if type(count) is not int or not 0 <= count <= most:
        raise ValueError(f"{name} must be an integer from 0 to {most}, got {shown(count)}")
    listed = flat.get(family.expert_layers) if family.expert_layers else None
    if listed is None:
        return count
    valid = isinstance(listed, list | tuple) and set(map(str, listed)) <= {"dense", "sparse"}
    count = list(listed).count("dense") if valid else 0
    layers = read_size(flat, "num_hidden_layers", most=_MOST_LAYERS)
    if not valid or list(listed) != ["dense"] * count + ["sparse"] * (layers - count):
        raise ValueError(
            f"{family.expert_layers} must be a list of {layers} (num_hidden_layers), first 'dense' "
            f"and then 'sparse', got {shown(listed)}"
        )
    return count


# Kinds of layers.


def _layer_kinds(flat: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    """Read `layer_types`, or derive it from the interval of full layers."""
    layers = read_size(flat, "num_hidden_layers", most=_MOST_LAYERS)
    kinds = flat.get("layer_types")
    uniform = SLIDING if family.uniform_window and _cuts_rows(flat) else FULL
    slides = bool(family.window_pattern)
    if family.unrotated_full and flat["sliding_window"] is None:
        slides = False
    if kinds is None and (family.uniform_window or (family.window_pattern and not slides)):
        kinds = [uniform] * layers
    elif kinds is None:
        _refuse_windows(flat, layers)
        interval = read_size(flat, "full_attention_interval", 4) if family.linear_layers else 1
        other_kind = LINEAR
        if family.window_pattern:
            interval = read_size(flat, "sliding_window_pattern", family.window_pattern)
            other_kind = SLIDING
        kinds = [other_kind if (i + 1) % interval else FULL for i in range(layers)]
        if family.global_heads:
            kinds[-1] = FULL  # as in transformers
    allowed = [uniform]
    allowed += [LINEAR] if family.linear_layers else []
    allowed += [SLIDING] if slides else []
    valid = isinstance(kinds, list | tuple) and all(kind in allowed for kind in kinds)
    if not valid or len(kinds) != layers:
        raise ValueError(
            f"layer_types must be a list of {layers} (num_hidden_layers) out of {allowed}, "
            f"got {shown(kinds)}"
        )
    if family.global_heads and kinds[-1] != FULL:
        raise ValueError(f"layer_types must end with {FULL!r}, got {shown(kinds[-1])}")
    return tuple(kinds)


def _unrotated_layers(
    flat: Mapping[str, Any], family: Family, kinds: Sequence[str]
) -> tuple[int, ...]:
    """Read which layers have no rotary positions.

    Those with a 0 in `no_rope_layers`; or in some families full layers beside sliding ones.
    """
    layers = len(kinds)
    if family.unrotated_full and flat["sliding_window"] is not None:
        if SLIDING not in kinds:  # transformers then rotates no layer, and vLLM all
            raise ValueError(
                f"sliding_window must be null where no layer of layer_types slides, got "
                f"{shown(flat['sliding_window'])}"
            )
        return tuple(i for i, kind in enumerate(kinds) if kind == FULL)
    if family.unrotated_interval is None:
        return ()
    rotated = flat.get("no_rope_layers")
    if rotated is None:
        interval = read_size(flat, "no_rope_layer_interval", family.unrotated_interval)
        rotated = [int((i + 1) % interval != 0) for i in range(layers)]
    valid = isinstance(rotated, list | tuple) and all(
        type(value) is int and value in (0, 1) for value in rotated
    )
    if not valid or len(rotated) < layers:
        raise ValueError(
            f"no_rope_layers must be a list of 0 and 1 for each of {layers} layers "
            f"(num_hidden_layers), got {shown(rotated)}"
        )
    return tuple(i for i in range(layers) if not rotated[i])


def _refuse_windows(flat: Mapping[str, Any], layers: int) -> None:
    """Refuse `use_sliding_window`, unless `max_window_layers` leaves no layer with a window."""
    if not read_flag(flat, "use_sliding_window") or flat.get("sliding_window", 4096) is None:
        return
    first = flat.get("max_window_layers", 28)
    if type(first) is not int or first < layers:
        raise ValueError(
            f"max_window_layers must be at least num_hidden_layers, {layers}, where "
            f"use_sliding_window is true, got {shown(first)}: windows are unsupported"
        )


def _cuts_rows(flat: Mapping[str, Any]) -> bool:
    """Whether there is a window that the model's longest rows are longer than."""
    if flat.get("sliding_window") is None:
        return False
    return read_size(flat, "sliding_window") < read_size(flat, "max_position_embeddings")


def _window(flat: Mapping[str, Any], family: Family) -> Window:
    """Read the window of sliding layers, and their rotary base, if they have their own."""
    if family.uniform_window:
        return Window(read_size(flat, "sliding_window"))
    if not family.rope_by_kind:
        return Window(read_size(flat, "sliding_window", 4096))
    local = "rope_local_base_freq"
    theta = flat.get(local, 10_000.0) if local in family.sliding_keys else flat.get("rope_theta")
    rope = {"rope_parameters": rope_by_kind(flat)[SLIDING]}
    rope |= {} if theta is None else {"rope_theta": theta}
    theta = read_rope(rope, dataclasses.replace(family, rope_types=("default",))).theta
    return Window(read_size(flat, "sliding_window", 4096), theta)


def _check_keys(config: Mapping[str, Any], family: Family, model_type: str) -> None:
    """Refuse keys that this family does not have, and values that would change the result."""
    read = [*_READ, *(_LINEAR_KEYS if family.linear_layers else ())]
    if family.experts:
        read += (*_EXPERT_KEYS, family.expert_width)
        read += ("shared_expert_intermediate_size",) if family.shared_expert else ()
        read += () if family.normalised else ("norm_topk_prob",)
    read += _WINDOW_KEYS if family.window_keys else ()
    read += family.sliding_keys if family.window_pattern or family.uniform_window else ()
    read += (ORIGINAL,) if "longrope" in family.rope_types else ()
    read += _ADDED_EXPERT_KEYS if family.added_experts else ()
    if family.clamped_experts:
        read += _CLAMPED_EXPERT_KEYS
        one_of(read_section(config, "quantization_config"), "quant_method", ("mxfp4",))
    else:
        read += ("quantization_config",)
        fp8_block(config)
    read += _CORRECTED_EXPERT_KEYS if family.corrected_experts else ()
    read += (family.expert_layers,) if family.expert_layers else ()
    read += ("use_qk_norm",) if family.qk_norm is None else ()
    read += _GLOBAL_KEYS if family.global_heads else ()
    read += _UNROTATED_KEYS if family.unrotated_interval else ()
    read += _MULTIPLIER_KEYS if family.multipliers else ()
    read += _LATENT_KEYS if family.latent else ()
    read += family.soft_caps
    read += () if family.fixed_bias else ("attention_bias",)
    fixed = {name: values for name, values in _FIXED.items() if name not in read}
    fixed |= {family.activation_key: (family.activation,)} | dict(family.other_keys)
    for name in config:
        if name in fixed:
            one_of(config, name, fixed[name])
        elif name not in read and name not in _IGNORED and not _IGNORED_PATTERNS.fullmatch(name):
            raise ValueError(
                f"{name!r} must be a key that a configuration of {model_type} has, got an unknown "
                "one: it may change what the model computes; remove it if it does not"
            )


# Writing.


def export_config(config: DecoderConfig, *, nested: bool, dtype: str) -> dict[str, Any]:
    """Return the contents of a `config.json`: the original, updated with the decoder's values.

    Args:
        config: the decoder.
        nested: whether to keep the enclosing vision-language configuration, if there was one.
        dtype: name of the type of the saved parameters.

    Returns:
        A JSON object that transformers 4 and 5 read.
    """
    original: dict[str, Any] = json.loads(config.original) if config.original else {}
    text = dict(original.get("text_config", original))
    original_rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    image_rope = {key: original_rope[key] for key in sorted(IMAGE_ROPE & original_rope.keys())}
    text.update(_text_entries(config, image_rope), dtype=dtype, torch_dtype=dtype)
    for name in ("auto_map", "quantization_config"):  # code, and a form, that are not written
        text.pop(name, None)
    if not (nested and "text_config" in original):
        return text | {"architectures": [FAMILIES[config.model_type].architecture]}
    original.pop("quantization_config", None)
    return original | {
        "text_config": text,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _text_entries(config: DecoderConfig, image_rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return all values that the decoder uses, under Hugging Face's names."""
    attention, delta, experts = config.attention, config.delta_net, config.experts
    family = FAMILIES[config.model_type]
    full = config.attention_of(FULL)
    rope = {**image_rope, **rope_entries(full)}
    entries: dict[str, Any] = {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": attention.query_heads,
        "num_key_value_heads": attention.key_value_heads,
        "head_dim": attention.head_dim,
        family.activation_key: config.activation,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": full.rope_theta,
        "rope_parameters": rope,
    }
    if not family.global_heads:  # whose class of transformers 5 takes it for `rope_parameters`
        # transformers 4 reads this key; so does 5, unless it is empty.
        entries["rope_scaling"] = None if attention.rope_scaling is None else rope
    has_kinds = family.window_keys or family.window_pattern or family.unrotated_interval
    if has_kinds or family.linear_layers:
        # Not for the others: transformers reads a Mistral with this key as a Ministral.
        entries["layer_types"] = list(config.layer_kinds)
    if attention.latent is not None:
        entries |= {
            "head_dim": attention.rotary_dim,  # as transformers writes it
            "qk_head_dim": attention.head_dim,
            "qk_rope_head_dim": attention.rotary_dim,
            "qk_nope_head_dim": attention.head_dim - attention.rotary_dim,
            "v_head_dim": attention.latent.value_dim,
            "kv_lora_rank": attention.latent.width,
            "q_lora_rank": attention.latent.query_width,
            "rope_interleave": attention.interleaved,
        }
    if not family.fixed_bias:
        entries["attention_bias"] = attention.bias
    if family.qk_norm is None:
        entries["use_qk_norm"] = attention.qk_norm
    if family.rotary_part is not None:
        part = attention.rotary_dim / attention.head_dim
        rope["partial_rotary_factor"] = entries["partial_rotary_factor"] = part
    if family.multipliers:
        entries |= {
            "embedding_multiplier": config.embedding_multiplier,
            "attention_multiplier": attention.scale,
            "residual_multiplier": config.residual_multiplier,
            "logits_scaling": config.logits_scaling,
        }
    if "query_pre_attn_scalar" in family.sliding_keys:
        entries["query_pre_attn_scalar"] = attention.query_width or attention.head_dim
    caps = {
        "attn_logit_softcapping": attention.soft_cap,
        "final_logit_softcapping": config.logits_soft_cap,
    }
    entries |= {name: caps[name] for name in family.soft_caps}
    if family.unrotated_interval:
        rotated = [int(layer not in config.unrotated_layers) for layer in range(config.layers)]
        entries["no_rope_layers"] = rotated
    if family.window_pattern and family.rope_by_kind:
        entries["rope_parameters"] = {FULL: rope}
    if attention.window is not None:
        entries["sliding_window"] = attention.window.size
    elif family.unrotated_full:
        entries["sliding_window"] = None
    if attention.window is not None and attention.window.rope_theta is not None:
        theta = attention.window.rope_theta
        entries["rope_parameters"][SLIDING] = {"rope_type": "default", "rope_theta": theta}
        if "rope_local_base_freq" in family.sliding_keys:
            entries["rope_local_base_freq"] = theta
    if family.global_heads:
        heads = {"head_dim": full.head_dim, "num_key_value_heads": full.key_value_heads}
        numbers = [str(i) for i, kind in enumerate(config.layer_kinds) if kind == FULL]
        entries |= {
            "attention_k_eq_v": full.shared_values,
            "global_head_dim": full.head_dim,
            "num_global_key_value_heads": full.key_value_heads,
            "per_layer_config": dict.fromkeys(numbers, heads),
            "hidden_size_per_layer_input": config.token_width or 0,
            "vocab_size_per_layer_input": config.vocab_size,
            "num_kv_shared_layers": config.reusing_layers,
            "use_double_wide_mlp": config.reusing_intermediate_size is not None,
        }
    if config.full_attention is not None:
        unscaled = {"rope_type": "default", "rope_theta": attention.rope_theta}
        entries["rope_parameters"][SLIDING] = unscaled
    if isinstance(attention.rope_scaling, LongRopeScaling):
        entries["max_position_embeddings"] = attention.rope_scaling.max_length
        entries[ORIGINAL] = attention.rope_scaling.original_length
        # transformers 4 wants these three keys and no other.
        entries["rope_scaling"] = {"type": "longrope"} | {name: rope[name] for name in LONGROPE}
    if not family.experts:
        entries["intermediate_size"] = config.intermediate_size
    if family.added_experts:
        entries["enable_moe_block"] = experts is not None
        if experts is not None:
            entries |= {
                "num_experts": experts.number,
                "top_k_experts": experts.chosen,
                "moe_intermediate_size": experts.width,
            }
    elif family.clamped_experts and experts is not None:
        entries |= {
            "num_local_experts": experts.number,
            "num_experts_per_tok": experts.chosen,
            "swiglu_limit": experts.swiglu_limit,
        }
    elif family.corrected_experts and experts is not None:
        entries |= {
            "n_routed_experts": experts.number,
            "num_experts_per_tok": experts.chosen,
            "moe_intermediate_size": experts.width,
            "n_shared_experts": (experts.shared_width or 0) // experts.width,
            "routed_scaling_factor": experts.scaling,
            "norm_topk_prob": experts.normalised,
            "first_k_dense_replace": config.dense_layers,
            "n_group": experts.groups,
            "topk_group": experts.chosen_groups,
        }
        if family.expert_layers:
            sparse = ["sparse"] * (config.layers - config.dense_layers)
            entries[family.expert_layers] = ["dense"] * config.dense_layers + sparse
    elif experts is not None:
        entries |= {
            "num_experts": experts.number,
            "num_experts_per_tok": experts.chosen,
            family.expert_width: experts.width,
        }
        if not family.normalised:
            entries["norm_topk_prob"] = experts.normalised
        if experts.shared_width is not None:
            entries["shared_expert_intermediate_size"] = experts.shared_width
    if delta is not None:
        entries |= {
            "linear_num_key_heads": delta.key_heads,
            "linear_num_value_heads": delta.value_heads,
            "linear_key_head_dim": delta.key_dim,
            "linear_value_head_dim": delta.value_dim,
            "linear_conv_kernel_dim": delta.kernel,
        }
    return entries
