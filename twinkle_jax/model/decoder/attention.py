"""Softmax attention with grouped heads, rotary positions, head norms and an output gate."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.model.decoder.attention_choice import AttentionImplementation, interpreted
from twinkle_jax.model.decoder.bfloat16 import multiply, rounded
from twinkle_jax.model.decoder.config import AttentionConfig, DecoderConfig
from twinkle_jax.model.decoder.project_and_norm import project, rms_norm
from twinkle_jax.model.decoder.rotary import RotaryTable, rotate


class Heads(NamedTuple):
    """Queries, keys and values by head, rotated; the gate of the output, where there is one."""

    query: Float[Array, "batch time heads width"]
    key: Float[Array, "batch time groups width"]
    value: Float[Array, "batch time groups width"]
    gate: Float[Array, "tokens out"] | None


def project_heads(
    x: Float[Array, "tokens width"],
    weights: Mapping[str, Any],
    config: DecoderConfig,
    rotary: RotaryTable,
    batch: int,
) -> Heads:
    """Project rows of activations to heads, normalise them and rotate queries and keys."""
    a = config.attention

    def heads(y: Float[Array, "tokens out"], count: int) -> Float[Array, "batch time heads width"]:
        return y.reshape(batch, -1, count, y.shape[-1] // count)

    query = heads(project(x, weights["q_proj"]), a.query_heads)
    key = heads(project(x, weights["k_proj"]), a.key_value_heads)
    value = heads(project(x, weights["v_proj"]), a.key_value_heads)
    gate = None
    if a.output_gate:  # each head's projection is [query, gate]
        query, gate = jnp.split(query, 2, axis=-1)
        gate = gate.reshape(x.shape[0], -1)
    if a.qk_norm:
        query, key = (
            rms_norm(
                y,
                weights[name]["scale"],
                epsilon=config.norm_epsilon,
                centred=config.centred_norms,
            )
            for y, name in ((query, "q_norm"), (key, "k_norm"))
        )
    return Heads(rotate(query, rotary), rotate(key, rotary), value, gate)


def project_out(
    attended: Float[Array, "batch time heads width"],
    gate: Float[Array, "tokens out"] | None,
    weights: Mapping[str, Any],
) -> Float[Array, "tokens width"]:
    """Gate what the heads attended to, and project it back to the residual stream."""
    batch, time, heads, width = attended.shape
    y = attended.reshape(batch * time, heads * width)
    if gate is not None:
        y = rounded(y * rounded(jax.nn.sigmoid(gate)))
    return project(y, weights["o_proj"])


def attend_causally(
    heads: Heads,
    config: AttentionConfig,
    sliding: Bool[Array, ""],
    segment_ids: Int[Array, "batch time"] | None,
    *,
    implementation: AttentionImplementation,
    mesh: Mesh | None,
) -> Float[Array, "batch time heads width"]:
    """Let each token of whole rows see those before it: all of them, or a sliding layer's window.

    Which of the two is data, so that a stack of both kinds stays one loop over one layer.
    """

    def see(window: int | None, query: Array, key: Array, value: Array) -> Array:
        if implementation == "xla":
            seen = _seen(key.shape[1], window, segment_ids)
            return _attend(query, key, value, seen, config.scale)
        with jax.numpy_dtype_promotion("standard"):  # both mix types inside
            if implementation == "splash":
                # What is only for TPUs takes a quarter of a second to import.
                from twinkle_jax.model.decoder.splash import splash_attention

                return splash_attention(
                    query,
                    key,
                    value,
                    segment_ids=segment_ids,
                    scale=config.scale,
                    window=window,
                    mesh=mesh,
                    interpret=interpreted(mesh),
                )
            return jax.nn.dot_product_attention(
                query,
                key,
                value,
                scale=config.scale,
                is_causal=True,
                local_window_size=None if window is None else (window - 1, 0),
                implementation="cudnn",
            )

    given = heads[:3]
    if config.window is None or config.window.size >= heads.key.shape[1]:
        return see(None, *given)
    return jax.lax.cond(sliding, partial(see, config.window.size), partial(see, None), *given)


def _seen(
    time: int, window: int | None, segment_ids: Int[Array, "batch time"] | None
) -> Bool[Array, "#batch time time"]:
    """Say which positions, on the last axis, each position sees."""
    places = jnp.arange(time, dtype=jnp.int32)
    back = places[:, None] - places[None]
    seen = (back >= 0 if window is None else (back >= 0) & (back < window))[None]
    if segment_ids is not None:
        seen = seen & (segment_ids[:, :, None] == segment_ids[:, None])
    return seen


def _attend(
    query: Float[Array, "batch time heads width"],
    key: Float[Array, "batch slots groups width"],
    value: Float[Array, "batch slots groups width"],
    seen: Bool[Array, "#batch #time slots"],
    scale: float,
) -> Float[Array, "batch time heads width"]:
    """Attend as `jax.nn.dot_product_attention` does, except that the weights are `rounded`."""
    batch, time, heads, width = query.shape
    wide = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    query = query.reshape(batch, time, key.shape[2], -1, width)
    # Else the gradients are products of float32 with 16 bits, which compilers compute in float32.
    algorithm = {"bfloat16": "BF16_BF16_F32", "float16": "F16_F16_F32"}.get(query.dtype.name)
    logits = jnp.einsum(
        "btghw,bsgw->bghts",
        query,
        key,
        precision=algorithm,
        preferred_element_type=wide,
    )
    weights = attention_weights(logits, seen[:, None, None], scale, query.dtype)
    attended = multiply(partial(jnp.einsum, "bghts,bsgw->btghw"), weights, value)
    return attended.reshape(batch, time, heads, width)


def attention_weights(
    logits: Float[Array, "*batch slots"],
    seen: Bool[Array, "*#batch slots"],
    scale: float,
    dtype: DTypeLike,
) -> Float[Array, "*batch slots"]:
    """Take the softmax over slots that are seen: of whole rows and of decoding steps alike."""
    return rounded(jax.nn.softmax(jnp.where(seen, logits * scale, -jnp.inf), axis=-1), dtype)
