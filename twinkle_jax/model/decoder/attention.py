"""Softmax attention with grouped heads, rotary positions, head norms and an output gate."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.model.decoder.attention_choice import AttentionImplementation, interpreted
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
        y = y * jax.nn.sigmoid(gate)
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
                mask=None if segment_ids is None else _same_segment(segment_ids),
                scale=config.scale,
                is_causal=True,
                local_window_size=None if window is None else (window - 1, 0),
                implementation=implementation,
            )

    given = heads[:3]
    if config.window is None or config.window.size >= heads.key.shape[1]:
        return see(None, *given)
    return jax.lax.cond(sliding, partial(see, config.window.size), partial(see, None), *given)


def _same_segment(segment_ids: Int[Array, "batch time"]) -> Bool[Array, "batch 1 time time"]:
    """Say which pairs of positions of a row are in the same segment."""
    return (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
