"""Softmax attention over grouped heads, of whole rows and of rows in a cache.

It runs the backend's fused implementation where that applies, else XLA's.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.loss.token_logprobs import compute_capability, soft_capped
from twinkle_jax.model.decoder.cache import KeyValues, WindowedKeyValues, write_token
from twinkle_jax.model.decoder.config import AttentionConfig, DecoderConfig
from twinkle_jax.model.decoder.heads import Heads, project_heads, project_out
from twinkle_jax.model.decoder.layers import RotaryTable
from twinkle_jax.model.decoder.pages import PageTable, Places, finite_values, write_in_pages
from twinkle_jax.model.decoder.parameters import Params
from twinkle_jax.model.decoder.precision import multiply, rounded, traced_backend
from twinkle_jax.model.decoder.sharding import ROWS, backend_of

AttentionImplementation = Literal["xla", "cudnn", "splash"]

_WIDEST_SPLASH = 256  # the widest head that splash attention was compiled for
_SMALLEST_BLOCK, _BLOCKS = 128, 4  # queries of a block of XLA's attention; blocks of a row at most


def default_attention(
    config: AttentionConfig,
    dtype: DTypeLike,
    *,
    segmented: bool = False,
    backend: str | None = None,
    compute_capability: float | None = None,
) -> AttentionImplementation:
    """Choose the implementation of attention: the backend's fused one, where it applies.

    Scoring and training use the same one, so that the ratio of a policy to itself is 1.

    cuDNN's attention runs on NVIDIA GPUs from compute capability 8.0, in 16-bit types, for heads
    whose width is a multiple of 8 of at most 128 (256 from 9.0), without segments, soft cap
    or sinks. Splash attention runs on TPUs, in bfloat16 and float32, for heads of at most 256.
    Neither allocates an array of [time, time]. XLA's attention runs everywhere.

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
    kinds: Mapping[str, AttentionConfig],
    dtype: DTypeLike,
    *,
    segmented: bool,
    mesh: Mesh | None,
) -> dict[str, AttentionImplementation]:
    """Choose an implementation for each kind of layers: the named one, by default the best.

    Kinds that the named one does not support here take their best; if none does, it is refused. On
    a CPU splash attention is interpreted: slow, but with the values that it has on a TPU.
    """
    backend = backend_of(mesh)
    chosen: dict[str, AttentionImplementation] = {}
    fit_any: set[str] = set()
    for kind, config in kinds.items():
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
        chosen[kind] = default if named is None or named not in fits else named
        fit_any |= fits
    if named is not None and named not in fit_any:
        widths = " and ".join(str(width) for width in sorted({a.head_dim for a in kinds.values()}))
        raise ValueError(
            f"attention must be {' or '.join(map(repr, sorted(fit_any)))} for heads of width "
            f"{widths} in {jnp.dtype(dtype)}, {'with' if segmented else 'without'} "
            f"segment_ids, on a {backend}, got {named!r}"
        )
    return chosen


def _splash_fits(config: AttentionConfig, dtype: DTypeLike) -> bool:
    return jnp.dtype(dtype) in (jnp.bfloat16, jnp.float32) and config.head_dim <= _WIDEST_SPLASH


def _cudnn_fits(
    config: AttentionConfig, dtype: DTypeLike, segmented: bool, capability: float | None
) -> bool:
    if segmented or config.soft_cap is not None or config.sinks:
        return False
    if jnp.dtype(dtype).itemsize != 2 or config.head_dim % 8:
        return False
    capability = _capability(None) if capability is None else capability
    return config.head_dim <= (256 if capability >= 9 else 128 if capability >= 8 else 0)


def _capability(mesh: Mesh | None) -> float:
    return compute_capability(jax.local_devices()[0] if mesh is None else mesh.devices.flat[0])


# Whole rows.


