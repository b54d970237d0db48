"""The Gated DeltaNet mixer: projections and a short convolution around the gated delta rule."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.model.decoder.bfloat16 import rounded
from twinkle_jax.model.decoder.cache import DeltaState
from twinkle_jax.model.decoder.config import DeltaNetConfig
from twinkle_jax.model.decoder.delta_rule import DeltaInputs, delta_rule, delta_rule_step
from twinkle_jax.model.decoder.project_and_norm import project, rms_norm


def delta_net(
    x: Float[Array, "tokens width"],
    weights: Mapping[str, Any],
    config: DeltaNetConfig,
    mask: Bool[Array, "batch time"],
    segment_ids: Int[Array, "batch time"] | None,
    *,
    epsilon: float,
) -> tuple[Float[Array, "tokens width"], DeltaState]:
    """Mix whole rows that start at column 0; padding follows them and leaves the state alone."""
    batch, time = mask.shape
    mixed = project(x, weights["in_proj_qkv"]).reshape(batch, time, -1)
    kernel = rounded(weights["conv1d"]["kernel"], x.dtype)
    convolved = _convolve(_taps(mixed, len(kernel), segment_ids), kernel)
    inputs = _inputs(x, weights, config, convolved)
    inputs = inputs._replace(
        log_decay=jnp.where(mask[:, :, None], inputs.log_decay, 0),
        strength=jnp.where(mask[:, :, None], inputs.strength, 0),
    )
    out, memory = delta_rule(inputs, segment_ids)
    past = kernel.shape[0] - 1
    length = jnp.sum(mask, axis=1, dtype=jnp.int32)
    columns = length[:, None] + jnp.arange(past, dtype=jnp.int32)[None]
    padded = jnp.pad(mixed, ((0, 0), (past, 0), (0, 0)))
    window = jnp.take_along_axis(padded, columns[:, :, None], axis=1)
    return _project_out(out, x, weights, epsilon), DeltaState(window, memory)


def delta_net_step(
    x: Float[Array, "batch width"],
    weights: Mapping[str, Any],
    config: DeltaNetConfig,
    state: DeltaState,
    *,
    epsilon: float,
) -> tuple[Float[Array, "batch width"], DeltaState]:
    """Mix one more token per row."""
    mixed = project(x, weights["in_proj_qkv"])[:, None]
    window = jnp.concatenate([state.window.astype(x.dtype), mixed], axis=1)
    kernel = rounded(weights["conv1d"]["kernel"], x.dtype)
    convolved = _convolve(jnp.split(window, len(kernel), axis=1), kernel)
    inputs = _inputs(x, weights, config, convolved)
    out, memory = delta_rule_step(state.memory, inputs)
    return _project_out(out, x, weights, epsilon), DeltaState(window[:, 1:], memory)


def _taps(
    x: Float[Array, "batch time channels"],
    number: int,
    segment_ids: Int[Array, "batch time"] | None,
) -> list[Float[Array, "batch time channels"]]:
    """Give each token and those before it in its segment, oldest first; 0 where there is none."""
    taps, time = [x], x.shape[1]
    for back in range(1, number):
        shifted = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, :time]
        if segment_ids is not None:
            same = jnp.pad(segment_ids[:, back:] == segment_ids[:, :-back], ((0, 0), (back, 0)))
            shifted = jnp.where(same[:, :time, None], shifted, 0)
        taps.insert(0, shifted)
    return taps


def _convolve(
    taps: Sequence[Float[Array, "batch time channels"]], kernel: Float[Array, "taps channels"]
) -> Float[Array, "batch time channels"]:
    """Weight each channel's taps, sum and apply SiLU: in float32, and in one order everywhere.

    A running sum in bfloat16, or another order in training than in decoding, makes the sampler's
    log-probabilities differ from the trainer's.
    """
    weights = kernel.astype(jnp.float32)[:, None, None]
    oldest, *others = [
        tap.astype(jnp.float32) * weight for tap, weight in zip(taps, weights, strict=True)
    ]
    return jax.nn.silu(sum(others, oldest))


def _inputs(
    x: Float[Array, "tokens width"],
    weights: Mapping[str, Any],
    config: DeltaNetConfig,
    convolved: Float[Array, "batch time channels"],
) -> DeltaInputs:
    """Split what was convolved into heads, and compute decay and strength from the rows."""
    batch, time, _ = convolved.shape
    keys, groups = config.key_heads * config.key_dim, config.value_heads // config.key_heads
    query, key, value = (
        part.reshape(batch, time, heads, -1)
        for part, heads in zip(
            jnp.split(convolved, (keys, 2 * keys), axis=-1),
            (config.key_heads, config.key_heads, config.value_heads),
            strict=True,
        )
    )
    query, key = (jnp.repeat(_unit(y), groups, axis=2) for y in (query, key))
    step = project(x, weights["in_proj_a"]).astype(jnp.float32)
    step = jax.nn.softplus(step + weights["dt_bias"].astype(jnp.float32)[None])
    log_decay = -jnp.exp(weights["A_log"].astype(jnp.float32))[None] * step
    strength = jax.nn.sigmoid(project(x, weights["in_proj_b"]).astype(jnp.float32))
    return DeltaInputs(
        query=query * config.key_dim**-0.5,
        key=key,
        value=value,
        log_decay=log_decay.reshape(batch, time, -1),
        strength=strength.reshape(batch, time, -1),
    )


def _unit(x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
    """Scale vectors to length 1; finite, with finite gradient, where a vector is 0."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def _project_out(
    out: Float[Array, "batch time heads value"],
    x: Float[Array, "tokens width"],
    weights: Mapping[str, Any],
    epsilon: float,
) -> Float[Array, "tokens width"]:
    """Normalise each head, gate it with the row it came from, and project it back."""
    gate = project(x, weights["in_proj_z"]).astype(jnp.float32)
    normed = rms_norm(rounded(out, x.dtype), weights["norm"]["scale"], epsilon=epsilon)
    gated = normed.reshape(gate.shape).astype(jnp.float32) * jax.nn.silu(gate)
    return project(rounded(gated, x.dtype), weights["out_proj"])
