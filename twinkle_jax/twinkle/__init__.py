"""Twinkle's names: scripts import `twinkle_jax.twinkle.X` instead of `twinkle.X`.

Each module has the names of Twinkle's module, over the functions of the other folders, which import
nothing from here. `docs/from_twinkle.md` says what differs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinkle_jax.twinkle.infra import (
        DeviceGroup,
        DeviceMesh,
        Platform,
        get_device_placement,
        get_logger,
        initialize,
        is_master,
    )

__all__ = [
    "DeviceGroup",
    "DeviceMesh",
    "Platform",
    "get_device_placement",
    "get_logger",
    "initialize",
    "is_master",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("twinkle_jax.twinkle.infra"), name)
    raise AttributeError(
        f"module 'twinkle_jax.twinkle' has no attribute {name!r}; see docs/from_twinkle.md"
    )
