"""Decoding with a cache: prompts (`prefill`), more tokens at once (`extend`), one step."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.model.decoder.attention import AttentionImplementation, attend_step
from twinkle_jax.model.decoder.cache import (
    Cache,
    make_cache,
    stack_layers,
    unstack_layers,
    write_routing,
)
from twinkle_jax.model.decoder.config import LINEAR, SLIDING, DecoderConfig, LayerStack
from twinkle_jax.model.decoder.delta_net import linear_step
from twinkle_jax.model.decoder.feed_forward import feed_forward
from twinkle_jax.model.decoder.forward import decoder_inputs, run
from twinkle_jax.model.decoder.layers import (
    add_mixed,
    embed,
    embed_for_layers,
    final_norm,
    input_norm,
    layer_flags,
    of_stack,
    rotary_tables,
    table_of,
)
from twinkle_jax.model.decoder.pages import PageTable, next_places, page_size
from twinkle_jax.model.decoder.parameters import Params, check_decoder, embedding_of
from twinkle_jax.model.decoder.precision import tracing_for
from twinkle_jax.model.decoder.sharding import ROWS, backend_of, fits, row_shards


def prefill(
    params: Params,
    config: DecoderConfig,
    tokens: Int[Array, "batch time"],
    mask: Bool[Array, "batch time"] | None = None,
    *,
    max_length: int,
    compute_dtype: DTypeLike | None = None,
    attention: AttentionImplementation | None = None,
    mesh: Mesh | None = None,
    keep_routing: bool = False,
) -> tuple[Float[Array, "batch width"], Cache]:
    """Read prompts of different lengths into a new cache.

    Args:
        params: the tree that `parameter_shapes` describes.
        config: the decoder; static under `jax.jit`.
        tokens: prompts, padded on either side.
        mask: True for tokens. None: everything is a token.
        max_length: tokens that a row has room for, prompt included; static.
        compute_dtype: as for [`hidden_states`][twinkle_jax.model.hidden_states].
        attention: likewise.
        mesh: devices; the parameters must not be split along fsdp. If it does not divide rows or
            key-value heads, prompts are read with XLA's attention.
        keep_routing: whether the cache keeps the experts of each token, which `hidden_states` takes
            as `routing`; static.

    Returns:
        The hidden state of each row's last token (its logits predict the first new one), and the
        cache. A row without tokens gets the hidden state 0.

    Raises:
        ValueError: if shapes differ, the prompts do not fit, or a decoder without experts is to
            keep them.
        TypeError: if tokens are not integers, or the mask not boolean.
    """
    check_decoder(params, config)
    time = tokens.shape[-1]
    if max_length < time:
        raise ValueError(f"max_length must be at least the prompts' {time}, got {max_length}")
    if keep_routing and config.experts is None:
        raise ValueError("keep_routing must be False for a decoder without experts, got True")
    inputs = decoder_inputs(config, tokens, mask)
    backend, rows_mesh = backend_of(mesh), mesh
    if mesh is not None and not fits(mesh, config, len(tokens)):
        rows_mesh, attention = None, "xla"
    hidden, states, routing = run(
        params,
        config,
        inputs,
        compute_dtype,
        attention,
        remat=False,
        attention_mesh=rows_mesh,
        experts_mesh=mesh,
        backend=backend,
        keep_state=True,
        keep_routing=keep_routing,
    )
    length = jnp.sum(inputs.mask, axis=1, dtype=jnp.int32)
    cache = make_cache(states or {}, length, routing, max_length=max_length)
    return _last_hidden(hidden, length), cache


def extend(
    params: Params,
    config: DecoderConfig,
    tokens: Int[Array, "batch time"],
    cache: Cache,
    mask: Bool[Array, "batch time"] | None = None,
    *,
    compute_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "batch width"], Cache]:
    """Read several more tokens in each row at once, such as the next turn of a conversation.

    The tokens attend causally to everything that their row holds and to each other, and linear
    layers continue from their states. Attention allocates [new tokens, size of the cache] for each
    head, so read many tokens in several calls.

    Args:
        params: the tree that `parameter_shapes` describes.
        config: the decoder; static under `jax.jit`.
        tokens: of each row, padded on either side.
        cache: the rows so far. A token for which its row has no room gets the hidden state NaN.
        mask: True for tokens; a row may have none. None: everything is a token.
        compute_dtype: as for [`hidden_states`][twinkle_jax.model.hidden_states].
        mesh: devices; the parameters must not be split along fsdp. None for one device.

    Returns:
        The hidden state of each row's last new token, 0 for a row without any, and the cache with
        the tokens in it.

    Raises:
        ValueError: if shapes differ, or the rows of the cache lie in pages.
        TypeError: if tokens are not integers, or the mask not boolean.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from twinkle_jax.model import extend, init_params, parse_config, prefill
        >>> config = parse_config({
        ...     "model_type": "qwen2", "vocab_size": 64, "hidden_size": 32,
        ...     "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        ... })
        >>> params = init_params(jax.random.key(0), config)
        >>> tokens = jnp.array([[1, 2, 3, 4, 5]])
        >>> _, cache = prefill(params, config, tokens[:, :2], max_length=8)
        >>> last, cache = extend(params, config, tokens[:, 2:], cache)
        >>> at_once, _ = prefill(params, config, tokens, max_length=8)
        >>> cache.length.tolist(), bool(jnp.allclose(last, at_once, atol=1e-5))
        ([5], True)
    """
    if cache.pages is not None:
        raise ValueError("cache must hold whole rows, got pages")
    if len(tokens) != len(cache.length):
        raise ValueError(f"tokens must have {len(cache.length)} rows, got {tokens.shape}")
    kept = jnp.ones(tokens.shape, bool) if mask is None else mask
    positions = cache.length[:, None] + jnp.cumsum(kept, axis=1, dtype=jnp.int32) - 1
    inputs = decoder_inputs(config, tokens, mask, positions)
    hidden, states, routing = run(
        params,
        config,
        inputs,
        compute_dtype,
        "xla",
        remat=False,
        experts_mesh=mesh,
        backend=backend_of(mesh),
        keep_state=True,
        keep_routing=cache.routing is not None,
        cache=stack_layers(cache),
    )
    new = jnp.sum(inputs.mask, axis=1, dtype=jnp.int32)
    longer = write_routing(cache, routing, new)._replace(
        layers=states or {}, length=cache.length + new
    )
    return _last_hidden(hidden, new), (
        unstack_layers(longer) if isinstance(cache.layers, tuple) else longer
    )


def decode_step(
    params: Params,
    config: DecoderConfig,
    tokens: Int[Array, " batch"],
    cache: Cache,
    mask: Bool[Array, " batch"] | None = None,
    *,
    compute_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "batch width"], Cache]:
    """Read one more token in each row. Donate the cache, and it is updated in place.

    Args:
        params: the tree that `parameter_shapes` describes, or what `unstack_layers` made of it.
        config: the decoder; static under `jax.jit`.
        tokens: the next token of each row.
        cache: the rows so far. A token for which its row has no room gets the hidden state NaN.
        mask: False for rows that stay as they are; their hidden state is undefined.
        compute_dtype: as for [`hidden_states`][twinkle_jax.model.hidden_states].
        mesh: devices; rows are spread over data and fsdp, and heads over tensor if it divides
            them. Required on several TPUs.

    Returns:
        The hidden state of each token, and the cache with the token in it.

    Raises:
        ValueError: if the number of rows differs, the mesh does not divide it, or the parameters
            come from `unstack_layers` and the cache does not.
        TypeError: if tokens are not integers, or the mask not boolean.
    """
    _check(tokens, cache, mask, mesh)
    if isinstance(params["layers"], tuple) and not isinstance(cache.layers, tuple):
        raise ValueError("cache must come from unstack_layers, as params do, got layers in a stack")
    embedding = embedding_of(params)
    dtype = jnp.dtype(embedding.dtype if compute_dtype is None else compute_dtype)
    active = jnp.ones(tokens.shape, bool) if mask is None else mask
    positions = cache.length
    if config.attention.longest_row is not None:  # rows that have ended may lie beyond it
        positions = jnp.where(active, positions, 0)
    rotary = rotary_tables(positions[:, None], config)
    tables = _page_tables(cache, active, mesh)

    def block(
        stack: LayerStack, x: Array, layers: Mapping[str, Any], places: Array, xs: tuple[Any, ...]
    ) -> tuple[Array, dict[str, Any], Array | None]:
        (members, flags, number, read), layers = xs, dict(layers)
        chosen: list[Any] = []
        for member, (name, kind) in enumerate(stack.members):
            weights = members[name]
            y = input_norm(config, x, weights, "input_layernorm")
            held = config.source_of(kind) if stack.reuses else name
            place = places[int(held) - config.stack_of(held).first_member]
            if kind == LINEAR:
                mixed, layers[held] = linear_step(config, y, weights, layers[held], place, active)
            else:
                # Sliding layers take the second rotary table.
                slides = second = kind == SLIDING
                if flags is not None:
                    slides, second = flags[0][member], flags[1][member]
                mixed, layers[held] = attend_step(
                    config,
                    kind,
                    y,
                    weights,
                    layers[held],
                    place,
                    cache.length,
                    table_of(rotary, second),
                    mesh,
                    slides,
                    tables,
                )
            x = add_mixed(config, x, mixed, weights)
            experts = None if number is None else (params["layers"][name], number)
            token = None if read is None else read[:, member]
            x, routing = feed_forward(config, stack.experts, x, weights, mesh, experts, token=token)
            chosen.append(routing)
        return x, layers, None if cache.routing is None else jnp.stack(chosen, axis=1)

    # The scan carries the whole cache: a step then writes its token in place and copies nothing.
    def write(stack: LayerStack, carry: tuple[Array, dict[str, Any]], xs: Any) -> tuple[Any, Any]:
        x, layers, chosen = block(stack, *carry, *xs)
        return (x, layers), chosen

    def reuse(stack: LayerStack, layers: Any, places: Array, x: Array, xs: Any) -> tuple[Any, Any]:
        x, _, chosen = block(stack, x, layers, places, xs)
        return x, chosen

    def finish(x: Array, layers: Any, chosen: list[Any]) -> tuple[Array, Cache]:
        routing = None if cache.routing is None else jnp.concatenate(chosen, axis=1)[:, None]
        written = write_routing(cache, routing, active.astype(jnp.int32))
        return final_norm(params, config, x), _longer(written, layers, length, tables)

    with tracing_for(backend_of(mesh), dtype, mesh):
        known = jnp.where(active, tokens, 0)
        x = embed(config, embedding, known, dtype)
        read = None
        if config.token_width is not None:
            read = embed_for_layers(params, config, x, known)
        length, chosen = cache.length + active.astype(jnp.int32), []
        if isinstance(cache.layers, tuple):
            weights, states = unstack_layers(params)["layers"], [*cache.layers]
            first = jnp.zeros(len(config.block), jnp.int32)
            for stack in config.stacks:
                read_here = None if read is None else of_stack(stack, read)
                rest = layer_flags(config, stack), None, read_here
                for repeat in range(stack.repeats):
                    xs = _item(weights[repeat], 0), *_item(rest, repeat)
                    held = -1 if stack.reuses else repeat
                    x, states[held], experts = block(stack, x, states[held], first, xs)
                    chosen.append(experts)
            return finish(x, tuple(states), chosen)
        layers: Any = cache.layers
        places: list[Array] = []
        for stack in config.stacks:
            xs = (
                {name: params["layers"][name] for name, _ in stack.members},
                layer_flags(config, stack),
                jnp.arange(stack.repeats, dtype=jnp.int32),
                None if read is None else of_stack(stack, read),
            )
            if stack.reuses:
                x, experts = jax.lax.scan(partial(reuse, stack, layers, places[-1][-1]), x, xs)
            else:
                places.append(_places_in_stack(config, stack, cache))
                (x, layers), experts = jax.lax.scan(
                    partial(write, stack), (x, layers), (places[-1], xs)
                )
            if experts is not None:  # [repeats, batch, members, chosen]
                experts = jnp.moveaxis(experts, 0, 1)
                chosen.append(experts.reshape(len(tokens), -1, experts.shape[-1]))
        return finish(x, layers, chosen)


def _item(tree: Any, index: int) -> Any:
    """Take one entry of every array."""
    return jax.tree.map(lambda x: x[index], tree)


def _places_in_stack(
    config: DecoderConfig, stack: LayerStack, cache: Cache
) -> Int[Array, "repeats members"]:
    """Return the place of each layer in the arrays that its keys and values or state lie in."""
    slides = stack.arranged(config.sliding)
    places = np.broadcast_to(np.arange(stack.repeats)[:, None], slides.shape)
    if cache.window_pages is not None:  # sliding layers have arrays of their own
        places = np.where(slides, np.cumsum(slides, axis=0), np.cumsum(~slides, axis=0)) - 1
    return jnp.asarray(places, jnp.int32)


def _page_tables(
    cache: Cache, active: Bool[Array, " batch"], mesh: Mesh | None
) -> tuple[PageTable, ...]:
    """Find, on each device, where the next tokens of its rows are written.

    Returns:
        A table for all layers, or one for full and one for sliding layers; none without pages.
    """
    if cache.pages is None:
        return ()
    find = partial(next_places, size=page_size(cache))
    if mesh is not None:
        rows = PartitionSpec(ROWS)
        find = jax.shard_map(find, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    kinds = [pages for pages in (cache.pages, cache.window_pages) if pages is not None]
    tables: list[PageTable] = [find(pages, cache.length, active) for pages in kinds]
    return tables[0]._replace(prompts=cache.prompt_pages), *tables[1:]


def _longer(
    cache: Cache, layers: Any, length: Int[Array, " batch"], tables: tuple[PageTable, ...]
) -> Cache:
    """Return the cache with the step's tokens in it."""
    cache = cache._replace(layers=layers, length=length)
    if not tables:
        return cache
    window_pages = tables[1].pages if len(tables) > 1 else None
    return cache._replace(pages=tables[0].pages, window_pages=window_pages)


def _last_hidden(
    hidden: Float[Array, "batch time width"], length: Int[Array, " batch"]
) -> Float[Array, "batch width"]:
    """Return the hidden state of each row's last token; 0 for a row without tokens."""
    at = jnp.maximum(length - 1, 0)[:, None, None]
    last = jnp.take_along_axis(hidden, at, axis=1)[:, 0]
    return jnp.where((length > 0)[:, None], last, jnp.zeros_like(last))


def _check(tokens: Array, cache: Cache, mask: Array | None, mesh: Mesh | None) -> None:
    if tokens.shape != cache.length.shape:
        raise ValueError(
            f"tokens must have the shape of cache.length, {cache.length.shape}, got {tokens.shape}"
        )
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"tokens must be integers, got {tokens.dtype}")
    if mask is not None and mask.shape != tokens.shape:
        raise ValueError(f"mask must have the shape of tokens, {tokens.shape}, got {mask.shape}")
    if mask is not None and mask.dtype != jnp.bool_:
        raise TypeError(f"mask must be bool, got {mask.dtype}")
    shards = row_shards(mesh)
    if len(tokens) % shards:
        raise ValueError(
            f"tokens must have a multiple of {shards} rows, data times fsdp of the mesh, "
            f"got {len(tokens)}"
        )
