"""Gathers over many devices, in two steps: each in its neighbourhood, then from one to the next."""

import math

import jax
from jaxtyping import Array

_AT_ONCE = 32  # devices; the TPU compiler makes a gather over a larger cube a sum of padded shares


def steps_of(size: int) -> tuple[int, int]:
    """Devices of a neighbourhood, and neighbourhoods, among so many devices on an axis.

    As equal as they can be beyond 32 devices; one neighbourhood up to there.
    """
    if size <= _AT_ONCE:
        return size, 1
    near = next(n for n in range(math.isqrt(size), 0, -1) if size % n == 0)
    return near, size // near


def gather_in_steps(x: Array, axis: str, dimension: int, steps: tuple[int, int]) -> Array:
    """Concatenate the shares of all devices on an axis of a mesh, inside `shard_map`.

    Every device sends what one gather would have sent: its share to its neighbourhood, and then
    the neighbourhood's part to the others. The gradient is summed and scattered in the same steps.

    Args:
        x: the share of a device.
        axis: the axis of the mesh.
        dimension: that is concatenated.
        steps: devices of a neighbourhood, and neighbourhoods; their product is all devices.

    Returns:
        The whole array, with shares in the order of their devices.
    """
    near, far = steps
    inside = [[start * near + n for n in range(near)] for start in range(far)]
    across = [[start * near + n for start in range(far)] for n in range(near)]
    for size, groups in ((near, inside), (far, across)):
        if size > 1:
            all_devices = size == near * far
            x = jax.lax.all_gather(
                x,
                axis,
                axis=dimension,
                tiled=True,
                axis_index_groups=None if all_devices else groups,
            )
    return x