def attend_causally(
    heads: Heads,
    config: AttentionConfig,
    sliding: Bool[Array, ""] | bool,
    segment_ids: Int[Array, "batch time"] | None,
    *,
    implementation: AttentionImplementation,
    mesh: Mesh | None,
) -> Float[Array, "batch time heads width"]:
    """Causal attention over whole rows, within the window if the layer slides.

    Whether it slides may be traced, so that layers of both kinds are one scan over one body.
    """

    def see(window: int | None, query: Array, key: Array, value: Array, *sinks: Array) -> Array:
        if implementation == "xla":
            return _attend_blocks(query, key, value, window, segment_ids, config, *sinks)
        with jax.numpy_dtype_promotion("standard"):  # both mix types inside
            if implementation == "splash":
                from twinkle_jax.model.decoder.tpu_kernels import splash_attention  # slow to import

                return splash_attention(
                    query,
                    key,
                    value,
                    *sinks,
                    segment_ids=segment_ids,
                    scale=config.scale,
                    soft_cap=config.soft_cap,
                    window=window,
                    mesh=mesh,
                    interpret=backend_of(mesh) != "tpu",
                )
            return jax.nn.dot_product_attention(
                query,
                key,
                value,
                scale=config.scale,
                is_causal=True,
                local_window_size=None if window is None else (window - 1, 0),
                implementation="cudnn",
            )

    assert heads.new is not None
    key, value = heads.new
    missing = key.shape[-1] - value.shape[-1]
    if missing and implementation != "xla":  # which take values that are as wide as keys
        widened = jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, missing)))
        return see(None, heads.query, key, widened)[..., : value.shape[-1]]
    arrays = (heads.query, key, value, *(() if heads.sinks is None else (heads.sinks,)))
    if config.window is None or config.window.size >= heads.query.shape[1]:
        return see(None, *arrays)
    if isinstance(sliding, bool):
        return see(config.window.size if sliding else None, *arrays)
    return jax.lax.cond(sliding, partial(see, config.window.size), partial(see, None), *arrays)


def _attend_blocks(
    query: Float[Array, "batch time heads width"],
    key: Float[Array, "batch time groups width"],
    value: Float[Array, "batch time groups width"],
    window: int | None,
    segment_ids: Int[Array, "batch time"] | None,
    config: AttentionConfig,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch time heads width"]:
    """Attend block by block of queries, each to the keys from its first window to its end.

    Of long rows this skips nearly half of the products, and of sliding layers more.
    """
    time = query.shape[1]
    block = max(_SMALLEST_BLOCK, -(-time // _BLOCKS))
    outputs = []
    for start in range(0, time, block):
        end = min(start + block, time)
        first = 0 if window is None else max(0, start + 1 - window)
        back = (
            jnp.arange(start, end, dtype=jnp.int32)[:, None]
            - jnp.arange(first, end, dtype=jnp.int32)[None]
        )
        seen = (back >= 0 if window is None else (back >= 0) & (back < window))[None]
        if segment_ids is not None:
            seen = seen & (segment_ids[:, start:end, None] == segment_ids[:, None, first:end])
        keys, values = key[:, first:end], value[:, first:end]
        outputs.append(_attend_rows(query[:, start:end], keys, values, seen, config, sinks))
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=1)


def _attend_rows(
    query: Float[Array, "batch time heads width"],
    key: Float[Array, "batch slots groups width"],
    value: Float[Array, "batch slots groups width"],
    seen: Bool[Array, "#batch #time slots"],
    config: AttentionConfig,
    sinks: Float[Array, " heads"] | None,
) -> Float[Array, "batch time heads width"]:
    """Attend as `jax.nn.dot_product_attention` does, except that the weights are `rounded`."""
    batch, time, heads, width = query.shape
    wide = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    query = query.reshape(batch, time, key.shape[2], -1, width)
    # Otherwise gradients are products of float32 and 16-bit arrays, which run in float32.
    algorithm = {"bfloat16": "BF16_BF16_F32", "float16": "F16_F16_F32"}.get(query.dtype.name)
    if query.dtype == jnp.float16 and traced_backend() == "cpu":
        algorithm = None  # CPUs have no such product
    logits = jnp.einsum(
        "btghw,bsgw->bghts",
        query,
        key,
        precision=algorithm,
        preferred_element_type=wide,
    )
    if sinks is not None:
        sinks = sinks.reshape(1, key.shape[2], -1, 1, 1)
    weights = attention_weights(logits, seen[:, None, None], config, query.dtype, sinks)
    attended = multiply(partial(jnp.einsum, "bghts,bsgw->btghw"), weights, value)
    return attended.reshape(batch, time, heads, value.shape[-1])


def attention_weights(
    logits: Float[Array, "*batch slots"],
    seen: Bool[Array, "*#batch slots"],
    config: AttentionConfig,
    dtype: DTypeLike,
    sinks: Float[Array, "*#batch 1"] | None,
) -> Float[Array, "*batch slots"]:
    r"""Softmax over the slots that are seen; the same for whole rows and for decoding steps.

    With a sink $s$ of each head, the weights add up to less than 1:

    $$w_t = e^{z_t} / (e^s + \sum_t e^{z_t})$$
    """
    logits = jnp.where(seen, _scaled(logits, config), -jnp.inf)
    if sinks is None:
        return rounded(jax.nn.softmax(logits, axis=-1), dtype)
    sinks = sinks.astype(logits.dtype)
    most = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), sinks)
    most = jax.lax.stop_gradient(most)
    weights = jnp.exp(logits - most)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sinks - most)
    return rounded(weights / total, dtype)


