"""TPUs and GPUs that are described and not there: their compilers run on any Linux machine."""

import os
import re
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from twinkle_jax.model import make_mesh
from twinkle_jax.model.decoder.sharding import AXES

_MODULES = {"tpu": ["libtpu"], "cuda": ["jax_cuda12_plugin", "jax_cuda13_plugin"]}
_NO_HARDWARE = {  # so that libtpu neither looks for a TPU nor asks the network about one
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 10 patch: 0 }
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 l2_cache_size: 52428800
  memory_bandwidth: 3352320000000 device_memory_size: 84978434048
}
"""


def described_mesh(topology: str, data: int, fsdp: int, tensor: int, *, bare: bool) -> Mesh:
    """Make a mesh of described devices.

    Args:
        topology: kind and extent: of a slice of TPUs, such as "v5e:2x2" or "v5p:2x2x2", or hosts
            and GPUs of each, "h100:1x8".
        data: extent of the axis data.
        fsdp: of fsdp.
        tensor: of tensor.
        bare: take the devices in the order in which the topology lists them, not in the one in
            which `jax.make_mesh` arranges them.

    Raises:
        ModuleNotFoundError: without the compiler.
        ValueError: if the compiler does not know the topology, or it has another number of devices.
    """
    platform, options = _described(topology)
    if not installed(platform):
        raise ModuleNotFoundError(how_to_install(platform))
    for name, value in _NO_HARDWARE.items():
        os.environ.setdefault(name, value)
    try:
        described = topologies.get_topology_desc(platform=platform, **options).devices
    except Exception as error:
        reason = re.sub(r"\s+", " ", str(error))[:200]
        raise ValueError(
            "topology must be a kind and an extent that its compiler knows, such as 'v5e:4x4', "
            f"'v5p:2x2x2' or 'h100:1x8', got {topology!r}: {reason}"
        ) from error
    shape = (data, fsdp, tensor)
    if len(described) != np.prod(shape):
        raise ValueError(
            f"data, fsdp and tensor must make up {len(described)} devices, got {shape}"
        )
    if bare:
        return Mesh(np.array(described).reshape(shape), AXES)
    return jax.make_mesh(shape, AXES, make_mesh().axis_types, devices=described)


def _described(topology: str) -> tuple[str, dict[str, Any]]:
    """Give the platform that a topology belongs to, and what its compiler is told."""
    kind, _, extent = topology.partition(":")
    if kind != "h100":
        return "tpu", {"topology_name": topology}
    return "cuda", {"topology_name": extent, "topology": f"1x{extent}", "target_config": _H100}


def installed(platform: str) -> bool:
    """Say whether the compiler for a platform is there."""
    return any(find_spec(name) is not None for name in _MODULES[platform])


def how_to_install(platform: str) -> str:
    """Say what brings it."""
    return (
        f"{' or '.join(_MODULES[platform])} must be installed to compile for {platform}: "
        f"pip install -e '.[{platform}-compiler]'"
    )
