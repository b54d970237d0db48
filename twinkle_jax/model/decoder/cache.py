"""The cache of decoding: keys and values, states of linear layers, lengths; whole rows."""

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


class WindowedKeyValues(NamedTuple):
    """Keys and values in pages where some layers slide, which keep their window only.

    Attributes:
        full: of the layers that attend to everything, in order; None if there are none.
        sliding: of the sliding layers, in pages of their own, `Cache.window_pages`; likewise.
    """

    full: KeyValues | None
    sliding: KeyValues | None


class DeltaState(NamedTuple):
    """The state of a linear layer.

    Attributes:
        window: the last inputs of the convolution, one fewer than its kernel; 0 before the start.
        memory: the state of the delta rule, always float32.
    """

    window: Float[Array, "*layers batch past channels"]
    memory: Float[Array, "*layers batch heads key value"]


LayerState = KeyValues | WindowedKeyValues | DeltaState
Layers = dict[str, LayerState]


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


class PromptPages(NamedTuple):
    """Which tokens the full pages of prompts hold: the rows of a group read the same ones.

    They lie in front of the pages that belong to single rows, in the same arrays.

    Attributes:
        prompt: the number of the prompt that a page belongs to; -1 for a free page.
        start: position of the first token in it.
        members: the rows that read it; the number of rows where there are fewer.
        of_row: the number of each row's prompt; -1 for a row that has ended, -2 for one whose
            prompt found too few free pages, which gets NaN.
    """

    prompt: Int[Array, " pages"]
    start: Int[Array, " pages"]
    members: Int[Array, "pages samples"]
    of_row: Int[Array, " batch"]

    @property
    def is_lost(self) -> Bool[Array, " batch"]:
        """Rows without the pages of their prompt."""
        return self.of_row == -2


class Cache(NamedTuple):
    """Everything that decoding the next token depends on, besides the parameters.

    Attributes:
        layers: by member of the repeated block, [`KeyValues`][twinkle_jax.model.KeyValues] or
            [`DeltaState`][twinkle_jax.model.DeltaState]; rows are on axis 1. A tuple holds the
            repeats one by one; see [`unstack_layers`][twinkle_jax.model.unstack_layers].
        length: tokens that each row holds.
        pages: the row and the first token of each page. None: rows are not cut into pages, and all
            have room for the same number of tokens.
        window_pages: likewise of the sliding layers, which free a page when no later token attends
            to it. None: all layers have the same pages.
        prompt_pages: the pages of prompts that groups of rows share, except in sliding layers with
            pages of their own. None: each row has all its tokens in pages of its own.
        routing: the experts of each token, by its position; rows are whole, in pages too. None:
            they are not kept.
    """

    layers: Layers | tuple[Layers, ...]
    length: Int[Array, " batch"]
    pages: Pages | None = None
    window_pages: Pages | None = None
    prompt_pages: PromptPages | None = None
    routing: Int[Array, "batch slots layers chosen"] | None = None


CacheOrParams = TypeVar("CacheOrParams", Cache, Mapping[str, Any])


def make_cache(
    layers: dict[str, Any],
    length: Int[Array, " batch"],
    routing: Int[Array, "batch time layers chosen"] | None,
    *,
    max_length: int,
) -> Cache:
    """Make a cache of whole rows from keys and values [layers, batch, time, groups, width]."""
    laid_out: Layers = {}
    for member, state in layers.items():
        if isinstance(state, DeltaState):
            laid_out[member] = state
            continue
        keys, values = state
        laid_out[member] = KeyValues(keys.transpose(0, 1, 3, 4, 2), values.swapaxes(2, 3))
    return with_room(Cache(laid_out, length, routing=routing), max_length)


def with_room(cache: Cache, max_length: int) -> Cache:
    """Resize the rows of a cache to `max_length` tokens."""

    def grow(stack: Array, axis: int) -> Array:
        if max_length <= stack.shape[axis]:
            return jax.lax.slice_in_dim(stack, 0, max_length, axis=axis)
        padding = [(0, 0)] * stack.ndim
        padding[axis] = (0, max_length - stack.shape[axis])
        return jnp.pad(stack, padding)

    def state(state: LayerState) -> LayerState:
        if isinstance(state, KeyValues):
            return KeyValues(grow(state.keys, 4), grow(state.values, 3))
        return state

    routing = None if cache.routing is None else grow(cache.routing, 1)
    return cache._replace(layers=map_states(state, cache.layers), routing=routing)


