"""The parts of a decoder that every family has: embedding, norms, feed-forward, output head."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from twinkle_jax.model.decoder.bfloat16 import rounded
from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.mesh_layout import spread_lookup
from twinkle_jax.model.decoder.parameters import Params
from twinkle_jax.model.decoder.project_and_norm import project, rms_norm


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
        found = table.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        return found.astype(dtype)

    found = (
        look_up(embedding, tokens)
        if mesh is None
        else spread_lookup(embedding, tokens, mesh, look_up)
    )
    if config.scaled_embedding:
        found = found * jnp.asarray(config.hidden_size**0.5, dtype)
    return rounded(found)


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
