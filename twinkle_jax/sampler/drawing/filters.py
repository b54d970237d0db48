r"""Which tokens may be drawn, without sorting the vocabulary.

Every filter keeps the tokens whose weight, $w = e^{z - \max z}$, is at least some threshold. Floats
that are not negative are ordered as their bits are, so thirty halvings of an interval of integers
find a threshold exactly. What ties with the last token kept is kept too.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from twinkle_jax.sampler.drawing.sampling import Sampling

PerRow = Float[Array, " rows"]
Logits = Float[Array, "rows vocab"]
Scalar = Float[Array, ""]


def kept_weight(logits: Logits, maximum: PerRow, sampling: Sampling) -> PerRow:
    """Find the least weight that top-k, top-p and min-p, in this order, leave in each row."""
    weights = jnp.exp(logits - maximum[:, None])
    threshold = jnp.zeros_like(maximum)
    k, p = jnp.asarray(sampling.top_k), jnp.asarray(sampling.top_p)
    threshold = jax.lax.cond(
        (k > 0) & (k < logits.shape[1]), lambda: _top_k(weights, k), lambda: threshold
    )
    threshold = jax.lax.cond(p < 1, lambda: _top_p(weights, threshold, p), lambda: threshold)
    return jnp.maximum(threshold, sampling.min_p)


def penalise(logits: Logits, tokens: Int[Array, "rows time"], penalty: Scalar) -> Logits:
    """Make tokens that a row already has less likely; ids outside the vocabulary are no tokens."""

    def row(logits: Float[Array, " vocab"], tokens: Int[Array, " time"]) -> Array:
        found = logits.at[tokens].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        found = jnp.where(found < 0, found * penalty, found / penalty)
        return logits.at[tokens].set(found, mode="drop", wrap_negative_indices=False)

    return jax.vmap(row)(logits, tokens)


def _top_k(weights: Logits, k: Int[Array, ""]) -> PerRow:
    def enough(threshold: PerRow) -> Array:
        return jnp.sum(weights >= threshold[:, None], axis=1, dtype=jnp.int32) >= k

    return _largest(enough, jnp.zeros_like(weights[:, 0]))


def _top_p(weights: Logits, least: PerRow, p: Scalar) -> PerRow:
    """Keep the fewest of the largest weights whose share of those at `least` and above is p."""

    def mass(threshold: PerRow) -> PerRow:
        return jnp.sum(jnp.where(weights >= threshold[:, None], weights, 0), axis=1)

    target = p * mass(least)
    return _largest(lambda threshold: mass(threshold) >= target, least)


def _largest(holds: Callable[[PerRow], Array], least: PerRow) -> PerRow:
    """Find the largest weight in [least, 1] at which something holds that holds at the least."""

    def bits(x: PerRow) -> Int[Array, " rows"]:
        return jax.lax.bitcast_convert_type(x, jnp.int32)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low + 1) // 2
        yes = holds(jax.lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(yes, middle, low), jnp.where(yes, high, middle - 1)

    bounds = bits(least), bits(jnp.ones_like(least))
    low, _ = jax.lax.fori_loop(0, 30, halve, bounds)  # 1.0 is less than 2^30 bits above 0.0
    return jax.lax.bitcast_convert_type(low, jnp.float32)
