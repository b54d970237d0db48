"""From activations to the heads of attention, and back: projections, head norms, rotations, gates.

Latent attention has heads of its own in whole rows, and others over a cache.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from twinkle_jax.model.decoder.config import AttentionConfig, DecoderConfig, LatentConfig
from twinkle_jax.model.decoder.layers import (
    RotaryTable,
    norm,
    project,
    project_all,
    rms_norm,
    rotate,
)
from twinkle_jax.model.decoder.lora import scaled
from twinkle_jax.model.decoder.precision import multiply, rounded


class Heads(NamedTuple):
    """What a layer attends with, by head.

    Attributes:
        query: rotated.
        new: keys, rotated, and values; None in a layer that reuses those of another one.
        gate: of the output, if there is one.
        sinks: a logit of each query head in the softmax, if there are any.
        latents: of latent attention: the keys and values of one head for all queries, which a cache
            holds in place of `new`; None: `new` are these, and attention is over them.
    """

    query: Float[Array, "batch time heads width"]
    new: tuple[Array, Array] | None
    gate: Float[Array, "tokens out"] | None
    sinks: Float[Array, " heads"] | None = None
    latents: tuple[Array, Array] | None = None


def project_heads(
    x: Float[Array, "tokens width"],
    weights: Mapping[str, Any],
    config: DecoderConfig,
    kind: str,
    rotary: RotaryTable,
    batch: int,
    *,
    to_cache: bool,
) -> Heads:
    """Project rows of activations to heads, normalise them and rotate queries and keys.

    Queries of latent attention are those for a cache if they will attend `to_cache`.
    """
    a = config.attention_of(kind)
    if a.latent is not None:
        return _latent_heads(x, weights, a, a.latent, rotary, batch, to_cache=to_cache)

    def heads(y: Float[Array, "tokens out"], count: int) -> Float[Array, "batch time heads width"]:
        return y.reshape(batch, -1, count, y.shape[-1] // count)

    turn = partial(rotate, table=rotary, interleaved=a.interleaved)

    def grown(
        query: Float[Array, "batch time heads width"],
    ) -> Float[Array, "batch time heads width"]:
        return rounded(query * rounded(rotary[2], query.dtype)) if len(rotary) > 2 else query

    query, *rest = project_all(x, weights, "qkv_proj")
    if not rest:  # no family that reuses keys and values has an output gate, joint norms or sinks
        query = heads(query, a.query_heads)
        query = norm(config, query, weights["q_norm"]) if a.qk_norm else query
        return Heads(turn(query), None, None)
    key, value = rest[0], rest[0] if a.shared_values else rest[1]
    if a.joint_qk_norm:
        query, key = norm(config, query, weights["q_norm"]), norm(config, key, weights["k_norm"])
    query, key = heads(query, a.query_heads), heads(key, a.key_value_heads)
    value = heads(value, a.key_value_heads)
    gate = None
    if a.output_gate:  # each head's projection is [query, gate]
        query, gate = jnp.split(query, 2, axis=-1)
        gate = gate.reshape(x.shape[0], -1)
    if a.qk_norm and not a.joint_qk_norm:
        query, key = norm(config, query, weights["q_norm"]), norm(config, key, weights["k_norm"])
    if a.value_norm:
        value = rms_norm(value, None, epsilon=config.norm_epsilon)
    sinks = rounded(weights["sinks"], x.dtype) if a.sinks else None
    return Heads(grown(turn(query)), (turn(key), value), gate, sinks)


def project_out(
    attended: Float[Array, "batch time heads width"],
    heads: Heads,
    weights: Mapping[str, Any],
    config: AttentionConfig,
) -> Float[Array, "tokens width"]:
    """Gate the heads' outputs, and project them back to the residual stream."""
    if config.latent is not None and heads.latents is None:
        attended = _from_latents(attended, weights["kv_b_proj"], config)
    batch, time, count, width = attended.shape
    y = attended.reshape(batch * time, count * width)
    if heads.gate is not None:
        y = rounded(y * rounded(jax.nn.sigmoid(heads.gate)))
    return project(y, weights["o_proj"])


# Latent attention. Whole rows have keys and values of each head, which take fewer operations. For a
# cache each query goes through the matrix of its head's keys, and the output through that of its
# values, so that all heads attend to the latent vectors themselves.

_LATENT_EPSILON = 1e-6  # of their norms, in all checkpoints


