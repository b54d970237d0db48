"""Optimizers by Twinkle's (PyTorch's) names, as Optax transformations of learning rate 1."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import optax

DEFAULT_LEARNING_RATE = 1e-5
# Names that Twinkle leaves out of weight decay.
_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def decayed(params: Any) -> Any:
    """Say of each parameter whether weight decay applies: not to norms and biases."""

    def applies(path: Any, leaf: Any) -> bool:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return _NOT_DECAYED.search(name.lower()) is None

    return jax.tree_util.tree_map_with_path(applies, params)


def _adamw(
    *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01
) -> optax.GradientTransformation:
    return optax.adamw(1.0, *betas, eps=eps, weight_decay=weight_decay, mask=decayed)


def _adam(
    *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> optax.GradientTransformation:
    return optax.adam(1.0, *betas, eps=eps)


def _sgd(*, momentum: float = 0.0, nesterov: bool = False) -> optax.GradientTransformation:
    return optax.sgd(1.0, momentum or None, nesterov)


def _lion(
    *, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
) -> optax.GradientTransformation:
    return optax.lion(1.0, *betas, weight_decay=weight_decay, mask=decayed)


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "AdamW": _adamw,
    "Adam": _adam,
    "SGD": _sgd,
    "Lion": _lion,
}


def choose_optimizer(
    optimizer: str | optax.GradientTransformation, options: dict[str, Any]
) -> optax.GradientTransformation:
    """Build an optimizer by name, with PyTorch's options; or take an Optax transformation."""
    if isinstance(optimizer, str):
        hashable = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
        return _named(optimizer, tuple(sorted(hashable.items())))
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(f"optimizer must be a name or an Optax transformation, got {optimizer!r}")
    if options:
        raise TypeError(f"options must be given to the Optax transformation itself, got {options}")
    return optimizer


@cache  # the same optimizer again must not be compiled again
def _named(name: str, options: tuple[tuple[str, Any], ...]) -> Any:
    if name not in OPTIMIZERS:
        raise ValueError(
            f"optimizer must be one of {', '.join(OPTIMIZERS)} or an Optax transformation, "
            f"got {name!r}"
        )
    known = OPTIMIZERS[name].__kwdefaults__ or {}
    unknown = sorted(set(dict(options)) - set(known))
    if unknown:
        raise TypeError(
            f"options of {name} must be among lr, {', '.join(known)}, got {unknown[0]!r}"
        )
    return OPTIMIZERS[name](**dict(options))
