"""Twinkle's names: in a script, `twinkle.X` becomes `twinkle_jax.twinkle.X` in the imports.

Each module here has the names of Twinkle's module of the same name, and calls the functions of the
other rooms, which import nothing from here. `docs/from_twinkle.md` says what differs.
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
        f"module 'twinkle_jax.twinkle' has no attribute {name!r}: docs/from_twinkle.md lists the "
        "names that there are"
    )
