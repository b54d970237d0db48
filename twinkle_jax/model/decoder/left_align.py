"""Rows of a batch with their tokens at the front, whatever side they were padded on.

Inside the decoder the tokens of a row are moved to the front, in order. What follows a token can
then never change it: causal attention, convolutions and recurrences need no padding mask, a row
computes what it computes alone, and both paddings give the same numbers.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped


def to_front(
    values: Shaped[Array, "batch time"], mask: Bool[Array, "batch time"]
) -> Shaped[Array, "batch time"]:
    """Move what the mask keeps to the front of each row, in order, and write 0 behind it."""
    order = jnp.argsort(~mask, axis=1, stable=True)
    kept = jnp.take_along_axis(mask, order, axis=1)
    moved = jnp.take_along_axis(values, order, axis=1)
    return jnp.where(kept, moved, jnp.zeros_like(moved))


def from_front(
    values: Float[Array, "batch time width"], mask: Bool[Array, "batch time"]
) -> Float[Array, "batch time width"]:
    """Undo `to_front` for rows of vectors: each goes back to its column, 0 where masked out."""
    column = jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)
    placed = jnp.take_along_axis(values, column[:, :, None], axis=1)
    return jnp.where(mask[:, :, None], placed, jnp.zeros_like(placed))


def number_segments(segment_ids: Int[Array, "batch time"]) -> Int[Array, "batch time"]:
    """Number the runs of equal ids from 0, so that an id that comes back is another segment."""
    changes = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return jnp.cumsum(changes, axis=1, dtype=jnp.int32)


def segment_positions(numbers: Int[Array, "batch time"]) -> Int[Array, "batch time"]:
    """Count from 0 at the start of each segment."""
    columns = jnp.arange(numbers.shape[1], dtype=jnp.int32)[None]
    starts = jnp.pad(numbers[:, 1:] != numbers[:, :-1], ((0, 0), (1, 0)))
    latest = jax.lax.cummax(jnp.where(starts, columns, 0), axis=1)
    return columns - latest
