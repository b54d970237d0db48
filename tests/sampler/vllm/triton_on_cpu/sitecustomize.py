"""Triton's interpreter as its backend for CPUs, in a process that starts with this on its path.

vLLM reports experts with its newer model runner alone, whose kernels are Triton's. The package for
CPUs comes with a Triton that compiles for GPUs only; its interpreter runs them anywhere.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from triton import backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class InterpretingDriver(DriverBase):
    """A driver of no device."""

    def __init__(self):
        pass

    @classmethod
    def is_active(cls):
        return True

    def map_python_to_cpp_type(self, ty):
        return ty

    def get_current_target(self):
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_benchmarker(self):
        return None


compiler = next(iter(backends.backends.values())).compiler  # not used
backends.backends.clear()
backends.backends["cpu"] = backends.Backend(compiler, InterpretingDriver)
