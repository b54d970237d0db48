"""Optimizers by Twinkle's (PyTorch's) names, as Optax transformations of learning rate 1."""

from collections.abc import Callable
from functools import cache
from typing import Any

import optax


def _adamw(
    *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01
) -> optax.GradientTransformation:
    return optax.adamw(1.0, *betas, eps=eps, weight_decay=weight_decay)


def _adam(
    *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> optax.GradientTransformation:
    return optax.adam(1.0, *betas, eps=eps)


def _sgd(*, momentum: float = 0.0, nesterov: bool = False) -> optax.GradientTransformation:
    return optax.sgd(1.0, momentum or None, nesterov)


def _lion(
    *, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
) -> optax.GradientTransformation:
    return optax.lion(1.0, *betas, weight_decay=weight_decay)


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "AdamW": _adamw,
    "Adam": _adam,
    "SGD": _sgd,
    "Lion": _lion,
}


@cache  # the same optimizer again must not be compiled again
def named_optimizer(name: str, options: tuple[tuple[str, Any], ...]) -> Any:
    """Build an optimizer; options have PyTorch's names and defaults."""
    if name not in OPTIMIZERS:
        raise ValueError(
            f"expected an optimizer of {', '.join(OPTIMIZERS)} or an Optax transformation, "
            f"got {name!r}"
        )
    try:
        return OPTIMIZERS[name](**dict(options))
    except TypeError as error:
        defaults = OPTIMIZERS[name].__kwdefaults__ or {}
        known = ", ".join(defaults)
        raise TypeError(f"{name} knows lr, {known}: {error}") from None
