"""The parts of a decoder: projection, norm, embedding, head, rotary positions."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Shaped

from twinkle_jax.loss.token_logprobs import soft_capped
from twinkle_jax.model.decoder.config import (
    AttentionConfig,
    DecoderConfig,
    LayerStack,
    LinearScaling,
    LongRopeScaling,
    ProportionalScaling,
    YarnScaling,
)
from twinkle_jax.model.decoder.families import FUSED
from twinkle_jax.model.decoder.lora import adapter_change
from twinkle_jax.model.decoder.parameters import LAYER_SCALAR, Params, embedding_of
from twinkle_jax.model.decoder.precision import exact_product, matmul, mean_square, rounded, spread
from twinkle_jax.model.decoder.sharding import spread_lookup

_CHUNK = 16  # positions whose logits are held at once by `map_logits`

RotaryTable = tuple[Float[Array, "#batch time 1 half"], ...]
"""Cosines and sines, and maybe numbers that queries are multiplied by, [batch, time, 1, 1]."""


def project(
    x: Float[Array, "tokens into"], weights: Mapping[str, Any]
) -> Float[Array, "tokens out"]:
    """Multiply rows by `kernel` in the rows' type; add the adapter and the `bias`, if any."""
    y = matmul(x, weights["kernel"])
    if "lora_A" in weights:
        y = rounded(y + adapter_change(x, weights))
    return rounded(y + spread(weights["bias"], y.shape, x.dtype)) if "bias" in weights else y


def project_all(
    x: Float[Array, "tokens into"], weights: Mapping[str, Any], fused: str
) -> list[Float[Array, "tokens out"]]:
    """Apply the projections that are one tensor in some families, where one adapter changes all.

    Without a projection of values, there is no output for it.
    """
    outputs = [project(x, weights[name]) for name in FUSED[fused] if name in weights]
    if "lora_A" not in weights.get(fused, {}):  # frozen parameters have its scale alone
        return outputs
    ends = np.cumsum([y.shape[-1] for y in outputs])
    changes = jnp.split(adapter_change(x, weights[fused]), ends[:-1].tolist(), axis=-1)
    return [rounded(y + change) for y, change in zip(outputs, changes, strict=True)]


def rms_norm(
    x: Float[Array, "*batch width"],
    scale: Float[Array, " width"] | None,
    *,
    epsilon: float,
    centred: bool = False,
    wide: bool = False,
) -> Float[Array, "*batch width"]:
    r"""Divide by the root of the mean square, in float32, and multiply by a weight.

    $$y = \frac{x}{\sqrt{\overline{x^2} + \epsilon}} \cdot w \quad (\text{centred: } 1 + w)$$

    Args:
        x: rows to normalise.
        scale: $w$; None for 1.
        epsilon: $\epsilon$.
        centred: whether the weight is stored as its distance from 1.
        wide: whether the product is taken in float32, as it is with `centred`, else in the type of
            `x`: as the checkpoints of each family were trained.
    """
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(mean_square(x) + epsilon)
    if scale is None:
        return rounded(y, x.dtype)
    if centred or wide:
        scale = scale.reshape((1,) * (x.ndim - 1) + scale.shape)
        return rounded(y * (scale.astype(jnp.float32) + (1 if centred else 0)), x.dtype)
    return rounded(rounded(y, x.dtype) * spread(scale, x.shape, x.dtype))


def embed(
    config: DecoderConfig,
    embedding: Float[Array, "vocab width"],
    tokens: Int[Array, "*batch"],
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
) -> Float[Array, "*batch width"]:
    """Look up embeddings; an id outside the vocabulary gives NaN, not another token's embedding.

    In families that multiply embeddings, the factor is rounded to `dtype` first, as in Gemma 3's
    training.
    """
    embedded = _look_up(embedding, tokens, dtype, mesh)
    if config.embedding_multiplier != 1:
        embedded = embedded * jnp.asarray(config.embedding_multiplier, dtype)
    return rounded(embedded)


def _look_up(
    table: Float[Array, "vocab width"],
    tokens: Int[Array, "*batch"],
    dtype: jnp.dtype,
    mesh: Mesh | None,
) -> Float[Array, "*batch width"]:
    def look_up(table: Array, ids: Array) -> Array:
        return _rows_of(table, ids).astype(dtype)

    if mesh is None:
        return look_up(table, tokens)
    return spread_lookup(table, tokens, mesh, look_up)


@jax.custom_jvp
def _rows_of(
    table: Float[Array, "vocab width"], ids: Int[Array, "*batch"]
) -> Float[Array, "*batch width"]:
    """Take rows of a table; gradients of a row are summed in float32 and rounded once.

    In bfloat16, each addition to a row of a token that occurs often would round most of it away.
    """
    return table.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


