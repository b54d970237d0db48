"""A fixed number of slots on the device: filled with new rows, and run until some have ended."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from twinkle_jax.model.decoder.attention_choice import AttentionImplementation
from twinkle_jax.model.decoder.cache import Cache
from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.decode import prefill
from twinkle_jax.model.decoder.parameters import Params
from twinkle_jax.sampler.completions import LENGTH
from twinkle_jax.sampler.decoding.decoding_layout import spread_rows
from twinkle_jax.sampler.decoding.rows import Rows, advance, begin, for_many_steps, read_prompts
from twinkle_jax.sampler.drawing.sampling import Sampling

_STATIC = ("config", "compute_dtype", "attention", "mesh")


@partial(jax.jit, static_argnames=("slots", "time", "max_length", "new", *_STATIC))
def empty_slots(
    params: Params,
    key: jax.Array,
    *,
    config: DecoderConfig,
    slots: int,
    time: int,
    max_length: int,
    new: int,
    compute_dtype: DTypeLike | None,
    attention: AttentionImplementation | None,
    mesh: Mesh | None,
) -> Rows:
    """Make slots that hold nothing and wait for rows."""

    def one() -> Cache:
        read = jnp.zeros((1, 1), jnp.int32)
        return prefill(
            params,
            config,
            read,
            max_length=max_length,
            compute_dtype=compute_dtype,
            attention=attention,
        )[1]

    def many(x: jax.ShapeDtypeStruct, axis: int) -> Array:
        return jnp.zeros((*x.shape[:axis], slots, *x.shape[axis + 1 :]), x.dtype)

    shapes = jax.eval_shape(one)
    layers = jax.tree.map(partial(many, axis=1), shapes.layers)
    nothing = jnp.zeros(slots, jnp.int32)
    rows = begin(
        Cache(layers, nothing),
        nothing,
        jnp.zeros((slots, time), jnp.int32),
        jnp.broadcast_to(key, (slots,)),
        nothing,
        new=new,
        vocab=config.vocab_size,
        mesh=mesh,
    )
    return _reusable(spread_rows(rows._replace(reasons=nothing + LENGTH), mesh))


@partial(jax.jit, static_argnames=("max_length", *_STATIC), donate_argnames="rows")
def fill_slots(
    params: Params,
    rows: Rows,
    prompts: Int[Array, "prompts time"],
    mask: Bool[Array, "prompts time"],
    source: Int[Array, " new"],
    slot: Int[Array, " new"],
    keys: jax.Array,
    limits: Int[Array, " new"],
    *,
    config: DecoderConfig,
    max_length: int,
    compute_dtype: DTypeLike | None,
    attention: AttentionImplementation | None,
    mesh: Mesh | None,
) -> Rows:
    """Read prompts, and put rows that begin with prompt `source` into slots; none beyond the last.

    All of a slot is written, so that nothing of the row before remains.
    """
    fresh = read_prompts(
        params,
        config,
        prompts,
        mask,
        source,
        keys,
        limits,
        max_length=max_length,
        new=rows.tokens.shape[1],
        compute_dtype=compute_dtype,
        attention=attention,
        mesh=mesh,
    )
    layers = jax.tree.map(
        lambda old, new: old.at[:, slot].set(new.astype(old.dtype), mode="drop"),
        rows.cache.layers,
        fresh.cache.layers,
    )
    others = jax.tree.map(
        lambda old, new: old.at[slot].set(new, mode="drop"),
        *(x._replace(cache=Cache({}, x.cache.length)) for x in (rows, fresh)),
    )
    return _reusable(spread_rows(others._replace(cache=Cache(layers, others.cache.length)), mesh))


@partial(jax.jit, static_argnames=("config", "compute_dtype", "mesh"), donate_argnames="rows")
def run_slots(
    params: Params,
    rows: Rows,
    sampling: Sampling,
    enough: Int[Array, ""],
    *,
    config: DecoderConfig,
    compute_dtype: DTypeLike | None,
    mesh: Mesh | None,
) -> Rows:
    """Go on until so many slots, or all of them, have ended."""
    weights = for_many_steps(params, mesh)

    def goes_on(rows: Rows) -> Array:
        running = jnp.sum(rows.running, dtype=jnp.int32)
        return (running > 0) & (len(rows.reasons) - running < enough)

    def step(rows: Rows) -> Rows:
        return spread_rows(advance(weights, config, rows, sampling, compute_dtype, mesh), mesh)

    rows = jax.lax.while_loop(goes_on, step, rows)
    return _reusable(rows)


def _reusable(rows: Rows) -> Rows:
    """Say to JAX's check of keys that each is used again on purpose, for other positions."""
    return rows._replace(keys=jax.random.clone(rows.keys))
