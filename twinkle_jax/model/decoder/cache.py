"""What decoding remembers of rows: keys and values, states of linear layers, lengths."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from twinkle_jax.model.decoder.sharding import backend_of


class KeyValues(NamedTuple):
    """Keys and values of the full layers of one block member; slot p holds position p of a row.

    Time is the last axis of keys and the last but one of values, so that both products of
    attention read them as they lie.
    """

    keys: Float[Array, "layers batch groups width max_length"]
    values: Float[Array, "layers batch groups max_length width"]


class DeltaState(NamedTuple):
    """What a linear layer remembers of a row.

    Attributes:
        window: the last inputs of the convolution, one fewer than its kernel; 0 before the start.
        memory: the state of the delta rule, always float32.
    """

    window: Float[Array, "*layers batch past channels"]
    memory: Float[Array, "*layers batch heads key value"]


Layers = dict[str, KeyValues | DeltaState]


class Cache(NamedTuple):
    """Everything that decoding the next token depends on, besides parameters.

    Attributes:
        layers: by member of the repeated block, [`KeyValues`][twinkle_jax.model.KeyValues] or
            [`DeltaState`][twinkle_jax.model.DeltaState]; rows are on axis 1. A tuple holds the
            repeats one by one; see [`unstack_layers`][twinkle_jax.model.unstack_layers].
        length: tokens that each row holds.
    """

    layers: Layers | tuple[Layers, ...]
    length: Int[Array, " batch"]


CacheOrParams = TypeVar("CacheOrParams", Cache, Mapping[str, Any])


def make_cache(layers: dict[str, Any], length: Int[Array, " batch"], *, max_length: int) -> Cache:
    """Lay out states of whole rows; keys and values are [layers, batch, time, groups, width]."""
    laid_out: Layers = {}
    for member, state in layers.items():
        if isinstance(state, DeltaState):
            laid_out[member] = state
            continue
        keys, values = state
        laid_out[member] = KeyValues(keys.transpose(0, 1, 3, 4, 2), values.swapaxes(2, 3))
    return with_room(Cache(laid_out, length), max_length)


def with_room(cache: Cache, max_length: int) -> Cache:
    """Make rows of a cache longer or shorter: `max_length` tokens then fit."""

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
    """Apply a function to the state of each member, in one stack or one by one."""
    if isinstance(layers, tuple):
        return tuple({name: function(state) for name, state in x.items()} for x in layers)
    return {name: function(state) for name, state in layers.items()}


def unstack_layers(stacked: CacheOrParams) -> CacheOrParams:
    """Split the stack of layers into an array a layer, for many steps on a GPU.

    The compiler for GPUs copies a layer out of a stack before each product, and reads the copy. It
    reads in place what is an array of its own; the price is a program as long as the model is deep.
    [`JaxSampler`][twinkle_jax.sampler.JaxSampler] does it on GPUs, and only there.

    Args:
        stacked: a cache, or parameters.

    Returns:
        The same, with a tuple of its layers that `decode_step` takes; parameters only beside such a
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
    """Make a cache of chosen rows, in order, repeated as often as they are named.

    So a group of completions needs its prompt read only once.

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
    stack: Float[Array, "layers batch groups a b"],
    new: Float[Array, "batch groups width"],
    repeat: Int[Array, ""],
    length: Int[Array, " batch"],
    *,
    axis: int,
    mesh: Mesh | None,
) -> Float[Array, "layers batch groups a b"]:
    """Write each row's entry into its slot along an axis; what finds no slot is dropped.

    Rows are a batching dimension of the scatter, so that on a mesh none of them leaves its device.
    """
    if backend_of(mesh) == "tpu":
        from twinkle_jax.model.decoder.tpu_kernels import write_in_place  # slow to import

        return write_in_place(stack, new, repeat, length, axis=axis, mesh=mesh, interpret=False)
    return jax.lax.scatter(
        stack,
        jnp.stack([jnp.broadcast_to(repeat, length.shape), length], axis=1),
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
