"""Twinkle's `utils`: meshes, loggers, and what scripts ask about PyTorch's devices."""

from twinkle_jax.twinkle.infra import DeviceGroup, DeviceMesh, Platform, get_logger, is_master
from twinkle_jax.twinkle.names import add_submodules

__all__ = ["DeviceGroup", "DeviceMesh", "Platform", "Torch", "get_logger", "is_master"]


class Torch:
    """PyTorch's devices: none, so that scripts take the path without its kernels."""

    @staticmethod
    def is_npu_available() -> bool:
        """Return False."""
        return False

    @staticmethod
    def is_gpu_available() -> bool:
        """Return False."""
        return False


add_submodules(__name__, "device_mesh", "framework", "logger", "platforms")