def _latent_heads(
    x: Float[Array, "tokens width"],
    weights: Mapping[str, Any],
    a: AttentionConfig,
    latent: LatentConfig,
    rotary: RotaryTable,
    batch: int,
    *,
    to_cache: bool,
) -> Heads:
    r"""Project rows to heads of latent attention.

    $$q_h = [x Q_h,\ r(x Q'_h)], \quad c = n(x C), \quad k_h = [c K_h,\ r(x R)], \quad v_h = c V_h$$

    with a norm $n$ and rotations $r$; $x$ in $q$ may be another normalised projection. For a cache
    the queries are $[x Q_h K_h^\top,\ r(x Q'_h)]$, its keys $[c,\ r(x R)]$, and its values $c$.
    """

    def heads(y: Float[Array, "tokens out"], count: int) -> Float[Array, "batch time heads width"]:
        return y.reshape(batch, -1, count, y.shape[-1] // count)

    def normed(y: Float[Array, "tokens width"], name: str) -> Float[Array, "tokens width"]:
        return rms_norm(y, weights[name]["scale"], epsilon=_LATENT_EPSILON)

    turn = partial(rotate, table=rotary, interleaved=a.interleaved)
    unrotated = a.head_dim - a.rotary_dim
    if latent.query_width is None:
        query = project(x, weights["q_proj"])
    else:
        query = normed(project(x, weights["q_a_proj"]), "q_a_layernorm")
        query = project(query, weights["q_b_proj"])
    query, turned = jnp.split(heads(query, a.query_heads), (unrotated,), axis=-1)
    narrow, key = jnp.split(project(x, weights["kv_a_proj_with_mqa"]), (latent.width,), axis=-1)
    narrow, key = normed(narrow, "kv_a_layernorm"), turn(heads(key, 1))
    values = heads(narrow, 1)
    latents = jnp.concatenate([values, key], axis=-1), values
    if to_cache:
        query = _to_latents(query, weights["kv_b_proj"], a)
        return Heads(jnp.concatenate([query, turn(turned)], axis=-1), latents, None)
    expanded = heads(project(narrow, weights["kv_b_proj"]), a.query_heads)
    keys, values = jnp.split(expanded, (unrotated,), axis=-1)
    key = jnp.broadcast_to(key, (*keys.shape[:-1], key.shape[-1]))
    return Heads(
        jnp.concatenate([query, turn(turned)], axis=-1),
        (jnp.concatenate([keys, key], axis=-1), values),
        None,
        latents=latents,
    )


def _to_latents(
    query: Float[Array, "batch time heads unrotated"],
    weights: Mapping[str, Any],
    a: AttentionConfig,
) -> Float[Array, "batch time heads width"]:
    """Multiply the queries of each head by its keys' matrix, and by what an adapter adds to it."""
    keys = partial(_of_heads, a=a, part=slice(a.head_dim - a.rotary_dim), dtype=query.dtype)
    to_width = partial(jnp.einsum, "bthn,whn->bthw")
    y = multiply(to_width, query, keys(weights["kernel"]))
    if "lora_A" not in weights:
        return y
    change = multiply(to_width, query, keys(weights["lora_B"]))
    change = multiply(jnp.matmul, change, rounded(weights["lora_A"].T, query.dtype))
    return rounded(y + scaled(change, weights))


def _from_latents(
    attended: Float[Array, "batch time heads width"],
    weights: Mapping[str, Any],
    a: AttentionConfig,
) -> Float[Array, "batch time heads values"]:
    """Multiply the outputs of each head by its values' matrix, and by what an adapter adds."""
    values = partial(
        _of_heads, a=a, part=slice(a.head_dim - a.rotary_dim, None), dtype=attended.dtype
    )
    to_values = partial(jnp.einsum, "bthw,whv->bthv")
    y = multiply(to_values, attended, values(weights["kernel"]))
    if "lora_A" not in weights:
        return y
    change = multiply(jnp.matmul, attended, rounded(weights["lora_A"], attended.dtype))
    change = multiply(to_values, change, values(weights["lora_B"]))
    return rounded(y + scaled(change, weights))


def _of_heads(
    matrix: Float[Array, "into out"], a: AttentionConfig, part: slice, dtype: DTypeLike
) -> Float[Array, "into heads some"]:
    """Take a part of each head's columns: its keys, or the values behind them."""
    return rounded(matrix.reshape(len(matrix), a.query_heads, -1)[..., part], dtype)
