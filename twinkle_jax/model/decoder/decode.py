"""Decoding one token after the other: the cache, prefill, a step, and forking rows."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.model.decoder.arithmetic import rotary_table
from twinkle_jax.model.decoder.attention import (
    AttentionImplementation,
    RotaryTable,
    attend,
    project_heads,
    project_out,
)
from twinkle_jax.model.decoder.config import FULL, DecoderConfig
from twinkle_jax.model.decoder.delta_net import DeltaState, delta_net_step
from twinkle_jax.model.decoder.forward import run
from twinkle_jax.model.decoder.inputs import decoder_inputs
from twinkle_jax.model.decoder.layers import embed, feed_forward, final_norm, norm
from twinkle_jax.model.decoder.parameters import Params


class KeyValues(NamedTuple):
    """Keys and values of the full layers of one block member; slot p holds position p of a row."""

    keys: Float[Array, "layers batch capacity groups width"]
    values: Float[Array, "layers batch capacity groups width"]


class Cache(NamedTuple):
    """Everything that decoding the next token depends on, besides parameters.

    Attributes:
        layers: by member of the repeated block, [`KeyValues`][twinkle_jax.model.KeyValues] or
            [`DeltaState`][twinkle_jax.model.DeltaState]; rows are on axis 1.
        length: tokens that each row holds.
    """

    layers: dict[str, KeyValues | DeltaState]
    length: Int[Array, " batch"]


def prefill(
    params: Params,
    config: DecoderConfig,
    tokens: Int[Array, "batch time"],
    mask: Bool[Array, "batch time"] | None = None,
    *,
    capacity: int,
    compute_dtype: DTypeLike | None = None,
    attention: AttentionImplementation | None = None,
) -> tuple[Float[Array, "batch width"], Cache]:
    """Read prompts of different lengths and remember them.

    Args:
        params: the tree that `parameter_shapes` describes.
        config: the decoder; static under `jax.jit`.
        tokens: prompts, padded on either side.
        mask: True for tokens. None: everything is a token.
        capacity: tokens that a row can hold in the end, prompt included; static.
        compute_dtype: as for [`hidden_states`][twinkle_jax.model.hidden_states].
        attention: likewise.

    Returns:
        The hidden state of each row's last token (its logits predict the first new one), and the
        cache. A row without tokens gets the hidden state 0.

    Raises:
        ValueError: if shapes differ or the prompts do not fit.
        TypeError: if tokens are not integers, or the mask not boolean.
    """
    time = tokens.shape[-1]
    if capacity < time:
        raise ValueError(f"expected capacity of at least the prompts' {time}, got {capacity}")
    inputs = decoder_inputs(config, tokens, mask)
    hidden, states = run(
        params, config, inputs, compute_dtype, attention, remat=False, keep_state=True
    )
    length = jnp.sum(inputs.mask, axis=1, dtype=jnp.int32)
    at = jnp.maximum(length - 1, 0)[:, None, None]
    last = jnp.take_along_axis(hidden, at, axis=1)[:, 0]
    last = jnp.where((length > 0)[:, None], last, jnp.zeros_like(last))
    layers: dict[str, KeyValues | DeltaState] = {}
    for member, state in (states or {}).items():
        if isinstance(state, DeltaState):
            layers[member] = state
            continue
        room = ((0, 0), (0, 0), (0, capacity - time), (0, 0), (0, 0))
        layers[member] = KeyValues(*(jnp.pad(x, room) for x in state))
    return last, Cache(layers, length)


def decode_step(
    params: Params,
    config: DecoderConfig,
    tokens: Int[Array, " batch"],
    cache: Cache,
    mask: Bool[Array, " batch"] | None = None,
    *,
    compute_dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "batch width"], Cache]:
    """Read one more token in each row. Donate the cache, and it is updated in place.

    Args:
        params: the tree that `parameter_shapes` describes.
        config: the decoder; static under `jax.jit`.
        tokens: the token that each row goes on with.
        cache: what the rows hold. A token that finds its row full is not remembered.
        mask: False for rows that stay as they are (their hidden state means nothing).
        compute_dtype: as for [`hidden_states`][twinkle_jax.model.hidden_states].

    Returns:
        The hidden state of each token, and the cache with the token in it.

    Raises:
        ValueError: if the number of rows differs.
        TypeError: if tokens are not integers, or the mask not boolean.
    """
    _check(tokens, cache, mask)
    embedding = params["embed_tokens"]["embedding"]
    dtype = jnp.dtype(embedding.dtype if compute_dtype is None else compute_dtype)
    a = config.attention
    rotary = rotary_table(cache.length[:, None], dim=a.rotary_dim, theta=a.rope_theta)
    active = jnp.ones(tokens.shape, bool) if mask is None else mask

    # The whole cache is carried, so that a step writes its own token and copies nothing else.
    def block(
        carry: tuple[Array, dict[str, Any]], xs: tuple[Array, Mapping[str, Params]]
    ) -> tuple[tuple[Array, dict[str, Any]], None]:
        (x, layers), (repeat, members) = carry, xs
        layers = dict(layers)
        for member, kind in enumerate(config.block):
            name = str(member)
            y = norm(config, x, members[name]["input_layernorm"])
            if kind == FULL:
                mixed, layers[name] = _full_step(
                    config, y, members[name], layers[name], repeat, cache.length, rotary
                )
            else:
                mixed, layers[name] = _linear_step(
                    config, y, members[name], layers[name], repeat, active
                )
            x = feed_forward(config, x + mixed, members[name])
        return (x, layers), None

    x = embed(embedding, jnp.where(active, tokens, 0), dtype)
    repeats = jnp.arange(config.repeats, dtype=jnp.int32)
    (x, layers), _ = jax.lax.scan(block, (x, cache.layers), (repeats, params["layers"]))
    return final_norm(params, config, x), Cache(layers, cache.length + active.astype(jnp.int32))


def take_rows(cache: Cache, rows: Int[Array, " rows"]) -> Cache:
    """Make a cache of chosen rows, in order, repeated as often as they are named.

    So a group of completions needs its prompt read only once.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from twinkle_jax.model import init_params, parse_config, prefill, take_rows
        >>> config = parse_config({
        ...     "model_type": "qwen2", "vocab_size": 64, "hidden_size": 32,
        ...     "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        ... })
        >>> params = init_params(jax.random.key(0), config)
        >>> prompts = jnp.array([[1, 2, 3], [0, 0, 4]])
        >>> _, cache = prefill(params, config, prompts, prompts > 0, capacity=8)
        >>> take_rows(cache, jnp.array([0, 0, 1, 1])).length
        Array([3, 3, 1, 1], dtype=int32)
    """
    layers = jax.tree.map(lambda x: jnp.take(x, rows, axis=1), cache.layers)
    return Cache(layers, jnp.take(cache.length, rows, axis=0))


def _full_step(
    config: DecoderConfig,
    y: Float[Array, "batch width"],
    weights: Params,
    cached: KeyValues,
    repeat: Int[Array, ""],
    length: Int[Array, " batch"],
    rotary: RotaryTable,
) -> tuple[Float[Array, "batch width"], KeyValues]:
    """Write the token's keys and values into its slot, and attend to the slots up to it."""
    batch = y.shape[0]
    heads = project_heads(y, weights["self_attn"], config, rotary, batch)
    rows = jnp.arange(batch, dtype=jnp.int32)
    keys, values = (
        stack.at[repeat, rows, length].set(new[:, 0].astype(stack.dtype), mode="drop")
        for stack, new in zip(cached, heads[1:3], strict=True)
    )
    slots = jnp.arange(keys.shape[2], dtype=jnp.int32)
    attended = attend(
        heads.query,
        *(
            jax.lax.dynamic_index_in_dim(s, repeat, keepdims=False).astype(y.dtype)
            for s in (keys, values)
        ),
        mask=(slots[None] <= length[:, None])[:, None, None],
        causal=False,
        implementation="xla",
    )
    return project_out(attended, heads.gate, weights["self_attn"]), KeyValues(keys, values)


def _linear_step(
    config: DecoderConfig,
    y: Float[Array, "batch width"],
    weights: Params,
    cached: DeltaState,
    repeat: Int[Array, ""],
    active: Bool[Array, " batch"],
) -> tuple[Float[Array, "batch width"], DeltaState]:
    """Update the states of the rows that go on."""
    assert config.delta_net is not None
    old = DeltaState(*(jax.lax.dynamic_index_in_dim(x, repeat, keepdims=False) for x in cached))
    mixed, new = delta_net_step(
        y, weights["linear_attn"], config.delta_net, old, epsilon=config.norm_epsilon
    )
    stacks = []
    for stack, before, after in zip(cached, old, new, strict=True):
        goes_on = active.reshape(-1, *(1,) * (before.ndim - 1))
        state = jnp.where(goes_on, after.astype(stack.dtype), before)
        stacks.append(jax.lax.dynamic_update_index_in_dim(stack, state, repeat, 0))
    return mixed, DeltaState(*stacks)


def _check(tokens: Array, cache: Cache, mask: Array | None) -> None:
    if tokens.shape != cache.length.shape:
        raise ValueError(
            f"expected one token per row of the cache {cache.length.shape}, got {tokens.shape}"
        )
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"expected tokens to be integers, got {tokens.dtype}")
    if mask is not None and mask.shape != tokens.shape:
        raise ValueError(f"expected equal shapes, got tokens={tokens.shape}, mask={mask.shape}")
    if mask is not None and mask.dtype != jnp.bool_:
        raise TypeError(f"expected mask to be bool, got {mask.dtype}")
