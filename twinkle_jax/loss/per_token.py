"""Arrays per token: checked and cleaned under a mask, and reduced to one number.

Each reduction is named by what it divides by. With gradient accumulation, pass the `denominator` of
the whole batch with each micro-batch and add up the results, so that the size of the micro-batch
changes nothing. With `denominator=1` a reduction is a plain sum, to be divided at the end.
"""

import math

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
    values = floats(**arrays)
    for name, value in zip(arrays, values, strict=True):
        if value.shape != mask.shape:
            raise ValueError(f"{name} must have the shape of mask, {mask.shape}, got {value.shape}")
    return [jnp.where(mask, value, 0) for value in values]


def floats(**arrays: Float[Array, "..."]) -> list[Float[Array, "..."]]:
    """Check that arrays are floating point; return them in float32, or all in float64 if one is."""
    values = [jnp.asarray(array) for array in arrays.values()]
    for name, value in zip(arrays, values, strict=True):
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating point, got {value.dtype}")
    double = any(value.dtype == jnp.float64 for value in values)
    return [value.astype(jnp.float64 if double else jnp.float32) for value in values]


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


def one_number(name: str, value: Coefficient, dtype: jnp.dtype) -> Float[Array, ""]:
    """Convert a coefficient; a loss divided by one number a row would be one loss a row."""
    if jnp.shape(value) != ():
        raise ValueError(f"{name} must be one number, got shape {jnp.shape(value)}")
    return jnp.asarray(value, dtype)


def token_mean(
    losses: PerToken, mask: Mask, *, denominator: Coefficient | None = None
) -> Float[Array, ""]:
    r"""Average over all tokens of the batch: long sequences weigh more (DAPO, BNPO, PPO).

    $$L = \frac{1}{N} \sum_{i,t} m_{it}\, \ell_{it}$$

    Args:
        losses: loss per token.
        mask: True where the token counts. Padding may hold anything.
        denominator: $N$, unmasked tokens of the whole batch; those in `mask` if None.

    Returns:
        The loss; 0 if all tokens are masked.

    Raises:
        ValueError: if the shapes differ, or `denominator` is not one number.
        TypeError: if `losses` is not floating point, or the mask not boolean.

    References:
        [DAPO](https://arxiv.org/abs/2503.14476) (Yu et al., 2025), section 3.3

    Example:
        >>> losses = jnp.array([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]])
        >>> token_mean(losses, jnp.array([[True, True, True], [True, False, False]]))
        Array(2.5, dtype=float32)
    """
    (losses,) = masked_inputs(mask, losses=losses)
    if denominator is None:
        denominator = jnp.sum(mask, dtype=losses.dtype)
    return _divided(jnp.sum(losses), denominator)


def sequence_mean(
    losses: PerToken, mask: Mask, *, denominator: Coefficient | None = None
) -> Float[Array, ""]:
    r"""Average inside each sequence, then over sequences: each weighs the same (GRPO, GSPO).

    $$L = \frac{1}{B} \sum_i \frac{\sum_t m_{it}\, \ell_{it}}{\max(1, \sum_t m_{it})}$$

    A sequence without tokens adds 0 and still counts in $B$, as in Twinkle and TRL.

    Args:
        losses: loss per token.
        mask: True where the token counts. Padding may hold anything.
        denominator: $B$, the sequences in the whole batch; those in `mask` if None.

    Returns:
        The loss; 0 if all tokens are masked.

    Raises:
        ValueError: if the shapes differ, or `denominator` is not one number.
        TypeError: if `losses` is not floating point, or the mask not boolean.

    References:
        [DeepSeekMath](https://arxiv.org/abs/2402.03300) (Shao et al., 2024), GRPO, equation 3

    Example:
        >>> losses = jnp.array([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]])
        >>> sequence_mean(losses, jnp.array([[True, True, True], [True, False, False]]))
        Array(3., dtype=float32)
    """
    (losses,) = masked_inputs(mask, losses=losses)
    lengths = jnp.sum(mask, axis=-1, dtype=losses.dtype)
    means = jnp.sum(losses, axis=-1) / jnp.maximum(lengths, 1)
    return _divided(jnp.sum(means), means.size if denominator is None else denominator)


def constant_length(
    losses: PerToken, mask: Mask, *, length: Coefficient, denominator: Coefficient | None = None
) -> Float[Array, ""]:
    r"""Divide each sequence's sum by one constant, then average over sequences (Dr. GRPO).

    $$L = \frac{1}{B\,L_{max}} \sum_{i,t} m_{it}\, \ell_{it}$$

    Unlike the means it has no bias to short right answers and long wrong ones.

    Args:
        losses: loss per token.
        mask: True where the token counts. Padding may hold anything.
        length: $L_{max}$, the longest completion that may be generated, in tokens.
        denominator: $B$, the sequences in the whole batch; those in `mask` if None.

    Returns:
        The loss; 0 if all tokens are masked.

    Raises:
        ValueError: if the shapes differ, or `length` or `denominator` is not one number.
        TypeError: if `losses` is not floating point, or the mask not boolean.

    References:
        [Understanding R1-Zero-Like Training](https://arxiv.org/abs/2503.20783) (Liu et al., 2025),
        Dr. GRPO

    Example:
        >>> losses = jnp.array([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]])
        >>> mask = jnp.array([[True, True, True], [True, False, False]])
        >>> constant_length(losses, mask, length=4)
        Array(1.25, dtype=float32)
    """
    (losses,) = masked_inputs(mask, losses=losses)
    per_sequence = jnp.sum(losses) / one_number("length", length, losses.dtype)
    sequences = math.prod(losses.shape[:-1])
    return _divided(per_sequence, sequences if denominator is None else denominator)


def _divided(total: Float[Array, ""], denominator: Coefficient) -> Float[Array, ""]:
    """Divide; 0 / 0 is 0."""
    divisor = one_number("denominator", denominator, total.dtype)
    return total / jnp.where(divisor == 0, 1, divisor)
