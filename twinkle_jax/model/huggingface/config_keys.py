"""The keys that a `config.json` may have, and checks of single values.

A key that is in none of these lists may change what the model computes, so it is refused.
"""

import re
import reprlib
from collections.abc import Mapping
from typing import Any

from twinkle_jax.model.decoder.families import Family

LARGEST_SIZE, MOST_LAYERS = 2**31 - 1, 4096

READ = """model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim rms_norm_eps tie_word_embeddings layer_types rope_theta
    partial_rotary_factor rope_parameters rope_scaling""".split()  # noqa: SIM905
LINEAR_KEYS = """full_attention_interval linear_num_key_heads linear_num_value_heads
    linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim""".split()  # noqa: SIM905
SLIDING_KEYS = (
    "sliding_window",
    "sliding_window_pattern",
    "query_pre_attn_scalar",
    "rope_local_base_freq",
)
WINDOW_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers")

# Keys of every family that would change the model with any value but these.
FIXED: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "attention_dropout": (0.0, 0, None),
    "quantization_config": (None,),
    "per_layer_config": (None, {}),
    "pruned_heads": (None, {}),
    "add_cross_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "auto_map": (None,),
}

# Keys without effect on the forward pass: dtypes, lengths, labels, generation defaults, versions.
IGNORED = frozenset(
    """architectures attn_implementation begin_suppress_tokens bad_words_ids chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    id2label initializer_range is_decoder label2id length_penalty max_length
    max_position_embeddings min_length name_or_path no_repeat_ngram_size num_beam_groups num_beams
    num_labels num_return_sequences output_attentions output_hidden_states output_scores prefix
    problem_type remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class top_k top_p torch_dtype torchscript typical_p use_bfloat16 use_cache
    mtp_num_hidden_layers mtp_use_dedicated_embeddings""".split()  # noqa: SIM905
)
_IGNORED = re.compile(r"_.*|.*_token_ids?|.*_version|transformers.*|unsloth_.*")


def check_keys(config: Mapping[str, Any], family: Family, model_type: str) -> None:
    """Refuse keys that this family does not have, and values that would change the result."""
    read = [*READ, *(LINEAR_KEYS if family.linear_layers else ())]
    read += WINDOW_KEYS if family.window_keys else ()
    read += SLIDING_KEYS if family.window_pattern else ()
    read += () if family.fixed_bias else ("attention_bias",)
    fixed = FIXED | {family.activation_key: (family.activation,)} | dict(family.other_keys)
    for name in config:
        if name in fixed:
            one_of(config, name, fixed[name])
        elif name not in read and name not in IGNORED and not _IGNORED.fullmatch(name):
            raise ValueError(
                f"{name!r} must be a key that a configuration of {model_type} has, got an unknown "
                "one: it may change what the model computes; remove it if it does not"
            )


def shown(value: Any) -> str:
    """Show a value in one short line."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return reprlib.repr(value)


def size(
    config: Mapping[str, Any], name: str, default: int | None = None, *, most: int = LARGEST_SIZE
) -> int:
    """Read a positive integer; without a default the key is required."""
    value = config.get(name, default)
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{name} must be a positive integer of at most {most}, got {shown(value)}")
    return value


def number(config: Mapping[str, Any], name: str, default: float, *, zero: bool = False) -> float:
    """Read a positive, finite number; with `zero`, 0 is allowed too."""
    value = config.get(name, default)
    is_number = type(value) in (int, float)
    # Bounds that float32 can hold: the decoder computes with it.
    if not is_number or not (1e-30 <= value <= 1e30 or (zero and value == 0)):
        kind = "at least 0" if zero else "positive"
        raise ValueError(f"{name} must be a finite number, {kind}, got {shown(value)}")
    return float(value)


def flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """Read true or false."""
    value = config.get(name, default)
    if type(value) is not bool:
        raise ValueError(f"{name} must be true or false, got {shown(value)}")
    return value


def section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Read a JSON object; empty if the key is missing or null."""
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a JSON object, got {shown(value)}")
    return dict(value or {})


def one_of(config: Mapping[str, Any], name: str, values: tuple[Any, ...]) -> Any:
    """Read one of a few values; the first is the default."""
    value = config.get(name, values[0])
    if not any(type(value) is type(known) and value == known for known in values):
        listed = " or ".join(repr(known) for known in values)
        raise ValueError(f"{name} must be {listed}, got {shown(value)}: unsupported")
    return value