def _scaled(
    logits: Float[Array, "*batch slots"], config: AttentionConfig
) -> Float[Array, "*batch slots"]:
    return soft_capped(logits * config.scale, config.soft_cap)


# Decoding: more tokens of rows in a cache.


def attend_more(
    config: AttentionConfig,
    heads: Heads,
    cached: KeyValues,
    length: Int[Array, " batch"],
    mask: Bool[Array, "batch time"],
    sliding: Bool[Array, ""] | bool,
) -> tuple[Float[Array, "batch time heads width"], KeyValues]:
    """Append tokens to the rows of a cache; each attends to everything in its row up to itself.

    A token for which its row has no room is not written, and gets NaN. Heads without keys attend to
    a cache that has them already.
    """
    max_length = cached.values.shape[2]
    places = length[:, None] + jnp.arange(mask.shape[1], dtype=jnp.int32)[None]
    slots = jnp.where(mask, places, max_length)  # beyond the end: not written

    def put(stack: Array, new: Array, slots: Array) -> Array:
        return stack.at[:, slots].set(new.swapaxes(0, 1).astype(stack.dtype), mode="drop")

    # Padding beyond the end would get NaN, which later linear layers would spread.
    places = jnp.where(mask, places, 0)
    keys, values = cached
    if heads.new is not None:
        # `put` writes along time, so keys are [groups, time, width] meanwhile.
        keys = jax.vmap(put)(keys.swapaxes(2, 3), heads.new[0], slots).swapaxes(2, 3)
        values = jax.vmap(put)(values, heads.new[1], slots)
    batch, time, _, width = heads.query.shape
    groups = values.shape[1]
    query = heads.query.reshape(batch, time, groups, -1, width).swapaxes(1, 2)
    each = query.shape[3]  # query heads of a group
    attended = _attend_cache(
        query.reshape(batch, groups, -1, width),
        keys,
        values,
        jnp.repeat(places, each, axis=1),
        first_seen(config, jnp.repeat(places, each, axis=1), sliding),
        config,
        None if heads.sinks is None else jnp.tile(heads.sinks.reshape(groups, -1), (1, time)),
    )
    attended = attended.reshape(batch, groups, time, each, -1).swapaxes(1, 2)
    attended = attended.reshape(*heads.query.shape[:-1], values.shape[3])
    return attended, KeyValues(keys, values)


