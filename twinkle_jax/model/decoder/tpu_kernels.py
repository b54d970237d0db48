"""Kernels for TPUs: attention over long rows, products of experts, tokens written into the cache.

Attention is JAX's splash attention, which allocates no array of [time, time].

The cache is updated in place, one block per row. On a TPU, XLA's scatter wants the width of a head
along the 128 lanes, where the products of attention want time. It would copy the whole cache to
another layout, twice as large for heads of width 64. The kernel works on the layout as it is.

Rows of experts are multiplied by JAX's megablox. XLA has a kernel for `jax.lax.ragged_dot`, but
none for the gradient of the matrices, which it computes from all rows for each of them.

Importing Pallas takes a quarter of a second, so this file is imported where a kernel is traced.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    CausalMask,
    LocalMask,
    MultiHeadMask,
    SegmentIds,
    make_splash_mha,
)
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from twinkle_jax.model.decoder.sharding import ROWS

_LANES, _SUBLANES = 128, 16  # of a tile in 16 bits
_TILE = (128, 2048, 512)  # of a product of groups: rows, the sum, columns; at most
_BLOCKS = (512, 384, 256, 128)  # of splash attention: lengths are multiples of the smallest


def splash_attention(
    query: Float[Array, "batch time heads width"],
    key: Float[Array, "batch time groups width"],
    value: Float[Array, "batch time groups width"],
    sinks: Float[Array, " heads"] | None = None,
    *,
    segment_ids: Int[Array, "batch time"] | None,
    scale: float,
    soft_cap: float | None = None,
    window: int | None,
    mesh: Mesh | None,
    interpret: bool,
) -> Float[Array, "batch time heads width"]:
    """Causal attention within segments, and within a window if one is given.

    Each device computes its own rows and heads. Rows are padded at their end to a multiple of 128
    tokens, which causality hides from the tokens before.

    Args:
        query: rotated queries.
        key: rotated keys; each serves `heads // groups` queries.
        value: values.
        sinks: a logit of each head in the softmax, without a value; None for none.
        segment_ids: equal for tokens that may attend to each other; None: one segment per row.
        scale: factor on the products of queries and keys.
        soft_cap: bound of the logits; None for none.
        window: tokens that a token attends to, itself included; None: all before it.
        mesh: devices; rows are spread over data and fsdp, and heads over tensor.
        interpret: whether to interpret the kernel, as backends other than TPUs must.

    Returns:
        The output of each head.
    """
    time = query.shape[1]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    query = (query.astype(wide) * scale).astype(query.dtype)
    heads = PartitionSpec(ROWS, "tensor")
    arrays, specs = {}, {}
    if segment_ids is not None:
        padding = (0, 0), (0, -time % _LANES)
        arrays["segment_ids"] = jnp.pad(segment_ids, padding, constant_values=-1)
        specs["segment_ids"] = PartitionSpec(ROWS)
    if sinks is not None:
        arrays["sinks"], specs["sinks"] = sinks, PartitionSpec("tensor")
    attend = partial(_splash_kernel, soft_cap=soft_cap, window=window, interpret=interpret)
    if mesh is not None:
        attend = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(heads, heads, heads, specs),
            out_specs=heads,
            check_vma=False,  # kernels do not say along which axes their results vary
        )
    query, key, value = (_heads_first(x) for x in (query, key, value))
    return jnp.swapaxes(attend(query, key, value, arrays), 1, 2)[:, :time]


def _heads_first(
    x: Float[Array, "batch time heads width"],
) -> Float[Array, "batch heads time width"]:
    return jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, -x.shape[1] % _LANES), (0, 0)))


def _splash_kernel(
    query: Array,
    key: Array,
    value: Array,
    others: Mapping[str, Array],
    *,
    soft_cap: float | None,
    window: int | None,
    interpret: bool,
) -> Array:
    """Run the kernel for the rows and heads of one device."""
    heads, time = query.shape[1:3]
    size = next(size for size in _BLOCKS if time % size == 0)
    # The mask is never allocated: its blocks are known while tracing, its entries are computed.
    mask = (
        CausalMask((time, time))
        if window is None
        else LocalMask((time, time), window_size=(window - 1, 0), offset=0)
    )
    kernel = make_splash_mha(
        MultiHeadMask([mask] * heads),
        block_sizes=BlockSizes(*(size,) * 8),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=soft_cap,
        interpret=interpret,
    )

    def row(query: Array, key: Array, value: Array, ids: Array | None) -> Array:
        segments = None if ids is None else SegmentIds(ids, ids)
        attended: Array = kernel(query, key, value, segments, others.get("sinks"))
        return attended

    return jax.vmap(row)(query, key, value, others.get("segment_ids"))


def write_in_place(
    stack: Float[Array, "layers lines groups a b"],
    new: Float[Array, "batch groups width"],
    repeat: Int[Array, ""],
    slot: Int[Array, " batch"],
    line: Int[Array, " batch"] | None = None,
    *,
    axis: int,
    mesh: Mesh | None,
    interpret: bool,
) -> Float[Array, "layers lines groups a b"]:
    """Write one entry per row into its slot along an axis; out-of-range slots are dropped.

    Args:
        stack: keys or values of all layers; donate it.
        new: the entries.
        repeat: the layer.
        slot: of each row.
        line: the line of each row's slot; None: line i for row i. A line that a row writes to must
            not be named by another row: a block is read before the previous one is written back.
        axis: axis of the slots, 3 or 4.
        mesh: devices; rows are spread over data and fsdp, and heads over tensor.
        interpret: whether to interpret the kernel, as backends other than TPUs must.
    """
    if axis == 3 and stack.shape[4] % _LANES:  # the width would not fill the lanes: slots do
        swapped = stack.swapaxes(3, 4)
        options: Any = {"axis": 4, "mesh": mesh, "interpret": interpret}
        return write_in_place(swapped, new, repeat, slot, line, **options).swapaxes(3, 4)
    write = partial(_write_kernel, line=line, axis=axis, interpret=interpret)
    if mesh is not None:
        assert line is None
        heads = None if stack.shape[2] % mesh.shape["tensor"] else "tensor"
        stacks, news = PartitionSpec(None, ROWS, heads), PartitionSpec(ROWS, heads)
        write = jax.shard_map(
            write,
            mesh=mesh,
            in_specs=(stacks, news, PartitionSpec(), PartitionSpec(ROWS)),
            out_specs=stacks,
            check_vma=False,  # kernels do not say along which axes their results vary
        )
    return write(stack, new.astype(stack.dtype), repeat, slot)


def _write_kernel(
    stack: Array,
    new: Array,
    repeat: Array,
    slot: Array,
    *,
    line: Array | None,
    axis: int,
    interpret: bool,
) -> Any:
    """Run the kernel for the rows and heads of one device: one block of one row per grid step."""
    slots = stack.shape[axis]
    line = jnp.arange(len(new), dtype=jnp.int32) if line is None else line
    size = min(slots, _LANES if axis == 4 else _SUBLANES)

    def block(row: Array, at: Any) -> Array:
        return jax.lax.div(jnp.minimum(at[row], slots - 1), jnp.int32(size))

    def place(row: Array, repeat: Any, at: Any, line: Any) -> tuple[Any, ...]:
        along = (0, block(row, at)) if axis == 4 else (block(row, at), 0)
        return repeat[0], line[row], 0, *along

    def kernel(repeat: Any, at: Any, line: Any, new: Any, old: Any, out: Any) -> None:
        row = pl.program_id(0)
        first = block(row, at) * size
        slot = first + jax.lax.broadcasted_iota(jnp.int32, out.shape[2:], axis - 2)
        entry = jnp.expand_dims(new[0].astype(jnp.float32), axis - 2)
        kept = jnp.where(slot == at[row], entry, old[0, 0].astype(jnp.float32))
        out[0, 0] = kept.astype(out.dtype)

    extents = list(stack.shape)
    extents[:2], extents[axis] = (1, 1), size
    part = pl.BlockSpec(tuple(extents), place)
    entry = pl.BlockSpec((1, *new.shape[1:]), lambda row, repeat, at, line: (row, 0, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(stack.shape, stack.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3, grid=(len(new),), in_specs=[entry, part], out_specs=part
        ),
        input_output_aliases={4: 0},  # `stack`, behind three scalars and `new`, is updated in place
        interpret=interpret,
    )(repeat[None], slot, line, new, stack)


def multiply_groups(
    rows: Float[Array, "rows width"],
    matrices: Float[Array, "groups width out"],
    sizes: Int[Array, " groups"],
    *,
    interpret: bool,
) -> Float[Array, "rows out"]:
    """Multiply rows, sorted by group, by the matrix of their group.

    Args:
        rows: those of no group come last; what they get is undefined.
        matrices: of the groups.
        sizes: rows of each group.
        interpret: whether to interpret the kernel, as backends other than TPUs must.
    """
    count = len(rows)
    rows = jnp.pad(rows, ((0, -count % _TILE[0]), (0, 0)))
    rest = len(rows) - jnp.sum(sizes, dtype=jnp.int32)  # a group without a matrix
    sizes = jnp.concatenate([sizes, rest[None]])
    with jax.numpy_dtype_promotion("standard"):  # it mixes types inside
        product: Array = gmm(
            rows, matrices, sizes, rows.dtype, _tile_of_groups, None, None, False, interpret
        )
    return product[:count]


def _tile_of_groups(rows: int, width: int, out: int) -> tuple[int, int, int]:
    return _TILE[0], min(width, _TILE[1]), min(out, _TILE[2])