@_rows_of.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    (table, ids), (change, _) = primals, tangents
    wide = jnp.float64 if table.dtype == jnp.float64 else jnp.float32
    rows = change.astype(wide).at[ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return _rows_of(table, ids), rows.astype(table.dtype)


def embed_for_layers(
    params: Params,
    config: DecoderConfig,
    embedded: Float[Array, "*batch width"],
    tokens: Int[Array, "*batch"],
    mesh: Mesh | None = None,
) -> Float[Array, "tokens layers width"]:
    r"""Compute what each layer reads of the token besides the residual stream.

    $$e_l = \frac{n(x P_l / \sqrt d) + \sqrt w\, E_l[t]}{\sqrt 2}$$

    with the token $t$, its embedding $x$ of width $d$, a table $E_l$ of width $w$ and a projection
    $P_l$ of each layer $l$, and a norm $n$.
    """
    width, dtype = config.token_width, embedded.dtype
    assert width is not None
    x = embedded.reshape(-1, embedded.shape[-1])
    projected = project(x, params["per_layer_model_projection"])
    projected = rounded(projected * jnp.asarray(config.hidden_size**-0.5, dtype))
    projected = projected.reshape(len(x), config.layers, width)
    projected = norm(config, projected, params["per_layer_projection_norm"])
    table = params["embed_tokens_per_layer"]["embedding"]
    looked_up = _look_up(table, tokens, dtype, mesh).reshape(projected.shape)
    looked_up = rounded(looked_up * jnp.asarray(width**0.5, dtype))
    return rounded(rounded(projected + looked_up) * jnp.asarray(2**-0.5, dtype))


def of_stack(
    stack: LayerStack, x: Shaped[Array, "tokens layers *item"]
) -> Shaped[Array, "repeats tokens members *item"]:
    """Take what belongs to the layers of a stack, as a scan over its repetitions reads it."""
    shape = len(x), stack.repeats, len(stack.block), *x.shape[2:]
    return jnp.moveaxis(x[:, stack.layers].reshape(shape), 1, 0)


def layer_flags(
    config: DecoderConfig, stack: LayerStack
) -> tuple[Bool[Array, "repeats members"], Bool[Array, "repeats members"]] | None:
    """Say which layers of a stack slide, and which take the second rotary table; None: by kind."""
    if config.slide_by_kind:
        return None
    flags = (config.sliding, config.second_rotary)
    slides, second = (jnp.asarray(stack.arranged(flag)) for flag in flags)
    return slides, second


def final_norm(
    params: Params, config: DecoderConfig, x: Float[Array, "tokens width"]
) -> Float[Array, "tokens width"]:
    """Apply the norm after the last layer, and the scale of the logits."""
    return _times(norm(config, x, params["norm"]), 1 / config.logits_scaling)


def norm(
    config: DecoderConfig, x: Float[Array, "*batch width"], weights: Params
) -> Float[Array, "*batch width"]:
    """Apply a norm in the family's form."""
    return rms_norm(
        x,
        weights["scale"],
        epsilon=config.norm_epsilon,
        centred=config.centred_norms,
        wide=config.float32_norms,
    )


def input_norm(
    config: DecoderConfig, x: Float[Array, "tokens width"], weights: Params, name: str
) -> Float[Array, "tokens width"]:
    """Normalise the input of half a layer, in families that do."""
    return norm(config, x, weights[name]) if config.input_norms else x


def add_mixed(
    config: DecoderConfig,
    x: Float[Array, "tokens width"],
    mixed: Float[Array, "tokens width"],
    weights: Params,
) -> Float[Array, "tokens width"]:
    """Add the first half of a layer, attention's output, to the residual stream."""
    if config.output_norms:
        mixed = norm(config, mixed, weights["post_attention_layernorm"])
    return add(config, x, mixed)


def add(
    config: DecoderConfig, x: Float[Array, "tokens width"], y: Float[Array, "tokens width"]
) -> Float[Array, "tokens width"]:
    """Add the output of half a layer to the residual stream."""
    return rounded(x + _times(y, config.residual_multiplier))


def activate(config: DecoderConfig, gate: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Apply the activation of the feed-forward gate."""
    return rounded(jax.nn.silu(gate) if config.activation == "silu" else jax.nn.gelu(gate))


def layer_output(
    config: DecoderConfig,
    x: Float[Array, "tokens width"],
    weights: Params,
    token: Float[Array, "tokens token_width"] | None = None,
) -> Float[Array, "tokens width"]:
    r"""End a layer: add what it reads of the token, and multiply by its number, if it has these.

    $$y = s\, (x + n((a(x G) \odot e) P))$$

    with an activation $a$ and a norm $n$. The number $s$ gets no gradient.
    """
    if token is not None:
        gate = activate(config, project(x, weights["per_layer_input_gate"]))
        y = project(rounded(gate * token), weights["per_layer_projection"])
        x = rounded(x + norm(config, y, weights["post_per_layer_input_norm"]))
    if not config.layer_scalars:
        return x
    return rounded(x * rounded(jax.lax.stop_gradient(weights[LAYER_SCALAR]), x.dtype)[None])


def _times(x: Float[Array, "*shape"], factor: float) -> Float[Array, "*shape"]:
    """Multiply by a factor that has more digits than the type of `x` may have."""
    if factor == 1:
        return x
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    return rounded(x.astype(wide) * factor, x.dtype)


def output_matrix(params: Params) -> Float[Array, "width vocab"]:
    """Return the output head: logits are `hidden @ matrix`. Tied embeddings are transposed.

    With a `logits_soft_cap` in the configuration, logits are these products behind the cap: give it
    to [`token_logprobs`][twinkle_jax.loss.token_logprobs], too.
    """
    matrix: Array = params["lm_head"]["kernel"] if "lm_head" in params else embedding_of(params).T
    return matrix


def output_logits(
    params: Params, config: DecoderConfig, hidden: Float[Array, "*batch width"]
) -> Float[Array, "*batch vocab"]:
    """Compute float32 logits of the next token, for all hidden states at once."""
    head = output_matrix(params).astype(hidden.dtype)
    return soft_capped(exact_product(hidden, head), config.logits_soft_cap)


def map_logits(
    function: Callable[[Float[Array, "batch some vocab"], Array], Any],
    params: Params,
    config: DecoderConfig,
    hidden: Float[Array, "batch time width"],
    columns: Shaped[Array, "batch time *rest"],
) -> Any:
    """Apply a function to the float32 logits of a few positions at a time, and join the results.

    So logits of all positions are never held; the backward pass computes them again.

    Args:
        function: from logits and the same positions of `columns` to arrays [batch, some, ...].
        params: of the decoder, for its head.
        config: of the decoder, for the cap of its logits.
        hidden: hidden states of all positions.
        columns: further values for each position.
    """
    head = output_matrix(params)
    wide = head.astype(jnp.float64 if jnp.float64 in (head.dtype, hidden.dtype) else jnp.float32)
    head = jax.lax.stop_gradient(head.astype(hidden.dtype))  # its gradient is that of `wide`
    time = hidden.shape[1]
    chunk = _CHUNK if time % _CHUNK == 0 else time

    @jax.checkpoint
    def apply(part: tuple[Array, Array]) -> Any:
        logits = _times_head(part[0], head, wide)
        return function(soft_capped(logits, config.logits_soft_cap), part[1])

    def split(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], time, *x.shape[3:])

    return jax.tree.map(join, jax.lax.map(apply, (split(hidden), split(columns))))


@jax.custom_jvp
def _times_head(
    hidden: Float[Array, "batch some width"],
    head: Float[Array, "width vocab"],
    wide: Float[Array, "width vocab"],
) -> Float[Array, "batch some vocab"]:
    """Multiply hidden states by a head, whose gradient goes to itself in a wider type.

    A loop over chunks adds up gradients in their own type: bfloat16 would round most chunks away.
    The wider head is not read, so there is no copy of it.
    """
    return exact_product(hidden, head)


def _change_of_logits(
    primals: tuple[Array, Array, Array], tangents: tuple[Any, Any, Any]
) -> tuple[Array, Array]:
    (hidden, head, _), (d_hidden, _, d_wide) = primals, tangents
    zero = jax.custom_derivatives.SymbolicZero  # of what is frozen: nothing is multiplied by it
    pairs = ((d_hidden, head), (hidden, d_wide))
    changes = [
        exact_product(x, y.astype(hidden.dtype))
        for x, y in pairs
        if not isinstance(x, zero) and not isinstance(y, zero)
    ]
    return exact_product(hidden, head), sum(changes[1:], changes[0])


_times_head.defjvp(_change_of_logits, symbolic_zeros=True)


# Rotary positions.


def rotary_frequencies(config: AttentionConfig) -> np.ndarray:
    r"""Compute the angle per position of each pair of entries, in float64.

    $$f_i = \theta^{-2i/d}$$

    With Llama 3's scaling, pairs with fewer than `low_frequency` turns over the original length
    rotate `factor` times slower, those with more than `high_frequency` turns are unchanged, and
    those in between are interpolated. With linear scaling all pairs rotate `factor` times slower.
    YaRN is like Llama 3's, but interpolates by the number of the pair, not by its turns. With
    LongRoPE each pair has a factor of its own. Proportional rotary positions leave the last pairs
    where they are.

    References:
        [RoFormer](https://arxiv.org/abs/2104.09864) (Su et al., 2021);
        [YaRN](https://arxiv.org/abs/2309.00071) (Peng et al., 2023);
        [LongRoPE](https://arxiv.org/abs/2402.13753) (Ding et al., 2024);
        [The Llama 3 herd of models](https://arxiv.org/abs/2407.21783) (2024)
    """
    exponents = np.arange(0, config.rotary_dim, 2) / config.rotary_dim
    frequencies = np.power(float(config.rope_theta), -exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, LongRopeScaling):
        return frequencies / np.array(scaling.factors)
    if isinstance(scaling, ProportionalScaling):
        pair = np.arange(len(frequencies))
        return np.where(pair < int(scaling.part * config.rotary_dim // 2), frequencies, 0)
    if isinstance(scaling, YarnScaling):
        unscaled = 1 - _yarn_ramp(config, scaling)
    else:
        turns = scaling.original_length * frequencies / (2 * math.pi)
        turns_between = scaling.high_frequency - scaling.low_frequency
        unscaled = np.clip((turns - scaling.low_frequency) / turns_between, 0, 1)
    return frequencies * (unscaled + (1 - unscaled) / scaling.factor)


def _yarn_ramp(config: AttentionConfig, scaling: YarnScaling) -> np.ndarray:
    """Compute how far each pair is stretched: 0 not at all, 1 by the whole factor."""

    def pair_with(turns: float) -> float:
        wavelengths = scaling.original_length / (2 * math.pi * turns)
        return config.rotary_dim * math.log(wavelengths) / (2 * math.log(config.rope_theta))

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The bounds are those of the authors' code, which counts pairs but compares with entries.
    first, last = max(first, 0), min(last, config.rotary_dim - 1)
    width = last - first or 0.001  # a step where both ends are the same pair
    return np.clip((np.arange(config.rotary_dim // 2) - first) / width, 0, 1)


def rotary_table(positions: Int[Array, "batch time"], config: AttentionConfig) -> RotaryTable:
    """Compute cosines and sines for each position and pair of entries, in float32.

    With YaRN and LongRoPE they are multiplied by the attention factor. For positions beyond the
    longest row they are NaN.
    """
    frequencies = jnp.asarray(rotary_frequencies(config), jnp.float32)
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if isinstance(config.rope_scaling, YarnScaling | LongRopeScaling):
        factor = config.rope_scaling.attention_factor
        cos, sin = factor * cos, factor * sin
    if config.longest_row is not None:
        fits = (positions < config.longest_row)[:, :, None, None]
        cos, sin = jnp.where(fits, cos, jnp.nan), jnp.where(fits, sin, jnp.nan)
    return cos, sin


def rotary_tables(
    positions: Int[Array, "batch time"], config: DecoderConfig
) -> tuple[RotaryTable, ...]:
    """Compute the table of full layers, and a second one for layers that differ, if any do.

    These are sliding layers, or layers without rotary positions, which are turned by 0. No family
    has both, nor one of them and queries that grow.
    """
    attention = config.attention
    table = rotary_table(positions, attention)
    scaling = attention.rope_scaling
    if isinstance(scaling, YarnScaling) and scaling.query_growth:
        lengths = (positions // scaling.original_length).astype(jnp.float32)
        return ((*table, 1 + scaling.query_growth * jnp.log1p(lengths)[:, :, None, None]),)
    if config.full_attention is not None:
        return rotary_table(positions, config.full_attention), table
    if config.unrotated_layers:
        cos, sin = table
        return table, (jnp.ones_like(cos), jnp.zeros_like(sin))
    if attention.window is None or attention.window.rope_theta is None:
        return (table,)
    theta = attention.window.rope_theta
    sliding = dataclasses.replace(attention, rope_theta=theta, rope_scaling=None)
    return table, rotary_table(positions, sliding)


def table_of(tables: tuple[RotaryTable, ...], second: Bool[Array, ""] | bool) -> RotaryTable:
    """Choose the table of a layer, by whether it takes the second one, if there are two."""
    if len(tables) == 1:
        return tables[0]
    if isinstance(second, bool):
        return tables[second]
    return jax.tree.map(lambda a, b: jnp.where(second, b, a), *tables)


def rotate(
    x: Float[Array, "batch time heads width"],
    table: RotaryTable,
    *,
    interleaved: bool = False,
) -> Float[Array, "batch time heads width"]:
    """Rotate the first entries of each head, entry i with entry i + half; keep the others.

    With `interleaved` a pair is entries 2i and 2i + 1, and is returned at i and i + half. The order
    is the same in queries and keys, so their products do not change.
    """
    cos, sin = table[:2]
    half = cos.shape[-1]
    first, second, rest = jnp.split(x, (half, 2 * half), axis=-1)
    if interleaved:
        first, second = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    a, b = first.astype(jnp.float32), second.astype(jnp.float32)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    rotated = rounded(rotated, x.dtype)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated
