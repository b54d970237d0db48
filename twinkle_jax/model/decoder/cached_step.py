"""A token through the mixing half of a layer: it enters the cache and reads what is there."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.model.decoder.attention import attention_weights, project_heads, project_out
from twinkle_jax.model.decoder.attention_choice import backend_of
from twinkle_jax.model.decoder.bfloat16 import multiply
from twinkle_jax.model.decoder.cache import DeltaState, KeyValues
from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.delta_net import delta_net_step
from twinkle_jax.model.decoder.parameters import Params
from twinkle_jax.model.decoder.rotary import RotaryTable


def attend_step(
    config: DecoderConfig,
    y: Float[Array, "batch width"],
    weights: Params,
    cached: KeyValues,
    repeat: Int[Array, ""],
    length: Int[Array, " batch"],
    rotary: RotaryTable,
    first: Int[Array, " batch"] | None,
    mesh: Mesh | None,
) -> tuple[Float[Array, "batch width"], KeyValues]:
    """Write the token's keys and values into its slot, and attend to the slots up to it."""
    batch = y.shape[0]
    heads = project_heads(y, weights["self_attn"], config, rotary, batch)
    keys = _write(cached.keys, heads.key[:, 0], repeat, length, axis=4, mesh=mesh)
    values = _write(cached.values, heads.value[:, 0], repeat, length, axis=3, mesh=mesh)
    # Both are written before either is read: a kernel in between has the logits leave a TPU's chip.
    keys, values = jax.lax.optimization_barrier((keys, values))
    layer = jax.tree.map(
        lambda stack: jax.lax.dynamic_index_in_dim(stack, repeat, keepdims=False),
        KeyValues(keys, values),
    )
    query = heads.query[:, 0]
    attended = _attend(query, layer.keys, layer.values, length, first, config.attention.scale)
    return project_out(attended, heads.gate, weights["self_attn"]), KeyValues(keys, values)


def first_seen(
    config: DecoderConfig, length: Int[Array, " batch"], sliding: Bool[Array, ""]
) -> Int[Array, " batch"] | None:
    """Give the first slot that the next token sees; None: all."""
    window = config.attention.window
    return None if window is None else jnp.where(sliding, length - window.size + 1, 0)


def _write(
    stack: Array,
    new: Float[Array, "batch groups width"],
    repeat: Array,
    length: Array,
    *,
    axis: int,
    mesh: Mesh | None,
) -> Array:
    """Write each row's entry into its slot along an axis; what finds no slot is dropped.

    That rows stay rows is said in so many words: on a mesh none of them then leaves its device.
    """
    if backend_of(mesh) == "tpu":
        # What is only for TPUs takes a quarter of a second to import.
        from twinkle_jax.model.decoder.cache_write import write_in_place

        return write_in_place(stack, new, repeat, length, axis=axis, mesh=mesh, interpret=False)
    return jax.lax.scatter(
        stack,
        jnp.stack([jnp.broadcast_to(repeat, length.shape), length], axis=1),
        new.astype(stack.dtype),
        jax.lax.ScatterDimensionNumbers(
            update_window_dims=(1, 2),
            inserted_window_dims=(0, axis),
            scatter_dims_to_operand_dims=(0, axis),
            operand_batching_dims=(1,),
            scatter_indices_batching_dims=(0,),
        ),
        unique_indices=True,
        mode="drop",
    )


def _attend(
    query: Float[Array, "batch heads width"],
    keys: Float[Array, "batch groups width max_length"],
    values: Float[Array, "batch groups max_length width"],
    length: Int[Array, " batch"],
    first: Int[Array, " batch"] | None,
    scale: float,
) -> Float[Array, "batch 1 heads width"]:
    """Attend to slots `first` to `length`; a row without a slot for its token gets NaN."""
    batch, heads, width = query.shape
    groups, max_length = values.shape[1:3]
    wide = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    query = query.reshape(batch, groups, heads // groups, width)
    logits = jnp.einsum(
        "bghw,bgwt->bght", query, keys.astype(query.dtype), preferred_element_type=wide
    )
    slots = jnp.arange(max_length, dtype=jnp.int32)[None]
    seen = slots <= length[:, None]
    if first is not None:
        seen &= slots >= first[:, None]
    logits = jnp.where((length < max_length)[:, None, None, None], logits, jnp.nan)
    weights = attention_weights(logits, seen[:, None, None], scale, query.dtype)
    attended = multiply(partial(jnp.einsum, "bght,bgtw->bghw"), weights, values.astype(query.dtype))
    return attended.reshape(batch, 1, heads, width)


def linear_step(
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
