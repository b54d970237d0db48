"""Twinkle's `kernel`: XLA makes the kernels here, so there are none to put in their place."""

from typing import Any

from twinkle_jax.twinkle.names import PAGE


def _absent(name: str) -> Any:
    def refuse(*values: Any, **options: Any) -> Any:
        """Refuse: there are no other kernels."""
        raise NotImplementedError(f"{name} must be left out: XLA makes the kernels; see {PAGE}")

    return refuse


kernelize = _absent("kernelize")
liger_builtin = _absent("liger_builtin")
npu_builtin = _absent("npu_builtin")
