"""Losses as arguments of compiled functions, and what their reductions divide by.

The coefficients of a loss are traced, so that a clip range may change from step to step without a
new compilation. Coefficients that are 0 are not: they decide what has to be computed at all.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from twinkle_jax.model.train_step.scalars import traced_scalar

Static = tuple[Any, ...]
UNIT_SEQUENCES = {"sequences": 1, "pairs": 2, "batches": None}  # None: whatever their number


def split_loss(loss_fn: Any) -> tuple[Static, dict[str, Any]]:
    """Take a loss apart: a hashable rest, and the coefficients to trace."""
    if isinstance(loss_fn, type):
        name = loss_fn.__name__
        raise TypeError(f"loss_fn must be a loss such as {name}(), got the class {name}")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a loss of twinkle_jax.loss, got {loss_fn!r}")
    if not dataclasses.is_dataclass(loss_fn):
        return (loss_fn,), {}
    fields = {f.name: getattr(loss_fn, f.name) for f in dataclasses.fields(loss_fn) if f.init}
    traced = {name: value for name, value in fields.items() if _is_coefficient(value)}
    static = tuple((name, value) for name, value in fields.items() if name not in traced)
    return (type(loss_fn), static), {name: traced_scalar(value) for name, value in traced.items()}


def join_loss(static: Static, traced: dict[str, Any]) -> Callable[..., Any]:
    """Put a loss together again."""
    if len(static) == 1:
        return static[0]
    kind, fields = static
    return kind(**dict(fields), **traced)


def _is_coefficient(value: Any) -> bool:
    return isinstance(value, jax.Array) or (isinstance(value, float | np.floating) and value != 0)


def loss_denominator(
    loss_fn: Callable[..., Any], labelled: Bool[Array, "batch time"], rows: Bool[Array, " batch"]
) -> Float[Array, ""]:
    """Count what the loss says that it `divides_by`; one that does not say it, labelled tokens."""
    unit = getattr(loss_fn, "divides_by", "tokens")
    if unit == "tokens":
        return jnp.sum(labelled, dtype=jnp.float32)
    if unit not in UNIT_SEQUENCES:
        known = ", ".join(map(repr, ("tokens", *UNIT_SEQUENCES)))
        raise ValueError(f"divides_by must be one of {known}, got {unit!r}")
    size = UNIT_SEQUENCES[unit]
    return jnp.float32(1) if size is None else jnp.sum(rows, dtype=jnp.float32) / size
