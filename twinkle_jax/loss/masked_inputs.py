"""Check the arrays of a loss (shapes, types, the mask), and set masked entries to zero."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Coefficient = float | Float[Array, ""]
"""A coefficient; it may be traced."""

PerToken = Float[Array, "*batch time"]
"""One number per token."""

Mask = Bool[Array, "*batch time"]
"""True where a token counts."""

Advantages = Float[Array, "*batch"] | Float[Array, "*batch time"]
"""One advantage per sequence, or one per token."""


def masked_inputs(mask: Mask, /, **arrays: PerToken) -> list[PerToken]:
    """Check per-token arrays against their mask and put zeros where the mask is False.

    Zeros go in before any `exp` or `log`: a mask on the result would leave NaN gradients.
    The arrays come back in float32, or in float64 if one of them is float64.
    """
    mask = checked_mask(mask)
    values = {name: jnp.asarray(array) for name, array in arrays.items()}
    for name, value in values.items():
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating point, got {value.dtype}")
        if value.shape != mask.shape:
            raise ValueError(f"{name} must have the shape of mask, {mask.shape}, got {value.shape}")
    double = any(value.dtype == jnp.float64 for value in values.values())
    dtype = jnp.float64 if double else jnp.float32
    return [jnp.where(mask, value.astype(dtype), 0) for value in values.values()]


def checked_mask(mask: Mask) -> Mask:
    """Check that the mask is boolean and has a time axis."""
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise TypeError(f"mask must be boolean (True = keep), got {mask.dtype}; try mask != 0")
    if mask.ndim == 0:
        raise ValueError("mask must have a time axis, got shape ()")
    return mask


def masked_advantages(advantages: Advantages, mask: Mask, dtype: jnp.dtype) -> PerToken:
    """Spread advantages over time, without a gradient and with zeros where the mask is False."""
    mask = checked_mask(mask)
    values = jnp.asarray(advantages)
    if not jnp.isdtype(values.dtype, ("integral", "real floating")):
        raise TypeError(f"advantages must be real numbers, got {values.dtype}")
    if values.shape == mask.shape[:-1]:
        values = values[..., None]
    elif values.shape != mask.shape:
        raise ValueError(
            f"advantages must have shape {mask.shape[:-1]} (one a sequence) or {mask.shape} "
            f"(one a token), got {values.shape}"
        )
    spread = jnp.broadcast_to(values.astype(dtype), mask.shape)
    return jnp.where(mask, jax.lax.stop_gradient(spread), 0)
