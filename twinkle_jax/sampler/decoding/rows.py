"""The rows that are being completed: what each of them needs for its next token, and the step."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.model.decoder.attention_choice import AttentionImplementation, backend_of
from twinkle_jax.model.decoder.cache import Cache, Held, take_rows, unstack_layers, with_room
from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.decode import decode_step, prefill
from twinkle_jax.model.decoder.parameters import Params
from twinkle_jax.sampler.completions import LENGTH, STOP
from twinkle_jax.sampler.drawing.next_token import next_token, scaled_logits
from twinkle_jax.sampler.drawing.sampling import Sampling

RUNNING = 0  # the reason of a row that has not ended


class Rows(NamedTuple):
    """Rows in the middle of their completions.

    Attributes:
        pending: the last token of each row, which the cache does not hold yet.
        cache: all tokens before it.
        prompts: tokens of the prompt, elsewhere the size of the vocabulary.
        tokens: the completion so far, elsewhere the size of the vocabulary.
        logprobs: of these tokens, in the whole distribution.
        sampling_logprobs: of these tokens, in what the filters left.
        lengths: tokens drawn so far.
        limits: the most tokens that a row may get.
        reasons: why a row has ended; 0 while it goes on.
        keys: where the randomness of a row comes from.
    """

    pending: Int[Array, " rows"]
    cache: Cache
    prompts: Int[Array, "rows time"]
    tokens: Int[Array, "rows new"]
    logprobs: Float[Array, "rows new"]
    sampling_logprobs: Float[Array, "rows new"]
    lengths: Int[Array, " rows"]
    limits: Int[Array, " rows"]
    reasons: Int[Array, " rows"]
    keys: jax.Array

    @property
    def running(self) -> Bool[Array, " rows"]:
        """Rows that have not ended."""
        return self.reasons == RUNNING


def for_many_steps(held: Held, mesh: Mesh | None) -> Held:
    """Lay layers of a cache or of parameters as the devices read them: on a GPU one by one."""
    return unstack_layers(held) if backend_of(mesh) == "gpu" else held


def begin(
    cache: Cache,
    pending: Int[Array, " rows"],
    prompts: Int[Array, "rows time"],
    keys: jax.Array,
    limits: Int[Array, " rows"],
    *,
    new: int,
    vocab: int,
    mesh: Mesh | None,
) -> Rows:
    """Start rows whose prompts, but for their last token, a cache holds."""
    zeros = jnp.zeros((len(pending), new), jnp.float32)
    nothing = jnp.zeros_like(pending)
    return Rows(
        pending=pending,
        cache=for_many_steps(cache, mesh),
        prompts=prompts,
        tokens=jnp.full((len(pending), new), vocab, jnp.int32),
        logprobs=zeros,
        sampling_logprobs=zeros,
        lengths=nothing,
        limits=limits,
        reasons=nothing,
        keys=keys,
    )


def read_prompts(
    params: Params,
    config: DecoderConfig,
    prompts: Int[Array, "prompts time"],
    mask: Bool[Array, "prompts time"],
    source: Int[Array, " rows"],
    keys: jax.Array,
    limits: Int[Array, " rows"],
    *,
    max_length: int,
    new: int,
    compute_dtype: DTypeLike | None,
    attention: AttentionImplementation | None,
    mesh: Mesh | None,
) -> Rows:
    """Read prompts, and start a row behind prompt `source` for each entry of it."""
    read, last = split_last(prompts, mask, config.vocab_size)
    _, cache = prefill(
        params,
        config,
        prompts,
        read,
        max_length=prompts.shape[1],
        compute_dtype=compute_dtype,
        attention=attention,
        mesh=mesh,
    )
    return begin(
        with_room(take_rows(cache, source), max_length),
        last[source],
        jnp.where(mask, prompts, config.vocab_size)[source],
        keys,
        limits,
        new=new,
        vocab=config.vocab_size,
        mesh=mesh,
    )


def advance(
    params: Params,
    config: DecoderConfig,
    rows: Rows,
    sampling: Sampling,
    compute_dtype: DTypeLike | None,
    mesh: Mesh | None,
) -> Rows:
    """Read the pending token of each row that goes on, and choose the next one."""
    running = rows.running
    hidden, cache = decode_step(
        params,
        config,
        rows.pending,
        rows.cache,
        running,
        compute_dtype=compute_dtype,
        mesh=mesh,
    )
    chosen = next_token(
        scaled_logits(params, hidden, jnp.asarray(sampling.temperature)),
        sampling,
        rows.keys,
        rows.lengths,
        (rows.prompts, rows.tokens),
    )
    column = jnp.where(running, rows.lengths, rows.tokens.shape[1])  # beyond the end: not written

    put = jax.vmap(lambda row, column, value: row.at[column].set(value, mode="drop"))
    lengths = rows.lengths + running.astype(jnp.int32)
    stops = jnp.asarray(sampling.stop_tokens)
    stopped = jnp.any(chosen.token[:, None] == stops[None], axis=1)
    reason = jnp.where(stopped, STOP, jnp.where(lengths >= rows.limits, LENGTH, RUNNING))
    return rows._replace(
        pending=jnp.where(running, chosen.token, rows.pending),
        cache=cache,
        tokens=put(rows.tokens, column, chosen.token),
        logprobs=put(rows.logprobs, column, chosen.logprob),
        sampling_logprobs=put(rows.sampling_logprobs, column, chosen.sampling_logprob),
        lengths=lengths,
        reasons=jnp.where(running, reason, rows.reasons),
    )


def split_last(
    prompts: Int[Array, "prompts time"], mask: Bool[Array, "prompts time"], vocab: int
) -> tuple[Bool[Array, "prompts time"], Int[Array, " prompts"]]:
    """Take the last token off each prompt: the mask without it, and the token.

    A prompt without tokens gets one outside the vocabulary, and so only NaN.
    """
    columns = jnp.arange(prompts.shape[1], dtype=jnp.int32)[None]
    last = jnp.max(jnp.where(mask, columns, -1), axis=1)
    token = jnp.take_along_axis(prompts, jnp.maximum(last, 0)[:, None], axis=1)[:, 0]
    return mask & (columns != last[:, None]), jnp.where(last >= 0, token, vocab)