def attend_step(
    config: DecoderConfig,
    kind: str,
    y: Float[Array, "batch width"],
    weights: Params,
    cached: Any,
    repeat: Int[Array, ""],
    length: Int[Array, " batch"],
    rotary: RotaryTable,
    mesh: Mesh | None,
    sliding: Bool[Array, ""] | bool,
    tables: tuple[PageTable, ...] = (),
) -> tuple[Float[Array, "batch width"], Any]:
    """Write each row's new keys and values into the cache, and attend to all slots up to them.

    A layer that reuses the keys and values of another one writes nothing.

    Args:
        config: the decoder.
        kind: of the layer.
        y: the layer's input.
        weights: of the layer.
        cached: keys and values of a stack of layers, `KeyValues` or `WindowedKeyValues`.
        repeat: the place in its stack of the layer whose keys and values they are.
        length: tokens that each row holds.
        rotary: of the tokens' positions.
        mesh: devices.
        sliding: whether the layer slides.
        tables: of the pages, a second one where sliding layers have their own; none for whole rows.

    Returns:
        The layer's output, and the cache with the tokens in it.
    """
    batch, attention = y.shape[0], config.attention_of(kind)
    heads = project_heads(y, weights["self_attn"], config, kind, rotary, batch, to_cache=True)
    first = first_seen(attention, length, sliding)
    groups = 1 if attention.latent is not None else attention.key_value_heads
    query = heads.query.reshape(batch, groups, -1, heads.query.shape[-1])
    sinks = None if heads.sinks is None else heads.sinks.reshape(groups, -1)
    if tables:
        backend = backend_of(mesh)
        in_kernel = _page_kernel_fits(heads.query.dtype, cached, mesh)
        attend = partial(_attend_pages, config=attention, backend=backend, in_kernel=in_kernel)
        if mesh is not None:
            tensor = mesh.shape["tensor"]
            split = None if groups % tensor else "tensor"
            # All heads of latent attention are one group.
            by_query = "tensor" if split is None and query.shape[2] % tensor == 0 else None
            rows, row_heads = PartitionSpec(ROWS), PartitionSpec(ROWS, split)
            queries = PartitionSpec(ROWS, split, by_query)
            stacks = PartitionSpec(None, ROWS, split)
            attend = jax.shard_map(
                attend,
                mesh=mesh,
                in_specs=(
                    *(queries, row_heads, stacks),
                    *(PartitionSpec(),) * 2,
                    *(rows,) * 3,
                    PartitionSpec(split, by_query),
                ),
                out_specs=(queries, stacks),
                check_vma=False,
            )
        attended, cached = attend(
            query,
            None if heads.new is None else (heads.new[0][:, 0], heads.new[1][:, 0]),
            cached,
            repeat,
            jnp.asarray(sliding),
            tables,
            length,
            first,
            sinks,
        )
        attended = attended.reshape(batch, 1, -1, attended.shape[-1])
        return project_out(attended, heads, weights["self_attn"], attention), cached
    keys, values = cached
    if heads.new is not None:
        keys = write_token(keys, heads.new[0][:, 0], repeat, length, axis=4, mesh=mesh)
        values = write_token(values, heads.new[1][:, 0], repeat, length, axis=3, mesh=mesh)
        # Both before either is read: a kernel in between moves logits to a TPU's main memory.
        keys, values = jax.lax.optimization_barrier((keys, values))
    layer = jax.tree.map(
        lambda stack: jax.lax.dynamic_index_in_dim(stack, repeat, keepdims=False),
        KeyValues(keys, values),
    )
    attended = _attend_cache(
        query,
        layer.keys,
        layer.values,
        length[:, None],
        None if first is None else first[:, None],
        attention,
        sinks,
    )
    attended = attended.reshape(batch, 1, -1, attended.shape[-1])
    return project_out(attended, heads, weights["self_attn"], attention), KeyValues(keys, values)


