"""Rotary positions: wavelengths, a table of cosines and sines, and the rotation of heads."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.model.decoder.bfloat16 import rounded
from twinkle_jax.model.decoder.config import AttentionConfig, LinearScaling

RotaryTable = tuple[Float[Array, "#batch time 1 half"], Float[Array, "#batch time 1 half"]]


def rotary_frequencies(config: AttentionConfig) -> np.ndarray:
    r"""Compute the angle per position of each pair of entries, in float64.

    $$f_i = \theta^{-2i/d}$$

    With Llama 3's scaling, pairs that turn less than `low_frequency` times over the original length
    turn `factor` times slower, those that turn more than `high_frequency` times stay, and between
    the two the factor is interpolated. With linear scaling all turn `factor` times slower.

    References:
        [RoFormer](https://arxiv.org/abs/2104.09864) (Su et al., 2021);
        [The Llama 3 herd of models](https://arxiv.org/abs/2407.21783) (2024)
    """
    exponents = np.arange(0, config.rotary_dim, 2) / config.rotary_dim
    frequencies = np.power(float(config.rope_theta), -exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    turns = scaling.original_length * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)
    kept = np.clip(kept, 0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotary_table(positions: Int[Array, "batch time"], config: AttentionConfig) -> RotaryTable:
    """Compute cosines and sines for each position and pair of entries, in float32."""
    frequencies = jnp.asarray(rotary_frequencies(config), jnp.float32)
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotary_tables(
    positions: Int[Array, "batch time"], config: AttentionConfig
) -> tuple[RotaryTable, ...]:
    """Compute the table of full layers, and that of sliding ones where there are any."""
    full = rotary_table(positions, config)
    if config.window is None:
        return (full,)
    theta = config.window.rope_theta
    sliding = dataclasses.replace(config, rope_theta=theta, rope_scaling=None)
    return full, rotary_table(positions, sliding)


def table_of(tables: tuple[RotaryTable, ...], sliding: Bool[Array, ""]) -> RotaryTable:
    """Choose a layer's table."""
    if len(tables) == 1:
        return tables[0]
    return jax.tree.map(lambda full, near: jnp.where(sliding, near, full), *tables)


def rotate(
    x: Float[Array, "batch time heads width"],
    table: RotaryTable,
) -> Float[Array, "batch time heads width"]:
    """Rotate the first entries of each head, entry i with entry i + half, and leave the rest."""
    cos, sin = table
    half = cos.shape[-1]
    first, second, rest = jnp.split(x, (half, 2 * half), axis=-1)
    a, b = first.astype(jnp.float32), second.astype(jnp.float32)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    turned = rounded(turned, x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned
