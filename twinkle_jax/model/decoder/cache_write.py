"""A token's entry written into the cache on a TPU: in place, one block of each row.

A scatter would do, but a TPU carries it out with the width of a head along its 128 lanes, where the
products of attention want time: it copies the cache on the way, twice as large where a head is 64
wide. A kernel takes the cache as it lies.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

_LANES, _SUBLANES = 128, 16  # of a tile in 16 bits


def write_in_place(
    stack: Float[Array, "layers batch groups a b"],
    new: Float[Array, "batch groups width"],
    repeat: Int[Array, ""],
    length: Int[Array, " batch"],
    *,
    axis: int,
    mesh: Mesh | None,
    interpret: bool,
) -> Float[Array, "layers batch groups a b"]:
    """Write each row's entry into its slot along an axis; what finds no slot is dropped.

    Args:
        stack: keys or values of all layers; donate it.
        new: what is written.
        repeat: the layer.
        length: the slot of each row.
        axis: along which the slots are, 3 or 4.
        mesh: on which rows are spread over data and fsdp, and heads over tensor.
        interpret: whether to interpret the kernel, which only a TPU runs.
    """
    if axis == 3 and stack.shape[4] % _LANES:  # then slots lie along the lanes, where they fit
        swapped = stack.swapaxes(3, 4)
        options: Any = {"axis": 4, "mesh": mesh, "interpret": interpret}
        return write_in_place(swapped, new, repeat, length, **options).swapaxes(3, 4)
    write = partial(_write, axis=axis, interpret=interpret)
    if mesh is not None:
        rows = ("data", "fsdp")
        heads = None if stack.shape[2] % mesh.shape["tensor"] else "tensor"
        stacks, news = PartitionSpec(None, rows, heads), PartitionSpec(rows, heads)
        write = jax.shard_map(
            write,
            mesh=mesh,
            in_specs=(stacks, news, PartitionSpec(), PartitionSpec(rows)),
            out_specs=stacks,
            check_vma=False,  # kernels do not say along which axes their results vary
        )
    return write(stack, new.astype(stack.dtype), repeat, length)


def _write(
    stack: Array, new: Array, repeat: Array, length: Array, *, axis: int, interpret: bool
) -> Any:
    """Run the kernel for the rows and heads of one device, a row at a time."""
    slots = stack.shape[axis]
    size = min(slots, _LANES if axis == 4 else _SUBLANES)

    def block(row: Array, at: Any) -> Array:
        return jax.lax.div(jnp.minimum(at[row], slots - 1), jnp.int32(size))

    def place(row: Array, repeat: Any, at: Any) -> tuple[Any, ...]:
        along = (0, block(row, at)) if axis == 4 else (block(row, at), 0)
        return repeat[0], row, 0, *along

    def kernel(repeat: Any, at: Any, new: Any, old: Any, out: Any) -> None:
        row = pl.program_id(0)
        first = block(row, at) * size
        slot = first + jax.lax.broadcasted_iota(jnp.int32, out.shape[2:], axis - 2)
        entry = jnp.expand_dims(new[0].astype(jnp.float32), axis - 2)
        kept = jnp.where(slot == at[row], entry, old[0, 0].astype(jnp.float32))
        out[0, 0] = kept.astype(out.dtype)

    extents = list(stack.shape)
    extents[:2], extents[axis] = (1, 1), size
    part = pl.BlockSpec(tuple(extents), place)
    entry = pl.BlockSpec((1, *new.shape[1:]), lambda row, repeat, at: (row, 0, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(stack.shape, stack.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=(len(new),), in_specs=[entry, part], out_specs=part
        ),
        input_output_aliases={3: 0},
        interpret=interpret,
    )(repeat[None], length, new, stack)
