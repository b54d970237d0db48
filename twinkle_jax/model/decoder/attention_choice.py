"""Which implementation of attention runs: the fused one of the backend where it applies, or XLA."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from twinkle_jax.model.decoder.config import AttentionConfig

AttentionImplementation = Literal["xla", "cudnn", "splash"]

_WIDEST_SPLASH = 256  # of a head, as far as it was compiled


def default_attention(
    config: AttentionConfig,
    dtype: DTypeLike,
    *,
    segmented: bool = False,
    backend: str | None = None,
    compute_capability: float | None = None,
) -> AttentionImplementation:
    """Choose the implementation of attention: the fused one of the backend, where it applies.

    Scoring and training take the same one, so that the ratio of a policy to itself is 1.

    cuDNN's attention runs on NVIDIA GPUs from compute capability 8.0, in 16-bit types, for heads
    whose width is a multiple of 8 of at most 128 (256 from 9.0), without segments. Splash attention
    runs on TPUs, in bfloat16 and float32, for heads of at most 256. Neither holds an array of
    [time, time]. XLA's attention, that of `jax.nn.dot_product_attention`, runs everywhere.

    Args:
        config: the attention.
        dtype: type that the decoder computes in.
        segmented: whether rows hold several segments.
        backend: `"cpu"`, `"gpu"` or `"tpu"`; by default, JAX's.
        compute_capability: of the GPU; by default, of the first one.

    Returns:
        `"cudnn"`, `"splash"` or `"xla"`.

    Example:
        >>> from twinkle_jax.model import AttentionConfig, default_attention
        >>> heads = AttentionConfig(8, 2, head_dim=128, rotary_dim=128, rope_theta=1e6)
        >>> default_attention(heads, "bfloat16", backend="gpu", compute_capability=9.0)
        'cudnn'
        >>> default_attention(heads, "float32", backend="gpu", compute_capability=9.0)
        'xla'
        >>> default_attention(heads, "bfloat16", backend="tpu")
        'splash'
    """
    backend = jax.default_backend() if backend is None else backend
    if backend == "gpu":
        fits = _cudnn_fits(config, dtype, segmented, compute_capability)
        return "cudnn" if fits else "xla"
    return "splash" if backend == "tpu" and _splash_fits(config, dtype) else "xla"


def choose_attention(
    named: AttentionImplementation | None,
    config: AttentionConfig,
    dtype: DTypeLike,
    *,
    segmented: bool,
    mesh: Mesh | None,
) -> AttentionImplementation:
    """Take what was named, if it runs on the devices that are there; by default, the best.

    On a CPU splash attention is interpreted: slowly, but with the values that it has on a TPU.
    """
    backend = backend_of(mesh)
    default = default_attention(
        config,
        dtype,
        segmented=segmented,
        backend=backend,
        compute_capability=_capability(mesh) if backend == "gpu" else None,
    )
    fits = {default, "xla"}
    if backend == "cpu" and _splash_fits(config, dtype):
        fits.add("splash")
    if named is not None and named not in fits:
        raise ValueError(
            f"attention must be {' or '.join(map(repr, sorted(fits)))} for heads of width "
            f"{config.head_dim} in {jnp.dtype(dtype)}, {'with' if segmented else 'without'} "
            f"segment_ids, on a {backend}, got {named!r}"
        )
    return default if named is None else named


def interpreted(mesh: Mesh | None) -> bool:
    """Say whether kernels for TPUs must be interpreted on these devices."""
    return backend_of(mesh) != "tpu"


def backend_of(mesh: Mesh | None) -> str:
    """Name the backend that the devices belong to, which may be described and not there."""
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return "gpu" if platform in ("cuda", "rocm") else platform


def _splash_fits(config: AttentionConfig, dtype: DTypeLike) -> bool:
    return jnp.dtype(dtype) in (jnp.bfloat16, jnp.float32) and config.head_dim <= _WIDEST_SPLASH


def _cudnn_fits(
    config: AttentionConfig, dtype: DTypeLike, segmented: bool, capability: float | None
) -> bool:
    if segmented or jnp.dtype(dtype).itemsize != 2 or config.head_dim % 8:
        return False
    capability = _capability(None) if capability is None else capability
    return config.head_dim <= (256 if capability >= 9 else 128 if capability >= 8 else 0)


def _capability(mesh: Mesh | None) -> float:
    """Compute capability of a GPU; 0 for other vendors', which report none and have no cuDNN."""
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    reported = str(getattr(device, "compute_capability", ""))
    return float(reported) if reported.replace(".", "", 1).isdigit() else 0.0
