"""Small maths that every layer shares: a projection and the root-mean-square norm."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from twinkle_jax.model.decoder.bfloat16 import multiply, rounded
from twinkle_jax.model.decoder.lora_dropout import KEYS, RATE, drop_out


def project(
    x: Float[Array, "tokens into"], weights: Mapping[str, Any]
) -> Float[Array, "tokens out"]:
    """Multiply rows by `kernel` in their own type; add adapter and `bias` where there are any."""
    y = _times(x, weights["kernel"])
    if "lora_A" in weights:
        y = rounded(y + _adapter_change(x, weights))
    return rounded(y + rounded(weights["bias"], x.dtype)[None]) if "bias" in weights else y


def _times(
    x: Float[Array, "tokens into"], matrix: Float[Array, "into out"]
) -> Float[Array, "tokens out"]:
    return multiply(jnp.matmul, x, rounded(matrix, x.dtype))


def _adapter_change(
    x: Float[Array, "tokens into"], weights: Mapping[str, Any]
) -> Float[Array, "tokens out"]:
    """Compute what an adapter adds to its projection; dropout where there are keys for it."""
    scale = rounded(weights["lora_scale"], x.dtype)
    if KEYS in weights:
        x = drop_out(x, weights[RATE], weights[KEYS])
    return rounded(scale * _times(_times(x, weights["lora_A"]), weights["lora_B"]))


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
