"""Attention for long rows on a TPU: JAX's splash attention, which holds no array [time, time]."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
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

_LANES = 128  # of which lengths must be multiples
_BLOCKS = (512, 384, 256, 128)


def splash_attention(
    query: Float[Array, "batch time heads width"],
    key: Float[Array, "batch time groups width"],
    value: Float[Array, "batch time groups width"],
    *,
    segment_ids: Int[Array, "batch time"] | None,
    scale: float,
    window: int | None,
    mesh: Mesh | None,
    interpret: bool,
) -> Float[Array, "batch time heads width"]:
    """Let each token see those before it in its segment, in its window where there is one.

    Each device attends in its own rows and heads. Rows are padded at their end to a multiple of 128
    tokens, which no token before them sees.

    Args:
        query: rotated queries.
        key: rotated keys; each serves `heads // groups` queries.
        value: values.
        segment_ids: equal for tokens that may see each other; None: all of a row.
        scale: what products of queries and keys are multiplied by.
        window: tokens that a token sees, itself included; None: all before it.
        mesh: on which rows are spread over data and fsdp, and heads over tensor.
        interpret: whether to interpret the kernel, which only a TPU runs.

    Returns:
        What each head attended to.
    """
    time = query.shape[1]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    query = (query.astype(wide) * scale).astype(query.dtype)
    given = [_heads_first(x) for x in (query, key, value)]
    if segment_ids is not None:
        given.append(jnp.pad(segment_ids, ((0, 0), (0, -time % _LANES)), constant_values=-1))
    attend = partial(_attend, window=window, interpret=interpret)
    if mesh is not None:
        rows, tensor = ("data", "fsdp"), "tensor"
        heads = PartitionSpec(rows, tensor)
        attend = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(heads, heads, heads, PartitionSpec(rows))[: len(given)],
            out_specs=heads,
            check_vma=False,  # kernels do not say along which axes their results vary
        )
    return jnp.swapaxes(attend(*given), 1, 2)[:, :time]


def _heads_first(
    x: Float[Array, "batch time heads width"],
) -> Float[Array, "batch heads time width"]:
    return jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, -x.shape[1] % _LANES), (0, 0)))


def _attend(
    query: Array, key: Array, value: Array, *segment_ids: Array, window: int | None, interpret: bool
) -> Array:
    """Run the kernel for the rows and heads of one device."""
    heads, time = query.shape[1:3]
    size = next(size for size in _BLOCKS if time % size == 0)
    # The mask is never held: blocks in it are known while tracing, entries computed from places.
    mask = CausalMask((time, time)) if window is None else _local(time, window)
    kernel = make_splash_mha(
        MultiHeadMask([mask] * heads),
        block_sizes=BlockSizes(*(size,) * 8),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )

    def row(query: Array, key: Array, value: Array, *ids: Array) -> Array:
        found: Array = kernel(query, key, value, *(SegmentIds(x, x) for x in ids))
        return found

    return jax.vmap(row)(query, key, value, *segment_ids)


def _local(time: int, window: int) -> Any:
    return LocalMask((time, time), window_size=(window - 1, 0), offset=0)
