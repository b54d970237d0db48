"""The log-softmax of `hidden @ head` at given tokens, one tile of logits at a time.

A tile is a chunk of tokens times a block of the vocabulary. For each block, all chunks are visited.
The forward pass keeps the sums of an online softmax for each token. The backward pass recomputes
the tiles and turns them into gradients by these sums. It finishes one block of the head's gradient
before the next, so that only one block is summed in a wider type.

Two things are for the compiler. The loop over blocks is unrolled: an operand of a compiled loop has
a fixed layout, and a head that is a transposed embedding would be copied into it. And the start of
a block is an output of the loop over the chunks of the block before: were it known earlier, the
compiler would slice all blocks at once, which is the same copy in pieces.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

LARGEST_TILE = 2**24  # logits: 64 MiB in float32
SMALLEST_TILE = 2**20

Head = Float[Array, "feature vocab"]
OverTime = Float[Array, " time"]
Tile = Float[Array, "time vocab"]
Index = Int[Array, ""]


class Tiling(NamedTuple):
    """Sizes of tiles: `chunk` tokens, times each of `widths` columns."""

    chunk: int
    widths: tuple[int, ...]


def tiling(time: int, feature: int, vocab: int, chunk_size: int | None) -> Tiling:
    """Choose sizes so that a tile is a small part of the logits, and a block of the head."""
    # With few logits, masked ones in the last chunk cost more than one chunk more.
    few = chunk_size is None and time * vocab <= SMALLEST_TILE
    largest = min(time, chunk_size or min(1024, -(-time // (3 if few else 2))))
    chunks = -(-time // largest)
    rows = -(-time // (8 * chunks)) * 8
    rows = rows if few and largest >= 8 else min(rows, largest)
    tile = min(max(time * vocab // 48, SMALLEST_TILE), LARGEST_TILE)
    blocks = max(1 if few else 2, -(-rows * vocab // tile), -(-feature * vocab // LARGEST_TILE))
    width = -(-vocab // (128 * min(16, blocks))) * 128  # matrix units want multiples of 128
    return Tiling(rows, tuple(min(width, vocab - start) for start in range(0, vocab, width)))


class Tokens(NamedTuple):
    """Inputs of each token; `scale` is one over its temperature."""

    hidden: Float[Array, "time feature"]
    ids: Int[Array, " time"]
    scale: OverTime


class _Sums(NamedTuple):
    """An online softmax over the blocks seen so far."""

    maximum: OverTime
    total: OverTime  # of exp(logit - maximum)
    weighted: OverTime  # of exp(logit - maximum) * (logit - maximum)
    target: OverTime  # the logit of the token itself, NaN before its block


class _Slopes(NamedTuple):
    """Coefficients of each token that turn its logits into their gradient."""

    maximum: OverTime
    log_total: OverTime
    target: OverTime
    constant: OverTime
    linear: OverTime


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def tile_logprobs(
    tokens: Tokens, head: Head, count: Index, tiles: Tiling, with_entropy: bool
) -> tuple[OverTime, ...]:
    """Score the first `count` tokens: log-probabilities, and entropies if asked for."""
    return _forward(tokens, head, count, tiles, with_entropy)[0]


def _forward(
    tokens: Tokens, head: Head, count: Index, tiles: Tiling, with_entropy: bool
) -> tuple[tuple[OverTime, ...], Any]:
    def visit(index: Index, carry: tuple[_Sums, Index], block: Head, start: Index) -> Any:
        chunk, sums = _chunk((tokens, carry[0]), index, tiles)
        sums = _absorb(sums, _logits(chunk, block), chunk.ids - start, with_entropy)
        return _put(carry[0], sums, index, tiles), start + block.shape[1]

    full = partial(jnp.full_like, tokens.scale)
    sums = _Sums(full(jnp.finfo(tokens.scale.dtype).min / 2), full(0), full(0), full(jnp.nan))
    start = jnp.int32(0)
    for width in tiles.widths:
        step = partial(visit, block=_block(tokens, head, start, width), start=start)
        sums, start = lax.fori_loop(0, _chunks(count, tiles), step, (sums, start))
    log_total = jnp.log(sums.total)
    entropy = log_total - sums.weighted / sums.total
    logprobs = sums.target - sums.maximum - log_total
    residuals = (tokens, head, count, sums.maximum, log_total, entropy)
    return ((logprobs, entropy) if with_entropy else (logprobs,)), residuals


def _absorb(sums: _Sums, logits: Tile, column: Int[Array, " time"], with_entropy: bool) -> _Sums:
    maximum = jnp.maximum(sums.maximum, jnp.max(logits, axis=1))
    below, fall = logits - maximum[:, None], sums.maximum - maximum
    exps, weighted = jnp.exp(below), sums.weighted
    if with_entropy:
        weighted = jnp.exp(fall) * (weighted + fall * sums.total) + jnp.sum(exps * below, axis=1)
    total = jnp.exp(fall) * sums.total + jnp.sum(exps, axis=1)
    here = (column >= 0) & (column < logits.shape[1])
    picked = jnp.take_along_axis(logits, jnp.where(here, column, 0)[:, None], axis=1)[:, 0]
    return _Sums(maximum, total, weighted, jnp.where(here, picked, sums.target))


def _backward(
    tiles: Tiling, with_entropy: bool, residuals: Any, cotangents: tuple[OverTime, ...]
) -> tuple[Tokens, Head, None]:
    tokens, head, count, maximum, log_total, entropy = residuals
    dtype = tokens.scale.dtype
    d_logprob = jnp.where(tokens.ids < 0, jnp.nan, cotangents[0]) * tokens.scale
    d_entropy = cotangents[-1] * tokens.scale if with_entropy else jnp.zeros_like(d_logprob)
    constant = d_logprob + d_entropy * entropy
    slopes = _Slopes(maximum, log_total, d_logprob, constant, d_entropy)

    def visit(index: Index, carry: Any, block: Head, start: Index) -> Any:
        d_hidden, d_block, _ = carry
        chunk, slope, d_chunk = _chunk((tokens, slopes, d_hidden), index, tiles)
        d_logits = _d_logits(chunk, slope, block, start, with_entropy)
        d_chunk += _product(d_logits, block.T, dtype)
        # Reset here, so that one array serves all blocks: zeros per block would all be made first.
        d_block = jnp.where(index == 0, 0, d_block) + _product(chunk.hidden.T, d_logits, dtype)
        return _put(d_hidden, d_chunk, index, tiles), d_block, start + block.shape[1]

    d_hidden, d_head = jnp.zeros_like(tokens.hidden, dtype), jnp.zeros_like(head)
    d_block, start = jnp.zeros_like(head[:, : tiles.widths[0]], dtype), jnp.int32(0)
    for width in tiles.widths:
        step = partial(visit, block=_block(tokens, head, start, width), start=start)
        carry = (d_hidden, d_block[:, :width], start)
        d_hidden, d_block, end = lax.fori_loop(0, _chunks(count, tiles), step, carry)
        d_head = lax.dynamic_update_slice_in_dim(d_head, d_block.astype(head.dtype), start, axis=1)
        start = end
    d_scale = jnp.sum(d_hidden * tokens.hidden.astype(dtype), axis=1) / tokens.scale
    no_gradient: Any = None  # of integers
    return Tokens(d_hidden.astype(tokens.hidden.dtype), no_gradient, d_scale), d_head, no_gradient


tile_logprobs.defvjp(_forward, _backward)


def _d_logits(chunk: Tokens, slope: _Slopes, block: Head, start: Index, with_entropy: bool) -> Tile:
    """Compute the gradient of the logits before they are divided by the temperature."""
    logprobs = _logits(chunk, block) - slope.maximum[:, None] - slope.log_total[:, None]
    factor = slope.constant[:, None]
    if with_entropy:
        factor += slope.linear[:, None] * logprobs
    column = (chunk.ids - start)[:, None]
    hit = lax.broadcasted_iota(column.dtype, logprobs.shape, 1) == column
    d_logits = jnp.where(hit, slope.target[:, None], 0) - jnp.exp(logprobs) * factor
    return d_logits.astype(chunk.hidden.dtype)


def _logits(chunk: Tokens, block: Head) -> Tile:
    scale = chunk.scale[:, None]
    if chunk.hidden.dtype == scale.dtype:  # scale the smaller array where it is not rounded
        return _product(chunk.hidden * scale, block, scale.dtype)
    return _product(chunk.hidden, block, scale.dtype) * scale


def _product(left: jax.Array, right: jax.Array, dtype: Any) -> jax.Array:
    return jnp.matmul(left, right, preferred_element_type=dtype)


def _block(tokens: Tokens, head: Head, start: Index, width: int) -> Head:
    return lax.dynamic_slice_in_dim(head, start, width, axis=1).astype(tokens.hidden.dtype)


def _chunk(values: Any, index: Index, tiles: Tiling) -> Any:
    """Slice a chunk out of all arrays with one entry per token."""
    take = partial(
        lax.dynamic_slice_in_dim, start_index=index * tiles.chunk, slice_size=tiles.chunk
    )
    return jax.tree.map(take, values)


def _put(values: Any, chunk: Any, index: Index, tiles: Tiling) -> Any:
    put = partial(lax.dynamic_update_slice_in_dim, start_index=index * tiles.chunk, axis=0)
    return jax.tree.map(put, values, chunk)


def _chunks(count: Index, tiles: Tiling) -> Index:
    # The barrier hides a known count: the compiler unrolls a loop that runs once, and would then
    # know where the next block begins.
    return lax.optimization_barrier((count + tiles.chunk - 1) // tiles.chunk)
