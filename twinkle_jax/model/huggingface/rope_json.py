"""Rotary positions in a `config.json`, in and out.

They are `rope_theta` alone, beside `rope_scaling`, or in `rope_parameters`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from twinkle_jax.model.decoder.config import (
    FULL,
    SLIDING,
    AttentionConfig,
    LinearScaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeScaling,
    YarnScaling,
)
from twinkle_jax.model.decoder.families import Family
from twinkle_jax.model.huggingface.config_values import (
    one_of,
    read_flag,
    read_number,
    read_section,
    read_size,
    shown,
)

ORIGINAL = "original_max_position_embeddings"
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)
LONGROPE = ("short_factor", "long_factor")
_GROWTH = "llama_4_scaling_beta"
_ALL = "mscale_all_dim"
_YARN = """original_max_position_embeddings attention_factor attn_factor beta_fast beta_slow mscale
    mscale_all_dim truncate""".split()  # noqa: SIM905
# Rotary settings of image positions: a text token has one position only.
IMAGE_ROPE = {"mrope_section", "mrope_interleaved"}

_Scaling = RopeScaling | LinearScaling | YarnScaling | LongRopeScaling | ProportionalScaling


class Rope(NamedTuple):
    """Base of the wavelengths, rotated part of a head, scaling of the wavelengths."""

    theta: float
    part: float
    scaling: _Scaling | None


def read_rope(flat: Mapping[str, Any], family: Family) -> Rope:
    """Read `rope_scaling`, else `rope_parameters`; top-level keys fill in what is missing."""
    name = "rope_scaling" if read_section(flat, "rope_scaling") else "rope_parameters"
    top_level = {key: flat[key] for key in ("rope_theta", "partial_rotary_factor") if key in flat}
    rope = top_level | read_section(flat, name)
    if "rope_type" not in rope and "type" in rope:
        rope["rope_type"] = rope["type"]
    kind = one_of(rope, "rope_type", family.rope_types)
    required, optional, read_scaling = _SCALINGS[kind]
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *required, *optional}
    known |= IMAGE_ROPE if family.linear_layers else set()
    known |= {_GROWTH, "max_position_embeddings"} if family.query_growth else set()
    for key in rope.keys() - known:
        raise ValueError(
            f"{name} must have no key {key!r} where rope_type is {kind!r}, got {shown(rope[key])}"
        )
    for key in required:
        if key not in rope:
            raise ValueError(f"{key} must be given where rope_type is {kind!r}, got none")
    if kind == "proportional":  # whose part is one of the pairs, not of the head
        part = 1.0
    elif family.rotary_part is None:
        one_of(rope, "partial_rotary_factor", (1.0, 1, None))
        part = 1.0
    else:
        part = read_number(rope, "partial_rotary_factor", family.rotary_part)
    theta = read_number(rope, "rope_theta", 10_000.0)
    if ORIGINAL in flat:  # at the top level it counts, as in transformers
        rope[ORIGINAL] = flat[ORIGINAL]
    # With all other keys, for `_original_length`.
    return Rope(theta, part, read_scaling({**flat, **rope, "rope_theta": theta}))


def _llama3(rope: Mapping[str, Any]) -> RopeScaling:
    scaling = RopeScaling(
        factor=read_number(rope, "factor", 1.0),
        low_frequency=read_number(rope, "low_freq_factor", 1.0),
        high_frequency=read_number(rope, "high_freq_factor", 4.0),
        original_length=_original_length(rope),
    )
    if scaling.high_frequency <= scaling.low_frequency:
        raise ValueError(
            f"high_freq_factor must be above low_freq_factor, {scaling.low_frequency}, "
            f"got {scaling.high_frequency}"
        )
    return scaling


def _original_length(rope: Mapping[str, Any]) -> int:
    """Read the length before scaling; where there is none, that of the model is taken for it."""
    return read_size(rope, ORIGINAL if ORIGINAL in rope else "max_position_embeddings")


def _yarn(rope: Mapping[str, Any]) -> YarnScaling:
    """Read YaRN's keys; the lengths that they leave out are those of the model."""
    length = _original_length(rope)
    if rope["factor"] is None:
        factor = read_size(rope, "max_position_embeddings") / length
    else:
        factor = read_number(rope, "factor", 1.0)
    betas = {
        name: default if rope.get(name) is None else read_number(rope, name, default)
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    }
    if betas["beta_fast"] < betas["beta_slow"]:
        raise ValueError(
            f"beta_fast must be at least beta_slow, {betas['beta_slow']}, got {betas['beta_fast']}"
        )
    if rope["rope_theta"] <= 1:
        raise ValueError(
            f"rope_theta must be above 1 where rope_type is 'yarn', got {rope['rope_theta']}"
        )
    truncate = read_flag({"truncate": True, **rope}, "truncate")
    growth = 0.0
    if rope.get(_GROWTH) is not None:
        growth = read_number(rope, _GROWTH, 0.0)
    sharper, logit_factor = _attention_factor(rope, factor), 1.0
    if rope.get("kv_lora_rank") is not None and rope.get(_ALL):  # only latent attention has it
        logit_factor = _mscale(factor, read_number(rope, _ALL, 1.0)) ** 2
    return YarnScaling(
        factor,
        length,
        sharper,
        **betas,
        truncate=truncate,
        query_growth=growth,
        logit_factor=logit_factor,
    )


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """Read YaRN's `attention_factor`, or compute it as the paper does."""
    if rope.get("attention_factor") is not None:
        return read_number(rope, "attention_factor", 1.0)
    result = _mscale(factor)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        numerator = read_number(rope, "mscale", 1)
        denominator = read_number(rope, "mscale_all_dim", 1)
        result = _mscale(factor, numerator) / _mscale(factor, denominator)
    if rope.get("attn_factor") is not None:  # DeepSeek-R1-0528-Qwen3-8B; as vLLM reads it
        result *= read_number(rope, "attn_factor", 1)
    return result