def _attend_pages(
    query: Float[Array, "batch groups queries width"],
    new: tuple[Float[Array, "batch groups width"], Float[Array, "batch groups width"]] | None,
    cached: KeyValues | WindowedKeyValues,
    repeat: Int[Array, ""],
    sliding: Bool[Array, ""],
    tables: tuple[PageTable, ...],
    length: Int[Array, " batch"],
    first: Int[Array, " batch"] | None,
    sinks: Float[Array, "groups queries"] | None = None,
    *,
    config: AttentionConfig,
    backend: str,
    in_kernel: bool,
) -> tuple[Float[Array, "batch groups queries width"], KeyValues | WindowedKeyValues]:
    """Write and attend as `attend_step`, for one device's rows in pages.

    Where a stack of full and one of sliding layers lie side by side, which one the layer is in is
    traced. A branch that writes into a stack would copy it, so both stacks are written to, one of
    them out of range, and the branches only read.
    """
    stacks = (cached,) if isinstance(cached, KeyValues) else cached
    mixed = sum(stack is not None for stack in stacks) == 2

    def write(
        stack: KeyValues, table: PageTable, is_kind: Array, keys: Array, values: Array
    ) -> KeyValues:
        repeat_here, slot = repeat, table.places.slot
        if mixed:
            repeat_here = jnp.minimum(repeat, len(stack.keys) - 1)
            slot = jnp.where(is_kind, slot, stack.values.shape[3])
        places = Places(table.before + table.places.page, slot)
        put = partial(write_in_pages, repeat=repeat_here, places=places, backend=backend)
        return KeyValues(put(stack.keys, keys, axis=4), put(stack.values, values, axis=3))

    written: list[Any] = list(stacks)
    if new is not None:
        keys, values = finite_values(new[0][..., None], new[1][:, :, None])
        keys, values = keys[..., 0], values[:, :, 0]
        # Write keys and values before either is read, as in `attend_step`.
        written = jax.lax.optimization_barrier(
            [
                stack if stack is None else write(stack, table, is_kind, keys, values)
                for stack, table, is_kind in zip(stacks, tables, (~sliding, sliding), strict=False)
            ]
        )
    read = partial(_attend_to_pages, backend=backend)
    if in_kernel:
        read = partial(_attend_to_pages_in_kernel, interpret=backend != "gpu")
    branches = [
        partial(read, query, stack, repeat, table, length, first, sinks, config)
        for stack, table in zip(written, tables, strict=True)
        if stack is not None
    ]
    attended = jax.lax.cond(sliding, *reversed(branches)) if mixed else branches[0]()
    return attended, written[0] if isinstance(cached, KeyValues) else WindowedKeyValues(*written)


def _page_kernel_fits(
    dtype: DTypeLike, cached: KeyValues | WindowedKeyValues, mesh: Mesh | None
) -> bool:
    """Whether the kernels for NVIDIA GPUs take such pages: their extents are powers of two."""
    size, width = jax.tree.leaves(cached)[-1].shape[3:]
    fits = jnp.dtype(dtype).itemsize <= 4 and {size, width} <= {16, 32, 64, 128, 256}
    return backend_of(mesh) == "gpu" and fits and _capability(mesh) >= 8


def _attend_to_pages_in_kernel(
    query: Float[Array, "batch groups queries width"],
    cached: KeyValues,
    repeat: Int[Array, ""],
    table: PageTable,
    length: Int[Array, " batch"],
    first: Int[Array, " batch"] | None,
    sinks: Float[Array, "groups queries"] | None,
    config: AttentionConfig,
    *,
    interpret: bool,
) -> Float[Array, "batch groups queries width"]:
    """Attend as `_attend_to_pages`, by the kernels for GPUs."""
    from twinkle_jax.model.decoder.gpu_kernels import attend_to_pages  # slow to import

    owner, start = table.pages
    attended = attend_to_pages(
        query,
        *cached,
        repeat,
        owner,
        start,
        jnp.zeros_like(length) if first is None else first,
        length,
        prompts=table.prompts,
        sinks=sinks,
        scale=config.scale,
        soft_cap=config.soft_cap,
        interpret=interpret,
    )
    lost = _is_lost(table)[:, None, None, None]
    return rounded(jnp.where(lost, jnp.nan, attended), query.dtype)


