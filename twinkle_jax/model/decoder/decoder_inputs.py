"""What the layers take of a batch: tokens at the front of their rows, positions, segments."""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.left_align import number_segments, segment_positions, to_front
from twinkle_jax.model.decoder.rotary import RotaryTable, rotary_tables


class DecoderInputs(NamedTuple):
    """Tokens at the front of their rows, and what the layers need to know about them."""

    tokens: Int[Array, "batch time"]
    mask: Bool[Array, "batch time"]
    rotary: tuple[RotaryTable, ...]
    segment_ids: Int[Array, "batch time"] | None


def decoder_inputs(
    config: DecoderConfig,
    tokens: Int[Array, "batch time"],
    mask: Bool[Array, "batch time"] | None,
    positions: Int[Array, "batch time"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
) -> DecoderInputs:
    """Check the arrays, move each row to column 0 and compute the rotary table."""
    _check(tokens, {"mask": mask, "positions": positions, "segment_ids": segment_ids})
    if mask is None:
        kept = jnp.ones(tokens.shape, bool)
    else:
        columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        kept = columns < jnp.sum(mask, axis=1, dtype=jnp.int32)[:, None]
        tokens = to_front(tokens, mask)
        segment_ids = None if segment_ids is None else to_front(segment_ids, mask)
        positions = None if positions is None else to_front(positions, mask)
    segment_ids = None if segment_ids is None else number_segments(segment_ids)
    if positions is None and segment_ids is not None:
        positions = segment_positions(segment_ids)
    elif positions is None:
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    rotary = rotary_tables(positions, config.attention)
    return DecoderInputs(tokens, kept, rotary, segment_ids)


def _check(tokens: Array, others: Mapping[str, Array | None]) -> None:
    if tokens.ndim != 2:
        raise ValueError(f"tokens must have the shape [batch, time], got {tokens.shape}")
    for name, value in {"tokens": tokens, **others}.items():
        if value is None:
            continue
        if value.shape != tokens.shape:
            raise ValueError(
                f"{name} must have the shape of tokens, {tokens.shape}, got {value.shape}"
            )
        kind, word = (jnp.bool_, "bool") if name == "mask" else (jnp.integer, "integers")
        if not jnp.issubdtype(value.dtype, kind):
            raise TypeError(f"{name} must be {word}, got {value.dtype}")
