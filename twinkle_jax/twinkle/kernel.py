"""Twinkle's `kernel`: XLA makes the kernels here, so `--enable_liger` changes nothing."""

from collections.abc import Mapping
from typing import Any

from twinkle_jax.twinkle.names import PAGE, add_submodules, warn_once


def liger_builtin(model: Any) -> dict[str, Any]:
    """Return no kernels, with a warning."""
    warn_once("liger_builtin has no kernels: XLA makes them")
    return {}


def npu_builtin(model: Any) -> dict[str, Any]:
    """Return no kernels, with a warning."""
    warn_once("npu_builtin has no kernels: XLA makes them")
    return {}


def kernelize(model: Any, mapping: Mapping[str, Any]) -> Any:
    """Return the model itself; NotImplementedError for kernels of your own."""
    if mapping:
        raise NotImplementedError(f"mapping must be empty: XLA makes the kernels; see {PAGE}")
    return model


add_submodules(__name__, "builtin")