def _attend_to_pages(
    query: Float[Array, "batch groups queries width"],
    cached: KeyValues,
    repeat: Int[Array, ""],
    table: PageTable,
    length: Int[Array, " batch"],
    first: Int[Array, " batch"] | None,
    sinks: Float[Array, "groups queries"] | None,
    config: AttentionConfig,
    *,
    backend: str,
) -> Float[Array, "batch groups queries width"]:
    r"""Attend to pages, which are in any order, up to the token that each row has just got.

    Each page gets copies of the queries of the rows that read it, so that keys and values are read
    once, in place. Over the pages $p$ of a row, with logits $z$:

    $$m = \max_p \max_t z_{pt},\quad w_{pt} = e^{z_{pt} - m} / \sum_{p,t} e^{z_{pt} - m},\quad
    o = \sum_p \sum_t w_{pt} v_{pt}$$

    A sink is one more logit in the maximum and the sum.
    """
    rows, wide = len(length), jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    first = jnp.zeros_like(length) if first is None else first
    parts = [_PagesOfRows(table.pages.owner[:, None], table.pages.start)]
    if table.prompts is not None:
        parts.insert(0, _PagesOfRows(table.prompts.members, table.prompts.start))

    def layer(stack: Array) -> list[Array]:
        """Take the parts of a layer one by one: else a TPU copies the whole of it first."""
        begins = [0, table.before][-len(parts) :]
        return [
            jax.lax.dynamic_slice(
                stack,
                (repeat, *map(jnp.int32, (begin, 0, 0, 0))),
                (1, len(part.start), *stack.shape[2:]),
            )[0]
            for part, begin in zip(parts, begins, strict=True)
        ]

    logits, moments = [], []
    for part, keys in zip(parts, layer(cached.keys), strict=True):
        logits.append(part.logits(query, keys, first, length, config))
        moments.append(_page_moments(logits[-1], backend))
    # Products would spread NaN to all rows. It is in the sum: a CPU's maximum may pass over it.
    broken = [~(summed < jnp.inf) for _, summed in moments]
    most = jnp.full(query.shape[:3], -jnp.inf, wide)
    if sinks is not None:
        most = jnp.broadcast_to(sinks.astype(wide), most.shape)
    for part, (largest, _), is_broken in zip(parts, moments, broken, strict=True):
        most = jnp.maximum(most, part.largest(jnp.where(is_broken, -jnp.inf, largest), rows))
    most = jnp.where(most > -jnp.inf, most, 0)
    total = jnp.zeros_like(most) if sinks is None else jnp.exp(sinks.astype(wide)[None] - most)
    for part, (largest, summed), is_broken in zip(parts, moments, broken, strict=True):
        summed = summed * jnp.exp(largest - part.of_rows(most, 0))
        total += part.total(jnp.where(is_broken, 0, summed), rows)
    total = jnp.where(total > 0, total, 1)
    attended = jnp.zeros((*query.shape[:-1], cached.values.shape[-1]), wide)
    for part, z, is_broken, values in zip(parts, logits, broken, layer(cached.values), strict=True):
        weights = jnp.exp(z - part.of_rows(most, 0)[..., None])
        weights = weights / part.of_rows(total, 1)[..., None]
        products = jnp.einsum(
            "pgmht,pgtw->pgmhw",
            # Before the product: a GPU would copy its result, which is wider.
            rounded(jnp.where(is_broken[..., None], 0, weights), query.dtype),
            values.astype(query.dtype),
            preferred_element_type=wide,
        )
        attended += part.total(products, rows)
    lost = _is_lost(table)[:, None, None]
    for part, is_broken in zip(parts, broken, strict=True):
        lost |= part.largest(is_broken.astype(jnp.int32), rows) > 0
    return jnp.where(lost[..., None], jnp.nan, rounded(attended, query.dtype))


def _is_lost(table: PageTable) -> Bool[Array, " batch"]:
    """Say which rows have found no page for their token or their prompt."""
    lost = table.places.page == len(table.pages.owner)
    return lost if table.prompts is None else lost | table.prompts.is_lost


