"""Scripts ask which of PyTorch's devices there are; here there are JAX's."""


class Torch:
    """PyTorch's devices: none."""

    @staticmethod
    def is_npu_available() -> bool:
        """Whether PyTorch has an NPU."""
        return False

    @staticmethod
    def is_gpu_available() -> bool:
        """Whether PyTorch has a GPU, whose kernels a script would wait for."""
        return False
