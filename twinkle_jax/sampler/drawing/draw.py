r"""Draw from a softmax with one uniform number: first a block of the vocabulary, then inside it.

The inverse of a running sum in float32 is wrong for rare tokens: beside 0.5, an increment of 1e-9
is lost, and of 1e-7 mangled. Here a running sum is kept in two parts, whole multiples of $2^{-30}$
as integers and the rest in float32, and the uniform number has 62 bits for each of the two choices.
What is rare is then drawn as often as it should be.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

PerRow = Float[Array, " rows"]
Logits = Float[Array, "rows vocab"]
_ONE = 2**30


def block_size(vocab: int) -> int:
    """Make about as many blocks as tokens in a block; a power of two."""
    return max(16, 1 << ((vocab - 1).bit_length() + 1) // 2)


def block_weights(
    logits: Logits, maximum: PerRow, threshold: PerRow | None = None
) -> Float[Array, "rows blocks"]:
    """Sum the weights, exp(logit - maximum), of each block: those at the threshold and above."""
    rows, vocab = logits.shape
    size = block_size(vocab)
    count, rest = divmod(vocab, size)
    weights = _weights(logits[:, : vocab - rest], maximum, threshold)
    blocks = jnp.sum(weights.reshape(rows, count, size), axis=2)
    if not rest:
        return blocks
    # A last block that is not full is summed apart: padding would copy all logits.
    weights = _weights(logits[:, vocab - rest :], maximum, threshold)
    return jnp.concatenate([blocks, jnp.sum(weights, axis=1, keepdims=True)], axis=1)


def draw(
    bits: UInt32[Array, "rows 4"],
    logits: Logits,
    maximum: PerRow,
    blocks: Float[Array, "rows blocks"],
    threshold: PerRow | None = None,
) -> Int[Array, " rows"]:
    """Draw a token in proportion to its weight.

    Args:
        bits: a uniform number of 124 bits in each row.
        logits: of the tokens.
        maximum: the largest logit of each row.
        blocks: what [`block_weights`] gives for the same logits and threshold.
        threshold: the least weight that may be drawn; None for all.

    Returns:
        The tokens. Every one of them has a weight above zero, where any has.
    """
    size = block_size(logits.shape[1])
    start = _pick(blocks, bits[:, :2]) * size
    columns = start[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    inside = jnp.take_along_axis(logits, columns, axis=1, mode="fill", fill_value=-jnp.inf)
    chosen = start + _pick(_weights(inside, maximum, threshold), bits[:, 2:])
    return jnp.minimum(chosen, logits.shape[1] - 1)  # a row of NaN may point anywhere


def _weights(logits: Logits, maximum: PerRow, threshold: PerRow | None) -> Logits:
    weights = jnp.exp(logits - maximum[:, None])
    return weights if threshold is None else jnp.where(weights >= threshold[:, None], weights, 0)


def _pick(
    weights: Float[Array, "rows items"], bits: UInt32[Array, "rows 2"]
) -> Int[Array, " rows"]:
    r"""Find the first item at which the running sum passes $u$ times the total."""
    shares = weights / jnp.sum(weights, axis=1, keepdims=True) * _ONE
    floors = jnp.floor(shares)
    whole = jnp.cumsum(floors.astype(jnp.int32), axis=1)
    rest = jnp.cumsum(shares - floors, axis=1)
    u_whole = (bits[:, :1] >> 2).astype(jnp.int32)
    u_rest = bits[:, 1:].astype(jnp.float32) * 2.0**-32
    # Rounding makes the total a little more or less than one, and u is stretched to it.
    excess = (whole[:, -1:] - _ONE).astype(jnp.float32) + rest[:, -1:]
    u_rest = u_rest + excess * (u_whole.astype(jnp.float32) / _ONE)
    passed: Bool[Array, "rows items"] = (whole - u_whole).astype(jnp.float32) + (rest - u_rest) > 0
    passed = passed & (weights > 0)
    fallback = jnp.argmax(weights, axis=1)  # where rounding leaves nothing beyond u
    index = jnp.where(jnp.any(passed, axis=1), jnp.argmax(passed, axis=1), fallback)
    return index.astype(jnp.int32)


def random_bits(keys: jax.Array, positions: Int[Array, " rows"]) -> UInt32[Array, "rows 4"]:
    """Give a row's uniform number for a position: its key and the position decide, nothing else."""

    def one(key: jax.Array, position: Array) -> Array:
        return jax.random.bits(jax.random.fold_in(key, position), (4,), jnp.uint32)

    return jax.vmap(one)(keys, positions)
