"""The decoder over whole rows: embedding, a scan over stacked layers, the final norm.

Inside the decoder the tokens of a row are moved to the front, in order. Every layer is causal, so
the padding behind them influences no token: attention, convolutions and recurrences need no padding
mask, and a row gets the same numbers alone, in any batch and with either padding.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from twinkle_jax.model.decoder.attention import (
    AttentionImplementation,
    attend_causally,
    attend_more,
    choose_attention,
)
from twinkle_jax.model.decoder.cache import Cache
from twinkle_jax.model.decoder.config import (
    LINEAR,
    SLIDING,
    DecoderConfig,
    ExpertsConfig,
    LayerStack,
)
from twinkle_jax.model.decoder.delta_net import delta_net
from twinkle_jax.model.decoder.feed_forward import feed_forward
from twinkle_jax.model.decoder.heads import Heads, project_heads, project_out
from twinkle_jax.model.decoder.layers import (
    RotaryTable,
    add_mixed,
    embed,
    embed_for_layers,
    final_norm,
    input_norm,
    layer_flags,
    of_stack,
    output_logits,
    rotary_tables,
    table_of,
)
from twinkle_jax.model.decoder.parameters import Params, check_decoder, embedding_of
from twinkle_jax.model.decoder.precision import tracing_for
from twinkle_jax.model.decoder.sharding import backend_of, check_fit, gather_weights, keep_rows

Remat = bool | Callable[..., bool]  # a policy of `jax.checkpoint_policies`


class DecoderInputs(NamedTuple):
    """Tokens at the front of their rows, and what the layers need to know about them."""

    tokens: Int[Array, "batch time"]
    mask: Bool[Array, "batch time"]
    rotary: tuple[RotaryTable, ...]
    segment_ids: Int[Array, "batch time"] | None
    routing: Int[Array, "batch time layers chosen"] | None = None


class Decoder(nnx.Module):  # type: ignore[misc]  # mypy does not follow Flax: its Module is Any
    """A policy: a configuration and its parameters.

    `nnx.split(decoder)` gives a graph definition and a state whose pure dict is
    [`params`][twinkle_jax.model.Decoder.params]: what `hidden_states`, `prefill` and
    `decode_step` take, and what optimizers, sharding rules and adapters work on.

    Args:
        config: the decoder.
        params: the tree that `parameter_shapes` describes.
        source: the directory that it was read from; exports copy the tokenizer from there.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> from twinkle_jax.model import Decoder, init_params, parse_config
        >>> config = parse_config({
        ...     "model_type": "qwen2", "vocab_size": 64, "hidden_size": 32,
        ...     "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        ... })
        >>> decoder = Decoder(config, init_params(jax.random.key(0), config))
        >>> decoder(jnp.array([[5, 6, 7]])).shape
        (1, 3, 64)
        >>> graph, state = nnx.split(decoder)
        >>> state["layers"]["0"]["mlp"]["up_proj"]["kernel"].shape
        (2, 32, 48)
    """

    def __init__(
        self, config: DecoderConfig, params: Mapping[str, Any], *, source: Path | None = None
    ) -> None:
        self.config = config
        self.source = source
        for name, value in params.items():
            setattr(self, name, _variables(value))

    @property
    def params(self) -> dict[str, Any]:
        """The parameters as nested dicts of arrays."""
        params: dict[str, Any] = nnx.to_pure_dict(nnx.state(self, nnx.Param))
        return params

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        mask: Bool[Array, "batch time"] | None = None,
        **options: Any,
    ) -> Float[Array, "batch time vocab"]:
        """Compute float32 logits at every position.

        Args:
            tokens: token ids.
            mask: True for tokens, False for padding.
            options: keyword arguments of [`hidden_states`][twinkle_jax.model.hidden_states].
        """
        params = self.params
        hidden = hidden_states(params, self.config, tokens, mask, **options)
        return output_logits(params, self.config, hidden)


def _variables(value: Any) -> Any:
    """Wrap the arrays of a nested dict."""
    if isinstance(value, Mapping):
        return nnx.Dict({key: _variables(child) for key, child in value.items()})
    return nnx.Param(value)


def hidden_states(
    params: Params,
    config: DecoderConfig,
    tokens: Int[Array, "batch time"],
    mask: Bool[Array, "batch time"] | None = None,
    *,
    positions: Int[Array, "batch time"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
    routing: Int[Array, "batch time layers chosen"] | None = None,
    compute_dtype: DTypeLike | None = None,
    attention: AttentionImplementation | None = None,
    remat: Remat = True,
    mesh: Mesh | None = None,
) -> Float[Array, "batch time width"]:
    """Run the decoder over whole rows, up to the final norm and without the head.

    Logits are large; take them only where they are needed, with
    [`output_logits`][twinkle_jax.model.output_logits], or hand the hidden states and
    [`output_matrix`][twinkle_jax.model.output_matrix] to `twinkle_jax.loss.token_logprobs`.

    Args:
        params: the tree that `parameter_shapes` describes.
        config: the decoder; static under `jax.jit`.
        tokens: token ids. Padding may hold anything. An id outside the vocabulary makes its row NaN
            from there on, and maybe before, as does a token beyond the longest row of its rotary
            scaling.
        mask: True for tokens, False for padding, on either side of a row or between tokens (which
            are then neighbours). None: everything is a token.
        positions: rotary positions; by default they count tokens, from 0 in each segment.
        segment_ids: rows that hold several sequences, one after the other: a token sees only its
            own run of equal ids. Neighbouring sequences must have different ids.
        routing: of a mixture of experts, the numbers of the experts that each token goes through in
            each layer, such as a server chose when it drew the token. Their weights are the
            router's, and its gradients flow through these. A number that no expert has leaves the
            choice for this token and layer to the router, as None does for all. Those of dense
            layers before the others are ignored.
        compute_dtype: type of activations; by default that of the embedding. Norms, softmax and
            the state of linear layers are float32 in any case.
        attention: `"xla"`, `"cudnn"` or `"splash"`; by default what
            [`default_attention`][twinkle_jax.model.default_attention] chooses. Where full layers
            have other heads than sliding ones, and it takes only one kind, the other kind has its
            default.
        remat: True recomputes each layer in the backward pass, a policy of
            `jax.checkpoint_policies` keeps what it names, False keeps everything. Where there is
            memory for it, `dots_with_no_batch_dims_saveable` is often the fastest.
        mesh: devices of the parameters, laid out by `shard_like_params`; None for one device.
            Rows are spread over data and fsdp, and each layer's parameters gathered when it runs.

    Returns:
        Hidden states in `compute_dtype`, 0 at padding, whose products with the output matrix are
        the logits (a family's `logits_scaling` is in them), before the soft cap if there is one.
        They depend neither on the rest of the batch nor on the side of the padding.

    Raises:
        ValueError: if shapes differ, the devices do not support this attention, the mesh does not
            divide the rows or the key-value heads, or a decoder without experts gets a routing.
        TypeError: if tokens, positions, segment ids or the routing are not integers, the mask not
            boolean, or `compute_dtype` not a floating-point type.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from twinkle_jax.model import hidden_states, init_params, parse_config
        >>> config = parse_config({
        ...     "model_type": "qwen2", "vocab_size": 64, "hidden_size": 32,
        ...     "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        ... })
        >>> params = init_params(jax.random.key(0), config)
        >>> tokens = jnp.array([[5, 6, 7], [0, 0, 8]])
        >>> hidden = hidden_states(params, config, tokens, tokens > 0)
        >>> hidden.shape, float(hidden[1, :2].max())
        ((2, 3, 32), 0.0)
    """
    check_decoder(params, config)
    return run_rows(
        params,
        config,
        tokens,
        mask,
        positions=positions,
        segment_ids=segment_ids,
        routing=routing,
        compute_dtype=compute_dtype,
        attention=attention,
        remat=remat,
        mesh=mesh,
    )[0]


def run_rows(
    params: Params,
    config: DecoderConfig,
    tokens: Int[Array, "batch time"],
    mask: Bool[Array, "batch time"] | None,
    *,
    positions: Int[Array, "batch time"] | None,
    segment_ids: Int[Array, "batch time"] | None,
    routing: Int[Array, "batch time layers chosen"] | None,
    keep_routing: bool = False,
    **options: Any,
) -> tuple[Float[Array, "batch time width"], Int[Array, "batch time layers chosen"] | None]:
    """Like `hidden_states`; also return the experts of each token, if asked to.

    They are 0 at padding and in dense layers.
    """
    inputs = decoder_inputs(config, tokens, mask, positions, segment_ids)
    if routing is not None:
        _check_routing(config, tokens, routing)
        inputs = inputs._replace(routing=routing if mask is None else to_front(routing, mask))
    hidden, _, chosen = run(params, config, inputs, keep_routing=keep_routing, **options)
    if mask is None:
        return hidden, chosen
    return from_front(hidden, mask), None if chosen is None else from_front(chosen, mask)


class _Ran(NamedTuple):
    """What `run` returns: hidden states after the final norm, and what it was asked to keep.

    Attributes:
        hidden: of each row's tokens, at its front; padding holds anything.
        states: of each layer, stacked; None unless asked for.
        routing: the experts of each token; None unless asked for.
    """

    hidden: Float[Array, "batch time width"]
    states: dict[str, Any] | None
    routing: Int[Array, "batch time layers chosen"] | None


def run(
    params: Params,
    config: DecoderConfig,
    inputs: DecoderInputs,
    compute_dtype: DTypeLike | None,
    attention: AttentionImplementation | None,
    remat: Remat,
    *,
    mesh: Mesh | None = None,
    attention_mesh: Mesh | None = None,
    experts_mesh: Mesh | None = None,
    backend: str | None = None,
    keep_state: bool = False,
    keep_routing: bool = False,
    cache: Cache | None = None,
) -> _Ran:
    """Run the layers over prepared rows.

    Args:
        params: as for `hidden_states`, like the arguments that are not listed.
        config: the decoder.
        inputs: from `decoder_inputs`.
        compute_dtype: type of activations.
        attention: implementation of attention.
        remat: what the backward pass recomputes.
        mesh: devices of rows and parameters.
        attention_mesh: for attention and experts alone, if the parameters need not be gathered.
        experts_mesh: for experts alone, which need not divide the rows.
        backend: of the devices; by default that of the mesh.
        keep_state: whether to return the keys and values or the state of each layer, stacked.
        keep_routing: whether to return the experts of each token.
        cache: what the rows continue, its layers in one stack; the states returned include it.
    """
    attention_mesh = attention_mesh if mesh is None else mesh
    experts_mesh = attention_mesh if experts_mesh is None else experts_mesh
    check_fit(mesh, config, len(inputs.tokens))
    backend = backend_of(attention_mesh) if backend is None else backend
    embedding = embedding_of(params)
    dtype = jnp.dtype(embedding.dtype if compute_dtype is None else compute_dtype)
    segmented = inputs.segment_ids is not None
    kinds = {kind: config.attention_of(kind) for kind in config.block}
    implementations = choose_attention(
        attention, kinds, dtype, segmented=segmented, mesh=attention_mesh
    )

    def layer(
        kind: str,
        experts: ExpertsConfig | None,
        x: Array,
        weights: Params,
        flags: tuple[Array, Array] | None,
        state: Any,
        routing: Any,
        token: Any,
    ) -> tuple[Array, Any, Any]:
        weights = gather_weights(weights, dtype, mesh)
        # Sliding layers take the second rotary table.
        sliding, second = (kind == SLIDING, kind == SLIDING) if flags is None else flags

        def attend(heads: Heads) -> tuple[Array, Any]:
            if cache is not None:
                return attend_more(kinds[kind], heads, state, cache.length, inputs.mask, sliding)
            if heads.new is None:
                heads = heads._replace(new=state)
            attended = attend_causally(
                heads,
                kinds[kind],
                sliding,
                inputs.segment_ids,
                implementation=implementations[kind],
                mesh=attention_mesh,
            )
            return attended, heads.new if heads.latents is None else heads.latents

        x = keep_rows(x, mesh)
        x, state, chosen = _layer(
            config,
            kind,
            experts,
            x,
            weights,
            second,
            inputs,
            attend,
            cache is not None,
            state,
            experts_mesh,
            routing,
            token,
        )
        if keep_routing:
            assert config.experts is not None
            chosen = keep_rows(chosen.astype(config.experts.index_dtype), mesh)
        return keep_rows(x, mesh), state, chosen if keep_routing else None

    if remat:
        # Inside a scan prevent_cse is not needed, and costs optimisations. But if its body has
        # several layers, XLA computes them all again before the gradient of the last one.
        several = len(config.block) > 1
        policy = None if remat is True else remat
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=several, static_argnums=(0, 1))

    def block(
        stack: LayerStack, reused: Mapping[str, Any], x: Array, xs: tuple[Any, ...]
    ) -> tuple[Array, tuple[dict[str, Any] | None, Array | None]]:
        (members, flags, cached, routing, tokens), states, numbers = xs, {}, []
        for member, (name, kind) in enumerate(stack.members):
            x, states[name], chosen = layer(
                kind,
                stack.experts,
                x,
                members[name],
                None if flags is None else (flags[0][member], flags[1][member]),
                reused[kind] if stack.reuses else cached.get(name),
                None if routing is None else routing[:, member],
                None if tokens is None else tokens[:, member],
            )
            numbers.append(chosen)
        keeps = not stack.reuses and (keep_state or config.reusing_layers > 0)
        kept = jnp.stack(numbers, axis=1) if keep_routing else None
        return x, (states if keeps else None, kept)

    rows = inputs.tokens.shape
    with tracing_for(backend, dtype, attention_mesh):
        x = embed(config, embedding, inputs.tokens, dtype, mesh)
        tokens = routing = None
        if config.token_width is not None:
            tokens = embed_for_layers(params, config, x, inputs.tokens, mesh)
        if inputs.routing is not None:
            routing = keep_rows(inputs.routing.reshape(-1, *inputs.routing.shape[2:]), mesh)
        x = keep_rows(x.reshape(-1, config.hidden_size), mesh)
        held: Any = {} if cache is None else cache.layers
        states: dict[str, Any] = {}
        chosen = []
        for stack in config.stacks:
            xs = (
                {name: params["layers"][name] for name, _ in stack.members},
                layer_flags(config, stack),
                {name: held[name] for name, _ in stack.members if name in held},
                None if routing is None else of_stack(stack, routing),
                None if tokens is None else of_stack(stack, tokens),
            )
            reused = {
                kind: jax.tree.map(lambda x: x[-1], states[config.source_of(kind)])
                for kind in (stack.block if stack.reuses else ())
            }
            x, (new, kept) = jax.lax.scan(partial(block, stack, reused), x, xs)
            states |= new or {}
            if kept is not None:
                kept = jnp.moveaxis(kept, 0, 1)  # [tokens, repeats, members, chosen]
                chosen.append(kept.reshape(*rows, -1, kept.shape[-1]))
        x = keep_rows(final_norm(params, config, x), mesh)
    return _Ran(
        x.reshape(*rows, -1),
        states if keep_state else None,
        jnp.concatenate(chosen, axis=2) if keep_routing else None,
    )


def _layer(
    config: DecoderConfig,
    kind: str,
    experts: ExpertsConfig | None,
    x: Float[Array, "tokens width"],
    weights: Params,
    second: Bool[Array, ""] | bool,
    inputs: DecoderInputs,
    attend: Callable[[Heads], tuple[Array, Any]],
    to_cache: bool,
    state: Any,
    mesh: Mesh | None,
    routing: Int[Array, "tokens chosen"] | None,
    token: Float[Array, "tokens token_width"] | None,
) -> tuple[Float[Array, "tokens width"], Any, Any]:
    """Run one layer; also return its keys and values or linear-attention state, and experts."""
    y = input_norm(config, x, weights, "input_layernorm")
    if kind != LINEAR:
        batch = inputs.tokens.shape[0]
        rotary = table_of(inputs.rotary, second)
        heads = project_heads(
            y, weights["self_attn"], config, kind, rotary, batch, to_cache=to_cache
        )
        attended, state = attend(heads)
        mixed = project_out(attended, heads, weights["self_attn"], config.attention_of(kind))
    else:
        assert config.delta_net is not None
        mixed, state = delta_net(
            y,
            weights["linear_attn"],
            config.delta_net,
            inputs.mask,
            inputs.segment_ids,
            state,
            epsilon=config.norm_epsilon,
        )
    x = add_mixed(config, x, mixed, weights)
    x, chosen = feed_forward(config, experts, x, weights, mesh, routing=routing, token=token)
    return x, state, chosen


# Inputs of the layers: tokens at the front of their rows, positions, segments.


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
    if config.attention.longest_row is not None:  # padding may lie beyond it, and be NaN
        positions = jnp.where(kept, positions, 0)
    rotary = rotary_tables(positions, config)
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


def _check_routing(config: DecoderConfig, tokens: Array, routing: Array) -> None:
    if config.experts is None:
        raise ValueError("routing must be None for a decoder without experts, got an array")
    expected = (*tokens.shape, config.layers, config.experts.chosen)
    if routing.shape != expected:
        raise ValueError(
            f"routing must have the shape [batch, time, layers, chosen], {expected}, got "
            f"{routing.shape}"
        )
    if not jnp.issubdtype(routing.dtype, jnp.integer):
        raise TypeError(f"routing must be integers, got {routing.dtype}")


def to_front(
    values: Shaped[Array, "batch time *item"], mask: Bool[Array, "batch time"]
) -> Shaped[Array, "batch time *item"]:
    """Move what the mask keeps to the front of each row, in order, followed by 0."""
    order = jnp.argsort(~mask, axis=1, stable=True)
    kept = jnp.take_along_axis(mask, order, axis=1)
    shape = (*mask.shape, *[1] * (values.ndim - 2))
    order, kept = order.reshape(shape), kept.reshape(shape)
    moved = jnp.take_along_axis(values, order, axis=1)
    return jnp.where(kept, moved, jnp.zeros_like(moved))


def from_front(
    values: Shaped[Array, "batch time *item"], mask: Bool[Array, "batch time"]
) -> Shaped[Array, "batch time *item"]:
    """Undo `to_front`: each value goes back to its column, with 0 where the mask drops one."""
    column = jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)
    shape = (*mask.shape, *[1] * (values.ndim - 2))
    placed = jnp.take_along_axis(values, column.reshape(shape), axis=1)
    return jnp.where(mask.reshape(shape), placed, jnp.zeros_like(placed))


def number_segments(segment_ids: Int[Array, "batch time"]) -> Int[Array, "batch time"]:
    """Number the runs of equal ids from 0; an id that occurs again later is another segment."""
    changes = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return jnp.cumsum(changes, axis=1, dtype=jnp.int32)


def segment_positions(numbers: Int[Array, "batch time"]) -> Int[Array, "batch time"]:
    """Count from 0 at the start of each segment."""
    columns = jnp.arange(numbers.shape[1], dtype=jnp.int32)[None]
    starts = jnp.pad(numbers[:, 1:] != numbers[:, :-1], ((0, 0), (1, 0)))
    latest = jax.lax.cummax(jnp.where(starts, columns, 0), axis=1)
    return columns - latest
