"""The cache of decoding: keys and values, states of linear layers, lengths; pages."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.model.decoder.sharding import backend_of


class KeyValues(NamedTuple):
    """Keys and values of the full layers of one block member.

    Lines are rows, and slot p holds position p; or lines are pages, see
    [`Pages`][twinkle_jax.model.Pages]. Time is the last axis of keys and the last but one of
    values, so that both products of attention read them without a transpose.
    """

    keys: Float[Array, "layers lines groups width slots"]
    values: Float[Array, "layers lines groups slots width"]


class DeltaState(NamedTuple):
    """The state of a linear layer.

    Attributes:
        window: the last inputs of the convolution, one fewer than its kernel; 0 before the start.
        memory: the state of the delta rule, always float32.
    """

    window: Float[Array, "*layers batch past channels"]
    memory: Float[Array, "*layers batch heads key value"]


Layers = dict[str, KeyValues | DeltaState]


class Pages(NamedTuple):
    """Which tokens the pages of a cache hold: each page holds consecutive tokens of one row.

    A row takes a free page when its last one is full. So memory and reads grow with the tokens that
    rows hold, not with the longest row. On a mesh each device has its own pages.

    Attributes:
        owner: the row of its device that a page belongs to; the number of rows for a free page.
        start: position of the first token in it.
    """

    owner: Int[Array, " pages"]
    start: Int[Array, " pages"]


class Cache(NamedTuple):
    """Everything that decoding the next token depends on, besides the parameters.

    Attributes:
        layers: by member of the repeated block, [`KeyValues`][twinkle_jax.model.KeyValues] or
            [`DeltaState`][twinkle_jax.model.DeltaState]; rows are on axis 1. A tuple holds the
            repeats one by one; see [`unstack_layers`][twinkle_jax.model.unstack_layers].
        length: tokens that each row holds.
        pages: the row and the first token of each page. None: rows are not cut into pages, and all
            have room for the same number of tokens.
    """

    layers: Layers | tuple[Layers, ...]
    length: Int[Array, " batch"]
    pages: Pages | None = None


CacheOrParams = TypeVar("CacheOrParams", Cache, Mapping[str, Any])


def make_cache(layers: dict[str, Any], length: Int[Array, " batch"], *, max_length: int) -> Cache:
    """Make a cache of whole rows from keys and values [layers, batch, time, groups, width]."""
    laid_out: Layers = {}
    for member, state in layers.items():
        if isinstance(state, DeltaState):
            laid_out[member] = state
            continue
        keys, values = state
        laid_out[member] = KeyValues(keys.transpose(0, 1, 3, 4, 2), values.swapaxes(2, 3))
    return with_room(Cache(laid_out, length), max_length)


def with_room(cache: Cache, max_length: int) -> Cache:
    """Resize the rows of a cache to `max_length` tokens."""

    def grow(stack: Array, axis: int) -> Array:
        if max_length <= stack.shape[axis]:
            return jax.lax.slice_in_dim(stack, 0, max_length, axis=axis)
        padding = [(0, 0)] * stack.ndim
        padding[axis] = (0, max_length - stack.shape[axis])
        return jnp.pad(stack, padding)

    def state(state: KeyValues | DeltaState) -> KeyValues | DeltaState:
        if isinstance(state, KeyValues):
            return KeyValues(grow(state.keys, 4), grow(state.values, 3))
        return state

    return cache._replace(layers=map_states(state, cache.layers))


def map_states(
    function: Callable[[KeyValues | DeltaState], KeyValues | DeltaState],
    layers: Layers | tuple[Layers, ...],
) -> Layers | tuple[Layers, ...]:
    """Apply a function to the state of each member, for stacked and unstacked layers."""
    if isinstance(layers, tuple):
        return tuple({name: function(state) for name, state in x.items()} for x in layers)
    return {name: function(state) for name, state in layers.items()}


def unstack_layers(stacked: CacheOrParams) -> CacheOrParams:
    """Split stacked layers into one array per layer, for many decoding steps on a GPU.

    XLA's GPU compiler copies a layer out of the stack before each product; separate arrays are read
    in place. The price is a program whose length grows with the number of layers.
    [`JaxSampler`][twinkle_jax.sampler.JaxSampler] does this on GPUs only.

    Args:
        stacked: a cache, or parameters.

    Returns:
        The same with a tuple of layers, which `decode_step` takes. Such parameters need such a
        cache.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from twinkle_jax.model import init_params, parse_config, prefill, unstack_layers
        >>> config = parse_config({
        ...     "model_type": "qwen2", "vocab_size": 64, "hidden_size": 32,
        ...     "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        ... })
        >>> params = init_params(jax.random.key(0), config)
        >>> _, cache = prefill(params, config, jnp.array([[1, 2, 3]]), max_length=8)
        >>> [layer["0"].keys.shape for layer in unstack_layers(cache).layers]
        [(1, 1, 4, 8, 8), (1, 1, 4, 8, 8)]
    """
    stack = stacked.layers if isinstance(stacked, Cache) else stacked["layers"]
    if isinstance(stack, tuple):
        return stacked

    def repeat(i: int) -> Any:
        return jax.tree.map(lambda x: x[i : i + 1], stack)

    layers = tuple(map(repeat, range(len(jax.tree.leaves(stack)[0]))))
    if isinstance(stacked, Cache):
        return stacked._replace(layers=layers)
    return {**stacked, "layers": layers}


def stack_layers(cache: Cache) -> Cache:
    """Undo `unstack_layers`."""
    if not isinstance(cache.layers, tuple):
        return cache
    layers = jax.tree.map(lambda *repeats: jnp.concatenate(repeats), *cache.layers)
    return cache._replace(layers=layers)


def take_rows(cache: Cache, rows: Int[Array, " rows"]) -> Cache:
    """Select rows of a cache, in order; a row may be selected several times.

    A group of completions then reads its prompt only once.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from twinkle_jax.model import init_params, parse_config, prefill, take_rows
        >>> config = parse_config({
        ...     "model_type": "qwen2", "vocab_size": 64, "hidden_size": 32,
        ...     "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        ... })
        >>> params = init_params(jax.random.key(0), config)
        >>> prompts = jnp.array([[1, 2, 3], [0, 0, 4]])
        >>> _, cache = prefill(params, config, prompts, prompts > 0, max_length=8)
        >>> take_rows(cache, jnp.array([0, 0, 1, 1])).length
        Array([3, 3, 1, 1], dtype=int32)
    """
    layers = jax.tree.map(lambda x: jnp.take(x, rows, axis=1), cache.layers)
    return Cache(layers, jnp.take(cache.length, rows, axis=0))


def write_token(
    stack: Float[Array, "layers lines groups a b"],
    new: Float[Array, "batch groups width"],
    repeat: Int[Array, ""],
    slot: Int[Array, " batch"],
    *,
    axis: int,
    mesh: Mesh | None,
) -> Float[Array, "layers lines groups a b"]:
    """Write one entry per row into its slot along an axis; out-of-range slots are dropped.

    Rows are a batching dimension of the scatter, so that on a mesh no row leaves its device.
    """
    if backend_of(mesh) == "tpu":
        from twinkle_jax.model.decoder.tpu_kernels import write_in_place  # slow to import

        return write_in_place(stack, new, repeat, slot, axis=axis, mesh=mesh, interpret=False)
    return jax.lax.scatter(
        stack,
        jnp.stack([jnp.broadcast_to(repeat, slot.shape), slot], axis=1),
        new.astype(stack.dtype),
        jax.lax.ScatterDimensionNumbers(
            update_window_dims=(1, 2),
            inserted_window_dims=(0, axis),
            scatter_dims_to_operand_dims=(0, axis),
            operand_batching_dims=(1,),
            scatter_indices_batching_dims=(0,),
        ),
        unique_indices=True,
        mode="drop",
    )


# Pages. These functions run on one device, with its own rows and pages.


def page_size(cache: Cache) -> int:
    """Count the tokens of a page."""
    layers = cache.layers[0] if isinstance(cache.layers, tuple) else cache.layers
    return next(x.keys.shape[-1] for x in layers.values() if isinstance(x, KeyValues))


def empty_pages(cache: Cache, size: int, pages: int) -> Cache:
    """Make a cache of free pages, for as many rows as a cache of whole rows has."""

    def empty(state: KeyValues | DeltaState) -> KeyValues | DeltaState:
        if not isinstance(state, KeyValues):
            return jax.tree.map(jnp.zeros_like, state)
        layers, _, groups, width, _ = state.keys.shape
        line = (layers, pages, groups)
        return KeyValues(
            jnp.zeros((*line, width, size), state.keys.dtype),
            jnp.zeros((*line, size, width), state.values.dtype),
        )

    free = jnp.full(pages, len(cache.length), jnp.int32)
    layers = map_states(empty, cache.layers)
    return Cache(layers, jnp.zeros_like(cache.length), Pages(free, jnp.zeros_like(free)))


def put_rows(cache: Cache, new: Cache, slots: Int[Array, " new"]) -> Cache:
    """Write whole rows into a cache, over the rows in `slots` or into free pages.

    Args:
        cache: if it has pages, the rows in `slots` own none.
        new: the rows to write.
        slots: the row that each becomes; out of range: it is not written.
    """
    rows = len(cache.length)
    length = cache.length.at[slots].set(new.length, mode="drop")

    def write(line: Array, held: Array, new: Array) -> Array:
        return held.at[:, line].set(new.astype(held.dtype), mode="drop")

    if cache.pages is None:
        layers = jax.tree.map(lambda x, y: write(slots, x, y), cache.layers, new.layers)
        return Cache(layers, length)
    size, (owner, start) = page_size(cache), cache.pages
    count = -(-page_size(new) // size)  # the most pages that a row needs
    begin = jnp.arange(count, dtype=jnp.int32) * size
    wanted = (begin[None] < new.length[:, None]) & (slots < rows)[:, None]
    line = _take_free(owner, rows, wanted.reshape(-1))
    pages = Pages(
        owner.at[line].set(jnp.repeat(slots, count), mode="drop"),
        start.at[line].set(jnp.tile(begin, len(slots)), mode="drop"),
    )

    def cut(stack: Array, axis: int) -> Array:
        """Cut time into pages, [layers, rows, ...] to [layers, rows * count, ...]."""
        extents = stack.shape
        stack = stack.reshape(*extents[:axis], count, size, *extents[axis + 1 :])
        stack = jnp.moveaxis(stack, axis, 2)
        return stack.reshape(extents[0], -1, *stack.shape[3:])

    def put(held: KeyValues | DeltaState, new: KeyValues | DeltaState) -> KeyValues | DeltaState:
        if isinstance(held, KeyValues) and isinstance(new, KeyValues):
            keys, values = finite_values(new.keys, new.values)
            return KeyValues(
                write(line, held.keys, cut(keys, 4)), write(line, held.values, cut(values, 3))
            )
        return jax.tree.map(lambda x, y: write(slots, x, y), held, new)

    new = with_room(new, count * size)
    layers = jax.tree.map(
        put, cache.layers, new.layers, is_leaf=lambda x: isinstance(x, (KeyValues, DeltaState))
    )
    return Cache(layers, length, pages)


def finite_values(
    keys: Float[Array, "*lines width slots"], values: Float[Array, "*lines slots width"]
) -> tuple[Float[Array, "*lines width slots"], Float[Array, "*lines slots width"]]:
    """Replace values that are not finite by 0 and their keys by NaN: their row is still NaN.

    A page is not cleared when another row takes it. Attention then multiplies the leftover values
    by weights of 0, and 0 times NaN is NaN. Leftover keys do no harm: their logits are replaced.
    """
    finite = jnp.isfinite(values)
    kept = jnp.all(finite, axis=-1)[..., None, :]
    return jnp.where(kept, keys, jnp.nan), jnp.where(finite, values, 0)


def keep_rows(cache: Cache, rows: Int[Array, " rows"], pages: int) -> Cache:
    """Keep the chosen rows, each once, and their pages, in a cache of `pages` pages."""
    assert cache.pages is not None
    owner, start = cache.pages
    index = jnp.arange(len(rows), dtype=jnp.int32)
    slot = jnp.full(len(cache.length), len(rows), jnp.int32).at[rows].set(index)
    owner = slot.at[owner].get(mode="fill", fill_value=len(rows))
    order = jnp.argsort((owner == len(rows)).astype(jnp.int32), stable=True)[:pages]
    more = max(0, pages - len(owner))

    def lines(stack: Array) -> Array:
        if not more:
            return jnp.take(stack, order, axis=1)
        return jnp.pad(stack, [(0, more) if axis == 1 else (0, 0) for axis in range(stack.ndim)])

    def keep(state: KeyValues | DeltaState) -> KeyValues | DeltaState:
        if isinstance(state, KeyValues):
            return jax.tree.map(lines, state)
        return jax.tree.map(lambda x: jnp.take(x, rows, axis=1), state)

    if more:
        held = Pages(
            jnp.pad(owner, (0, more), constant_values=len(rows)), jnp.pad(start, (0, more))
        )
    else:
        held = Pages(owner[order], start[order])
    return Cache(map_states(keep, cache.layers), cache.length[rows], held)


def release(pages: Pages, active: Bool[Array, " batch"]) -> Pages:
    """Free the pages of rows that are not active."""
    is_used = active.at[pages.owner].get(mode="fill", fill_value=False)
    return pages._replace(owner=jnp.where(is_used, pages.owner, len(active)))


class Places(NamedTuple):
    """Where the next token of each row is written: a page, and a slot in it.

    The slot of an inactive row is out of range, and so is the page of a row that got none.
    """

    page: Int[Array, " batch"]
    slot: Int[Array, " batch"]


def next_places(
    pages: Pages, length: Int[Array, " batch"], active: Bool[Array, " batch"], size: int
) -> tuple[Pages, Places]:
    """Give a free page to each active row whose last page is full; find each row's next place.

    Nothing is written for an inactive row; its place names a free page, if there is one.
    """
    (owner, start), rows = pages, len(length)
    wanted = active & (length % size == 0)
    line = _take_free(owner, rows, wanted)
    owner = owner.at[line].set(jnp.arange(rows, dtype=jnp.int32), mode="drop")
    start = start.at[line].set(length, mode="drop")
    begin = length // size * size
    last = start == begin.at[owner].get(mode="fill", fill_value=-1)
    page = jnp.full(rows, len(owner), jnp.int32)
    page = page.at[jnp.where(last, owner, rows)].set(
        jnp.arange(len(owner), dtype=jnp.int32), mode="drop"
    )
    spare = jnp.argmax(owner == rows).astype(jnp.int32)
    slot = jnp.where(active & (page < len(owner)), length % size, size)
    return Pages(owner, start), Places(jnp.where(active, page, spare), slot)


def _take_free(
    owner: Int[Array, " pages"], rows: int, wanted: Bool[Array, " wanted"]
) -> Int[Array, " wanted"]:
    """Assign a free page to each entry of `wanted`; out of range if there is none."""
    free = jnp.nonzero(owner == rows, size=len(wanted), fill_value=len(owner))[0]
    rank = jnp.maximum(jnp.cumsum(wanted, dtype=jnp.int32) - 1, 0)
    return jnp.where(wanted, free[rank], len(owner)).astype(jnp.int32)


def write_in_pages(
    stack: Float[Array, "layers pages groups a b"],
    new: Float[Array, "batch groups width"],
    repeat: Int[Array, ""],
    places: Places,
    *,
    axis: int,
    backend: str,
) -> Float[Array, "layers pages groups a b"]:
    """Write one entry per row into its slot of its page; out-of-range places are dropped."""
    if backend == "tpu":
        from twinkle_jax.model.decoder.tpu_kernels import write_in_place  # slow to import

        page = jnp.minimum(places.page, stack.shape[1] - 1)
        return write_in_place(
            stack, new, repeat, places.slot, page, axis=axis, mesh=None, interpret=False
        )
    index = (jnp.broadcast_to(repeat, places.slot.shape), places.page, places.slot)
    return jax.lax.scatter(
        stack,
        jnp.stack(index, axis=1),
        new.astype(stack.dtype),
        jax.lax.ScatterDimensionNumbers(
            update_window_dims=(1, 2),
            inserted_window_dims=(0, 1, axis),
            scatter_dims_to_operand_dims=(0, 1, axis),
        ),
        unique_indices=True,
        mode="drop",
    )