def _mscale(factor: float, scale: float = 1.0) -> float:
    """Compute the paper's attention factor for a factor on the wavelengths."""
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def _mscale_of(factor: float, result: float) -> float:
    """Undo `_mscale`."""
    return 10 * (result - 1) / math.log(factor) if factor > 1 else 0.0


def _longrope(rope: Mapping[str, Any]) -> LongRopeScaling:
    """Read LongRoPE's lists; the attention factor follows from the lengths, as in vLLM."""

    def factors(name: str) -> tuple[float, ...]:
        if not isinstance(rope[name], list | tuple):
            raise ValueError(f"{name} must be a list of numbers, got {shown(rope[name])}")
        return tuple(read_number({name: factor}, name, 1.0) for factor in rope[name])

    length = _original_length(rope)
    if length < 2:
        raise ValueError(f"{ORIGINAL} must be at least 2, got {length}")
    short, long = map(factors, LONGROPE)
    return LongRopeScaling(short, long, length, read_size(rope, "max_position_embeddings"))


def _proportional(rope: Mapping[str, Any]) -> ProportionalScaling:
    part = read_number(rope, "partial_rotary_factor", 1.0)
    if part > 1:
        raise ValueError(f"partial_rotary_factor must be at most 1, got {part}")
    return ProportionalScaling(part)


_ReadScaling = Callable[[Mapping[str, Any]], _Scaling | None]
_SCALINGS: dict[str, tuple[Sequence[str], Sequence[str], _ReadScaling]] = {  # required, optional
    "default": ((), (), lambda _: None),
    "linear": (("factor",), (), lambda rope: LinearScaling(read_number(rope, "factor", 1.0))),
    "llama3": (_LLAMA3[:3], (ORIGINAL,), _llama3),
    "yarn": (("factor",), _YARN, _yarn),
    "longrope": (LONGROPE, (ORIGINAL,), _longrope),
    "su": (LONGROPE, (ORIGINAL,), _longrope),
    "proportional": ((), (), _proportional),
}


def full_layers_rope(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the rotary settings of full layers at its top level."""
    full, scaling = rope_by_kind(flat)[FULL], read_section(flat, "rope_scaling")
    return {**flat, "rope_parameters": full, "rope_scaling": {**full, **scaling} if scaling else {}}


def rope_by_kind(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rotary settings of full and of sliding layers."""
    by_kind = read_section(flat, "rope_parameters")
    for key in by_kind.keys() - {FULL, SLIDING}:
        raise ValueError(
            f"rope_parameters must have the keys {FULL!r} and {SLIDING!r} only, got {shown(key)}, "
            "which transformers ignores there: put it below the kind of layers that it is for"
        )
    return {kind: read_section(by_kind, kind) for kind in (FULL, SLIDING)}


def rope_entries(attention: AttentionConfig) -> dict[str, Any]:
    """Return the rotary settings of layers, as `rope_parameters` has them."""
    scaling = attention.rope_scaling
    entries = {"rope_type": "default", "rope_theta": attention.rope_theta}
    if isinstance(scaling, LinearScaling):
        entries |= {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, ProportionalScaling):
        entries |= {"rope_type": "proportional", "partial_rotary_factor": scaling.part}
    elif isinstance(scaling, LongRopeScaling):
        lists = (list(scaling.factors), list(scaling.long_factors))
        entries |= {"rope_type": "longrope", **dict(zip(LONGROPE, lists, strict=True))}
        entries[ORIGINAL] = scaling.original_length
    elif isinstance(scaling, YarnScaling):
        entries |= {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_length,
            "attention_factor": scaling.attention_factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
        }
        if scaling.query_growth:
            entries[_GROWTH] = scaling.query_growth
        usual = _mscale(scaling.factor)
        if attention.latent is not None:  # for vLLM, and for the factor on logits
            whole = math.sqrt(scaling.logit_factor)
            entries |= {
                "mscale": _mscale_of(scaling.factor, scaling.attention_factor * whole),
                _ALL: _mscale_of(scaling.factor, whole),
            }
        elif scaling.attention_factor != usual:
            # vLLM reads this ratio and not `attention_factor`; transformers does the reverse.
            entries["attn_factor"] = scaling.attention_factor / usual
    elif scaling is not None:
        values = dataclasses.astuple(scaling)
        entries |= {"rope_type": "llama3", **dict(zip(_LLAMA3, values, strict=True))}
    return entries