class _PagesOfRows(NamedTuple):
    """Pages, and the rows that read each: its owner, or the members of a group.

    What they compute is [pages, groups, members, queries, ...], so that products with the keys and
    values of a page are one product.
    """

    members: Int[Array, "pages members"]
    start: Int[Array, " pages"]

    def of_rows(self, x: Array, free: Any) -> Array:
        """Give each member its row's entry of an array [rows, ...]."""
        each = x.at[self.members].get(mode="fill", fill_value=free)
        return each.swapaxes(1, 2) if x.ndim > 1 else each

    def logits(
        self, query: Array, keys: Array, first: Array, length: Array, config: AttentionConfig
    ) -> Float[Array, "pages groups members queries size"]:
        """Multiply the queries of the rows with a page's keys; -inf for what they do not see."""
        logits = jnp.einsum(
            "pgmhw,pgwt->pgmht",
            self.of_rows(query, 0),
            keys.astype(query.dtype),
            preferred_element_type=jnp.float64 if query.dtype == jnp.float64 else jnp.float32,
        )
        size = keys.shape[-1]
        position = self.start[:, None, None] + jnp.arange(size, dtype=jnp.int32)[None, None]
        seen = position <= self.of_rows(length, -1)[..., None]
        seen &= position >= self.of_rows(first, 0)[..., None]
        return jnp.where(seen[:, None, :, None], _scaled(logits, config), -jnp.inf)

    def largest(self, x: Array, rows: int) -> Array:
        """Return the maximum over the pages of each row."""
        return jax.ops.segment_max(self._by_member(x), self.members.reshape(-1), rows)

    def total(self, x: Array, rows: int) -> Array:
        """Sum over the pages of each row, by a product with a matrix of zeros and ones.

        The order of a scatter-add is not fixed on a GPU.
        """
        row = jnp.arange(rows, dtype=jnp.int32)
        belongs = (self.members.reshape(-1)[None] == row[:, None]).astype(x.dtype)
        return jnp.einsum("rp,pgh...->rgh...", belongs, self._by_member(x), precision="highest")

    def _by_member(self, x: Float[Array, "pages groups members *rest"]) -> Array:
        return x.swapaxes(1, 2).reshape(-1, x.shape[1], *x.shape[3:])


def _page_moments(
    logits: Float[Array, "*batch slots"], backend: str
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    r"""Return the largest logit $m$ of each page, and the sum of $e^{z - m}$.

    On a GPU one reduction of pairs, since each reduction reads the logits from memory again. A TPU
    keeps them on the chip.
    """

    def finite(largest: Array) -> Array:
        return jnp.where(largest > -jnp.inf, largest, 0)

    def merge(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        largest = jnp.maximum(left[0], right[0])
        left_sum, right_sum = (s * jnp.exp(m - finite(largest)) for m, s in (left, right))
        return largest, left_sum + right_sum

    if backend == "gpu":
        zero = jnp.zeros((), logits.dtype)
        start = zero - jnp.inf, zero
        pairs = logits, jnp.ones_like(logits)
        largest, summed = jax.lax.reduce(pairs, start, merge, (logits.ndim - 1,))
        return largest, summed
    largest = jnp.max(logits, axis=-1)
    return largest, jnp.sum(jnp.exp(logits - finite(largest)[..., None]), axis=-1)


def first_seen(
    config: AttentionConfig, places: Int[Array, "*batch"], sliding: Bool[Array, ""] | bool
) -> Int[Array, "*batch"] | None:
    """Return the first slot that the token in each place attends to; None: all slots."""
    window = config.window
    return None if window is None else jnp.where(sliding, places - window.size + 1, 0)


def _attend_cache(
    query: Float[Array, "batch groups queries width"],
    keys: Float[Array, "batch groups width max_length"],
    values: Float[Array, "batch groups max_length width"],
    places: Int[Array, "batch places"],
    first: Int[Array, "batch places"] | None,
    config: AttentionConfig,
    sinks: Float[Array, "groups queries"] | None,
) -> Float[Array, "batch groups queries width"]:
    """Attend to slots from `first` to `places`; a query whose place is beyond the end gets NaN."""
    max_length = values.shape[2]
    wide = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    logits = jnp.einsum(
        "bghw,bgwt->bght", query, keys.astype(query.dtype), preferred_element_type=wide
    )
    slots = jnp.arange(max_length, dtype=jnp.int32)[None, None]
    seen = slots <= places[:, :, None]
    if first is not None:
        seen &= slots >= first[:, :, None]
    logits = jnp.where((places < max_length)[:, None, :, None], logits, jnp.nan)
    sinks = None if sinks is None else sinks[None, :, :, None]
    weights = attention_weights(logits, seen[:, None], config, query.dtype, sinks)
    return multiply(partial(jnp.einsum, "bght,bgtw->bghw"), weights, values.astype(query.dtype))