def map_states(
    function: Callable[..., LayerState],
    layers: Layers | tuple[Layers, ...],
    *others: Any,
) -> Any:
    """Apply a function to the state of each member, for stacked and unstacked layers.

    `others` are trees of the same members, whose parts the function gets behind the state.
    """
    states = (KeyValues, WindowedKeyValues, DeltaState)
    return jax.tree.map(function, layers, *others, is_leaf=lambda x: isinstance(x, states))


def unstack_layers(stacked: CacheOrParams) -> CacheOrParams:
    """Split stacked layers into one array per layer, for many decoding steps on a CPU or GPU.

    There XLA copies a layer out of the stack before each product; separate arrays are read in
    place. The price is a program whose length grows with the number of layers, and a second copy of
    the parameters. [`generate`][twinkle_jax.sampler.generate] does this except on TPUs.

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

    sizes = {member: len(jax.tree.leaves(part)[0]) for member, part in stack.items()}

    def repeat(i: int) -> Any:
        some = {member: part for member, part in stack.items() if i < sizes[member]}
        return jax.tree.map(lambda x: x[i : i + 1], some)

    layers = tuple(map(repeat, range(max(sizes.values()))))
    if isinstance(stacked, Cache):
        return stacked._replace(layers=layers)
    return {**stacked, "layers": layers}


def stack_layers(cache: Cache) -> Cache:
    """Undo `unstack_layers`."""
    if not isinstance(cache.layers, tuple):
        return cache

    parts: dict[str, list[LayerState]] = {}
    for layers in cache.layers:
        for member, state in layers.items():
            parts.setdefault(member, []).append(state)
    stacked = {
        member: jax.tree.map(lambda *repeats: jnp.concatenate(repeats), *states)
        for member, states in parts.items()
    }
    return cache._replace(layers=stacked)


def take_rows(cache: Cache, rows: Int[Array, " rows"]) -> Cache:
    """Select rows of a cache, in order; a row may be selected several times.

    A group of completions then reads its prompt only once.

    Raises:
        ValueError: if the rows of the cache lie in pages.

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
    if cache.pages is not None:
        raise ValueError("cache must hold whole rows, got pages")
    layers = jax.tree.map(lambda x: jnp.take(x, rows, axis=1), cache.layers)
    return Cache(layers, jnp.take(cache.length, rows, axis=0), routing=take_routing(cache, rows))


def put_rows(cache: Cache, new: Cache, slots: Int[Array, " new"]) -> Cache:
    """Write whole rows over the rows in `slots`; out of range: the row is not written.

    The new rows may have room for fewer tokens.
    """

    def write(held: Array, new: Array) -> Array:
        extents = (slice(size) for size in new.shape[2:])
        return held.at[(slice(None), slots, *extents)].set(new.astype(held.dtype), mode="drop")

    layers = jax.tree.map(write, cache.layers, new.layers)
    length = cache.length.at[slots].set(new.length, mode="drop")
    return Cache(layers, length, routing=put_routing(cache, new.routing, slots))


def take_routing(cache: Cache, rows: Int[Array, " rows"]) -> Array | None:
    """Select the experts of rows; those of rows out of range are of no meaning."""
    return None if cache.routing is None else jnp.take(cache.routing, rows, axis=0, mode="clip")


def put_routing(cache: Cache, new: Array | None, slots: Int[Array, " new"]) -> Array | None:
    """Write the experts of rows over those of the rows in `slots`, as far as there is room."""
    if cache.routing is None or new is None:
        return cache.routing
    new = new[:, : cache.routing.shape[1]]
    return cache.routing.at[slots, : new.shape[1]].set(new, mode="drop")


def write_routing(
    cache: Cache,
    new: Int[Array, "batch time layers chosen"] | None,
    length: Int[Array, " batch"],
) -> Cache:
    """Write the experts of `length` tokens in each row that the cache does not hold yet."""
    if cache.routing is None or new is None:
        return cache
    column = jnp.arange(new.shape[1], dtype=jnp.int32)[None]
    at = jnp.where(column < length[:, None], cache.length[:, None] + column, cache.routing.shape[1])
    put = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))
    return cache._replace(routing=put(cache.routing, at, new.astype(cache.routing.dtype)))


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
