"""From logits to the next token of each row, and how probable it was."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from twinkle_jax.model.decoder.layers import output_matrix
from twinkle_jax.model.decoder.parameters import Params
from twinkle_jax.sampler.drawing.draw import block_weights, draw, random_bits
from twinkle_jax.sampler.drawing.filters import kept_weight, penalise
from twinkle_jax.sampler.drawing.sampling import Sampling

PerRow = Float[Array, " rows"]
Logits = Float[Array, "rows vocab"]


class NextToken(NamedTuple):
    """One token per row; its log-probability in the whole distribution and in what filters left."""

    token: Int[Array, " rows"]
    logprob: PerRow
    sampling_logprob: PerRow


def scaled_logits(
    params: Params, hidden: Float[Array, "rows width"], temperature: Float[Array, ""]
) -> Logits:
    """Compute logits over the temperature, with the rounding of the trainer's log-probabilities."""
    scale = 1 / jnp.where(temperature > 0, temperature, 1)
    head = output_matrix(params).astype(hidden.dtype)
    if hidden.dtype == jnp.float32:
        return jnp.matmul(hidden * scale, head, preferred_element_type=jnp.float32)
    return jnp.matmul(hidden, head, preferred_element_type=jnp.float32) * scale


def next_token(
    logits: Logits,
    sampling: Sampling,
    keys: jax.Array,
    positions: Int[Array, " rows"],
    seen: tuple[Int[Array, "rows time"], ...],
) -> NextToken:
    """Choose a token in each row.

    Args:
        logits: already divided by the temperature.
        sampling: as arrays.
        keys: one per row.
        positions: how many tokens the completion of each row has.
        seen: tokens that rows already have; ids outside the vocabulary are none.

    Returns:
        The tokens. At temperature 0 they are certain, so `sampling_logprob` is 0, and `logprob` is
        taken at temperature 1.
    """
    t, k, p = (jnp.asarray(x) for x in (sampling.temperature, sampling.top_k, sampling.top_p))
    bits = random_bits(keys, positions)
    maximum = jnp.max(logits, axis=1)
    blocks = block_weights(logits, maximum)
    log_total = maximum + jnp.log(jnp.sum(blocks, axis=1))

    def from_all() -> tuple[Array, Array]:
        token = draw(bits, logits, maximum, blocks)
        return token, _at(logits, token) - log_total

    def from_some() -> tuple[Array, Array]:
        return _restricted(logits, sampling, bits, seen)

    every = (
        (t > 0)
        & ((k <= 0) | (k >= logits.shape[1]))
        & (p >= 1)
        & (sampling.min_p <= 0)
        & (sampling.repetition_penalty == 1)
    )
    token, sampling_logprob = jax.lax.cond(every, from_all, from_some)
    return NextToken(token, _at(logits, token) - log_total, sampling_logprob)


def _restricted(
    logits: Logits,
    sampling: Sampling,
    bits: UInt32[Array, "rows 4"],
    seen: tuple[Int[Array, "rows time"], ...],
) -> tuple[Int[Array, " rows"], PerRow]:
    """Choose among what the penalty and the filters leave."""
    penalty = jnp.asarray(sampling.repetition_penalty)
    logits = jax.lax.cond(
        penalty == 1,
        lambda: logits,
        lambda: penalise(logits, jnp.concatenate(seen, axis=1), penalty),
    )
    maximum = jnp.max(logits, axis=1)

    def drawn() -> tuple[Array, Array]:
        threshold = kept_weight(logits, maximum, sampling)
        blocks = block_weights(logits, maximum, threshold)
        token = draw(bits, logits, maximum, blocks, threshold)
        return token, _at(logits, token) - maximum - jnp.log(jnp.sum(blocks, axis=1))

    def likeliest() -> tuple[Array, Array]:
        token = jnp.argmax(logits, axis=1).astype(jnp.int32)
        return token, _at(logits, token) * 0  # NaN stays NaN

    return jax.lax.cond(jnp.asarray(sampling.temperature) > 0, drawn, likeliest)


def _at(logits: Logits, token: Int[Array, " rows"]) -> PerRow:
    return jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
