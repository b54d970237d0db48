"""Which layers of a `config.json` are full, linear or sliding, and what sliding ones see."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from twinkle_jax.model.decoder.config import FULL, LINEAR, SLIDING, Window
from twinkle_jax.model.decoder.families import Family
from twinkle_jax.model.huggingface.config_values import MOST_LAYERS, flag, section, shown, size
from twinkle_jax.model.huggingface.rope_config import read_rope


def read_layer_kinds(flat: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    """Read the list, or what says which layers it would have."""
    layers = size(flat, "num_hidden_layers", most=MOST_LAYERS)
    kinds = flat.get("layer_types")
    if kinds is None:
        _refuse_windows(flat, layers)
        every = size(flat, "full_attention_interval", 4) if family.linear_layers else 1
        others = LINEAR
        if family.window_pattern:
            every, others = size(flat, "sliding_window_pattern", family.window_pattern), SLIDING
        kinds = [others if (i + 1) % every else FULL for i in range(layers)]
    allowed = [FULL]
    allowed += [LINEAR] if family.linear_layers else []
    allowed += [SLIDING] if family.window_pattern else []
    known = isinstance(kinds, list | tuple) and all(kind in allowed for kind in kinds)
    if not known or len(kinds) != layers:
        raise ValueError(
            f"layer_types must be a list of {layers} (num_hidden_layers) out of {allowed}, "
            f"got {shown(kinds)}"
        )
    return tuple(kinds)


def _refuse_windows(flat: Mapping[str, Any], layers: int) -> None:
    """Refuse sliding windows, unless no layer has one."""
    if not flag(flat, "use_sliding_window", False) or flat.get("sliding_window", 4096) is None:
        return
    first = flat.get("max_window_layers", 28)
    if type(first) is not int or first < layers:
        raise ValueError(
            f"max_window_layers must be at least num_hidden_layers, {layers}, where "
            f"use_sliding_window is true, got {shown(first)}: windows are not built"
        )


def full_rope(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Give the configuration with the rotary part of full layers in the place of both kinds'."""
    full, scaling = _by_kind(flat)[FULL], section(flat, "rope_scaling")
    return {**flat, "rope_parameters": full, "rope_scaling": {**full, **scaling} if scaling else {}}


def read_window(flat: Mapping[str, Any], family: Family) -> Window:
    """Read how many tokens sliding layers see, and their rotary base; nothing else is built."""
    own = {"rope_theta": flat.get("rope_local_base_freq", 10_000.0)}
    own["rope_parameters"] = _by_kind(flat)[SLIDING]
    rope = read_rope(own, dataclasses.replace(family, rope_types=("default",)))
    return Window(size(flat, "sliding_window", 4096), rope.theta)


def _by_kind(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    both = section(flat, "rope_parameters")
    for key in both.keys() - {FULL, SLIDING}:
        raise ValueError(
            f"rope_parameters must have the keys {FULL!r} and {SLIDING!r} only, got {shown(key)}"
        )
    return {kind: section(both, kind) for kind in (FULL, SLIDING)}
