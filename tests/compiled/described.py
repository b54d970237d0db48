"""TPUs that are described and not there: libtpu compiles for them on any Linux machine."""

import os
import re
from importlib.util import find_spec

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from twinkle_jax.model import make_mesh
from twinkle_jax.model.decoder.sharding import AXES

INSTALL = "libtpu must be installed to compile for a TPU: pip install 'twinkle-jax[tpu-compiler]'"
_NO_HARDWARE = {  # so that libtpu neither looks for a TPU nor asks the network about one
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def installed() -> bool:
    """Say whether the compiler is there."""
    return find_spec("libtpu") is not None


def described_mesh(topology: str, data: int, fsdp: int, tensor: int, *, bare: bool) -> Mesh:
    """Make a mesh of described devices.

    Args:
        topology: kind and extent of a slice, such as "v5e:2x2" or "v5p:2x2x2".
        data: extent of the axis data.
        fsdp: of fsdp.
        tensor: of tensor.
        bare: take the devices in the order in which the topology lists them, not in the one in
            which `jax.make_mesh` arranges them.

    Raises:
        ModuleNotFoundError: without libtpu.
        ValueError: if libtpu does not know the topology, or it has another number of devices.
    """
    if not installed():
        raise ModuleNotFoundError(INSTALL)
    for name, value in _NO_HARDWARE.items():
        os.environ.setdefault(name, value)
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:
        reason = re.sub(r"\s+", " ", str(error))[:200]
        raise ValueError(
            "topology must be a kind of TPU and an extent that libtpu knows, such as 'v5e:4x4' or "
            f"'v5p:2x2x2', got {topology!r}: {reason}"
        ) from error
    shape = (data, fsdp, tensor)
    if len(found) != np.prod(shape):
        raise ValueError(f"data, fsdp and tensor must make up {len(found)} devices, got {shape}")
    if bare:
        return Mesh(np.array(found).reshape(shape), AXES)
    return jax.make_mesh(shape, AXES, make_mesh().axis_types, devices=found)
