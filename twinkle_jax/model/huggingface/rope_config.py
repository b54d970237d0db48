"""The rotary part of a `config.json`: three spellings, and the one that transformers reads."""

from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any, NamedTuple

from twinkle_jax.model.decoder.config import AttentionConfig, LinearScaling, RopeScaling
from twinkle_jax.model.decoder.families import Family
from twinkle_jax.model.huggingface.config_values import number, only, section, shown, size

_EVERY = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
SILENT = {"mrope_section", "mrope_interleaved"}  # of images: text has one position a token
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class Rope(NamedTuple):
    """Base of the wavelengths, rotated part of a head, and what stretches the wavelengths."""

    theta: float
    part: float
    scaling: RopeScaling | LinearScaling | None


def read_rope(flat: Mapping[str, Any], family: Family) -> Rope:
    """Read `rope_scaling`, else `rope_parameters`; what it lacks stands beside it."""
    name = "rope_scaling" if section(flat, "rope_scaling") else "rope_parameters"
    rope = section(flat, "rope_parameters") if name == "rope_parameters" else section(flat, name)
    rope = {key: flat[key] for key in ("rope_theta", "partial_rotary_factor") if key in flat} | rope
    if "rope_type" not in rope and "type" in rope:
        rope["rope_type"] = rope["type"]
    kind = only(rope, "rope_type", family.rope_types)
    known = _EVERY | (set(_LLAMA3) if kind == "llama3" else set())
    known |= {"factor"} if kind == "linear" else set()
    known |= SILENT if family.rotary_part is not None else set()
    for key in rope.keys() - known:
        raise ValueError(
            f"{name} must have no key {key!r} where rope_type is {kind!r}, got {shown(rope[key])}"
        )
    if family.rotary_part is None:
        only(rope, "partial_rotary_factor", (1.0, 1, None))
        part = 1.0
    else:
        part = number(rope, "partial_rotary_factor", family.rotary_part)
    theta = number(rope, "rope_theta", 10_000.0)
    return Rope(theta, part, _SCALINGS[kind](rope))


def _llama3(rope: Mapping[str, Any]) -> RopeScaling:
    for key in _LLAMA3:
        if key not in rope:
            raise ValueError(f"{key} must be there where rope_type is 'llama3', got none")
    scaling = RopeScaling(
        factor=number(rope, "factor", 1.0),
        low_frequency=number(rope, "low_freq_factor", 1.0),
        high_frequency=number(rope, "high_freq_factor", 4.0),
        original_length=size(rope, "original_max_position_embeddings"),
    )
    if scaling.high_frequency <= scaling.low_frequency:
        raise ValueError(
            f"high_freq_factor must be above low_freq_factor, {scaling.low_frequency}, "
            f"got {scaling.high_frequency}"
        )
    return scaling


def _linear(rope: Mapping[str, Any]) -> LinearScaling:
    if "factor" not in rope:
        raise ValueError("factor must be there where rope_type is 'linear', got none")
    return LinearScaling(number(rope, "factor", 1.0))


_SCALINGS: dict[str, Callable[[Mapping[str, Any]], RopeScaling | LinearScaling | None]] = {
    "default": lambda _: None,
    "linear": _linear,
    "llama3": _llama3,
}


def rope_entries(attention: AttentionConfig) -> dict[str, Any]:
    """Write what `read_rope` reads, but for the rotated part."""
    entries = {"rope_type": "default", "rope_theta": attention.rope_theta}
    scaling = attention.rope_scaling
    if scaling is None:
        return entries
    if isinstance(scaling, LinearScaling):
        return entries | {"rope_type": "linear", "factor": scaling.factor}
    return entries | {"rope_type": "llama3"} | dict(zip(_LLAMA3, astuple(scaling), strict=True))
