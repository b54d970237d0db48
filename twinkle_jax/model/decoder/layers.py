"""The parts of a decoder that every family has: projection, norm, embedding, feed-forward, head."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from twinkle_jax.model.decoder.bfloat16 import matmul, rounded
from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.lora import adapter_change
from twinkle_jax.model.decoder.parameters import Params
from twinkle_jax.model.decoder.sharding import spread_lookup


def project(
    x: Float[Array, "tokens into"], weights: Mapping[str, Any]
) -> Float[Array, "tokens out"]:
    """Multiply rows by `kernel` in their own type; add adapter and `bias` where there are any."""
    y = matmul(x, weights["kernel"])
    if "lora_A" in weights:
        y = rounded(y + adapter_change(x, weights))
    return rounded(y + rounded(weights["bias"], x.dtype)[None]) if "bias" in weights else y


def rms_norm(
    x: Float[Array, "*batch width"],
    scale: Float[Array, " width"],
    *,
    epsilon: float,
    centred: bool = False,
) -> Float[Array, "*batch width"]:
    r"""Divide by the root of the mean square, in float32, and multiply by a weight.

    $$y = \frac{x}{\sqrt{\overline{x^2} + \epsilon}} \cdot w \quad (\text{centred: } 1 + w)$$

    Args:
        x: rows to normalise.
        scale: $w$.
        epsilon: $\epsilon$.
        centred: whether the weight is stored as its distance from 1; the product is then taken in
            float32, else in the type of `x`, as the checkpoints of each family were trained.
    """
    scale = scale.reshape((1,) * (x.ndim - 1) + scale.shape)
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + epsilon)
    if centred:
        return rounded(y * (1 + scale.astype(jnp.float32)), x.dtype)
    return rounded(rounded(y, x.dtype) * rounded(scale, x.dtype))


def embed(
    config: DecoderConfig,
    embedding: Float[Array, "vocab width"],
    tokens: Int[Array, "*batch"],
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
) -> Float[Array, "*batch width"]:
    """Look tokens up; an id outside the vocabulary gives NaN, rather than another token.

    The scale, where there is one, is rounded to `dtype` first: so the checkpoints were trained.
    """

    def look_up(table: Array, ids: Array) -> Array:
        rows = table.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        return rows.astype(dtype)

    embedded = (
        look_up(embedding, tokens)
        if mesh is None
        else spread_lookup(embedding, tokens, mesh, look_up)
    )
    if config.scaled_embedding:
        embedded = embedded * jnp.asarray(config.hidden_size**0.5, dtype)
    return rounded(embedded)


def final_norm(
    params: Params, config: DecoderConfig, x: Float[Array, "tokens width"]
) -> Float[Array, "tokens width"]:
    """Apply the norm behind the last layer."""
    return norm(config, x, params["norm"])


def norm(
    config: DecoderConfig, x: Float[Array, "tokens width"], weights: Params
) -> Float[Array, "tokens width"]:
    """Apply a norm of the residual stream in the family's form."""
    return rms_norm(x, weights["scale"], epsilon=config.norm_epsilon, centred=config.centred_norms)


def add_mixed(
    config: DecoderConfig,
    x: Float[Array, "tokens width"],
    mixed: Float[Array, "tokens width"],
    weights: Params,
) -> Float[Array, "tokens width"]:
    """Add the first half of a layer, attention's output, to the residual stream."""
    if config.output_norms:
        mixed = norm(config, mixed, weights["post_attention_layernorm"])
    return rounded(x + mixed)


def feed_forward(
    config: DecoderConfig, x: Float[Array, "tokens width"], weights: Params
) -> Float[Array, "tokens width"]:
    """Add the second half of a layer to the residual stream: norm, then SwiGLU or GeGLU."""
    before = "pre_feedforward" if config.output_norms else "post_attention"
    y = norm(config, x, weights[f"{before}_layernorm"])
    mlp = weights["mlp"]
    gate = project(y, mlp["gate_proj"])
    gate = rounded(jax.nn.silu(gate) if config.activation == "silu" else jax.nn.gelu(gate))
    y = project(rounded(gate * project(y, mlp["up_proj"])), mlp["down_proj"])
    if config.output_norms:
        y = norm(config, y, weights["post_feedforward_layernorm"])
    return rounded(x + y)


def output_matrix(params: Params) -> Float[Array, "width vocab"]:
    """Give the matrix of the head: logits are `hidden @ matrix`; tied embeddings, transposed."""
    matrix: Array = (
        params["lm_head"]["kernel"]
        if "lm_head" in params
        else params["embed_tokens"]["embedding"].T
    )
    return matrix


def output_logits(
    params: Params, hidden: Float[Array, "*batch width"]
) -> Float[Array, "*batch vocab"]:
    """Compute float32 logits of the next token from hidden states, all of them at once."""
    head = output_matrix(params).astype(hidden.dtype)
    return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
