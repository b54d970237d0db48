"""The decoder over whole rows: embedding, a scan over stacked layers, the final norm."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.model.decoder.attention import attend_causally, project_heads, project_out
from twinkle_jax.model.decoder.attention_choice import (
    AttentionImplementation,
    backend_of,
    choose_attention,
)
from twinkle_jax.model.decoder.bfloat16 import tracing_for
from twinkle_jax.model.decoder.config import FULL, DecoderConfig
from twinkle_jax.model.decoder.decoder_inputs import DecoderInputs, decoder_inputs
from twinkle_jax.model.decoder.delta_net import delta_net
from twinkle_jax.model.decoder.layers import add_mixed, embed, feed_forward, final_norm, norm
from twinkle_jax.model.decoder.left_align import from_front
from twinkle_jax.model.decoder.mesh_layout import check_fit, gather_weights, keep_rows
from twinkle_jax.model.decoder.parameters import Params
from twinkle_jax.model.decoder.rotary import table_of

Remat = bool | Callable[..., bool]


def hidden_states(
    params: Params,
    config: DecoderConfig,
    tokens: Int[Array, "batch time"],
    mask: Bool[Array, "batch time"] | None = None,
    *,
    positions: Int[Array, "batch time"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
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
        tokens: token ids. Padding may hold anything; an id outside the vocabulary makes its row
            NaN.
        mask: True for tokens, False for padding, on either side of a row or between tokens (which
            are then neighbours). None: everything is a token.
        positions: rotary positions; by default they count tokens, from 0 in each segment.
        segment_ids: rows that hold several sequences, one after the other: a token sees only its
            own run of equal ids. Neighbouring sequences must have different ids.
        compute_dtype: type of activations; by default that of the embedding. Norms, softmax and
            the state of linear layers are float32 in any case.
        attention: `"xla"`, `"cudnn"` or `"splash"`; by default what
            [`default_attention`][twinkle_jax.model.default_attention] chooses.
        remat: True recomputes each layer in the backward pass, a policy of
            `jax.checkpoint_policies` keeps what it names, False keeps everything. Where there is
            memory for it, `dots_with_no_batch_dims_saveable` is often the fastest.
        mesh: what the parameters live on, laid out by `shard_like_params`; None for one device.
            Rows are spread over data and fsdp, and each layer's parameters gathered when it runs.

    Returns:
        Hidden states in `compute_dtype`, 0 at padding. A row has the same ones whatever else is in
        the batch and on whatever side it is padded.

    Raises:
        ValueError: if shapes differ, the devices have no such attention, or the mesh does not
            divide the rows or the key-value heads.
        TypeError: if tokens, positions or segment ids are not integers, or the mask not boolean.

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
    inputs = decoder_inputs(config, tokens, mask, positions, segment_ids)
    hidden, _ = run(params, config, inputs, compute_dtype, attention, remat, mesh=mesh)
    return hidden if mask is None else from_front(hidden, mask)


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
    backend: str | None = None,
    keep_state: bool = False,
) -> tuple[Float[Array, "batch time width"], dict[str, Any] | None]:
    """Run the layers over prepared rows; return what layers remember, stacked, when asked.

    With `attention_mesh` alone nothing is gathered, but attention is told where rows are.
    `backend` is by default that of the mesh.
    """
    attention_mesh = attention_mesh if mesh is None else mesh
    check_fit(mesh, config, len(inputs.tokens))
    backend = backend_of(attention_mesh) if backend is None else backend
    embedding = params["embed_tokens"]["embedding"]
    dtype = jnp.dtype(embedding.dtype if compute_dtype is None else compute_dtype)
    segmented = inputs.segment_ids is not None
    chosen = choose_attention(
        attention, config.attention, dtype, segmented=segmented, mesh=attention_mesh
    )

    def layer(kind: str, x: Array, weights: Params, sliding: Array) -> tuple[Array, Any]:
        weights = gather_weights(weights, dtype, mesh)
        attend = partial(attend_causally, implementation=chosen, mesh=attention_mesh)
        x, state = _layer(config, kind, keep_rows(x, mesh), weights, sliding, inputs, attend)
        return keep_rows(x, mesh), state

    if remat:
        policy = None if remat is True else remat
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=False, static_argnums=(0,))

    def block(x: Array, xs: tuple[Mapping[str, Params], Array]) -> tuple[Array, Any]:
        (members, sliding), states = xs, {}
        for member, kind in enumerate(config.block):
            x, states[str(member)] = layer(kind, x, members[str(member)], sliding[member])
        return x, states if keep_state else None

    with tracing_for(backend):
        x = embed(config, embedding, inputs.tokens, dtype, mesh)
        x = keep_rows(x.reshape(-1, config.hidden_size), mesh)
        x, states = jax.lax.scan(block, x, (params["layers"], jnp.asarray(config.sliding)))
        x = keep_rows(final_norm(params, config, x), mesh)
    return x.reshape(*inputs.tokens.shape, -1), states


def _layer(
    config: DecoderConfig,
    kind: str,
    x: Float[Array, "tokens width"],
    weights: Params,
    sliding: Bool[Array, ""],
    inputs: DecoderInputs,
    attend: Callable[..., Array],
) -> tuple[Float[Array, "tokens width"], Any]:
    """Run one layer; also return what it would remember: keys and values, or a state."""
    y = norm(config, x, weights["input_layernorm"])
    state: Any
    if kind == FULL:
        batch = inputs.tokens.shape[0]
        rotary = table_of(inputs.rotary, sliding)
        heads = project_heads(y, weights["self_attn"], config, rotary, batch)
        attended = attend(heads, config.attention, sliding, inputs.segment_ids)
        mixed, state = project_out(attended, heads.gate, weights["self_attn"]), heads[1:3]
    else:
        assert config.delta_net is not None
        mixed, state = delta_net(
            y,
            weights["linear_attn"],
            config.delta_net,
            inputs.mask,
            inputs.segment_ids,
            epsilon=config.norm_epsilon,
        )
    return feed_forward(config, add_mixed(config, x, mixed, weights), weights), state
