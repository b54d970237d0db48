"""What decoding remembers of rows: keys and values, states of linear layers, lengths."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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


class Cache(NamedTuple):
    """Everything that decoding the next token depends on, besides parameters.

    Attributes:
        layers: by member of the repeated block, [`KeyValues`][twinkle_jax.model.KeyValues] or
            [`DeltaState`][twinkle_jax.model.DeltaState]; rows are on axis 1.
        length: tokens that each row holds.
    """

    layers: dict[str, KeyValues | DeltaState]
    length: Int[Array, " batch"]


def make_cache(layers: dict[str, Any], length: Int[Array, " batch"], *, max_length: int) -> Cache:
    """Lay out what whole rows left behind, keys and values [layers, batch, time, groups, width]."""
    made: dict[str, KeyValues | DeltaState] = {}
    for member, state in layers.items():
        if isinstance(state, DeltaState):
            made[member] = state
            continue
        keys, values = state
        made[member] = KeyValues(keys.transpose(0, 1, 3, 4, 2), values.swapaxes(2, 3))
    return with_room(Cache(made, length), max_length)


def with_room(cache: Cache, max_length: int) -> Cache:
    """Make rows of a cache longer: `max_length` tokens then fit."""

    def grow(stack: Array, axis: int) -> Array:
        more = [(0, 0)] * stack.ndim
        more[axis] = (0, max_length - stack.shape[axis])
        return jnp.pad(stack, more)

    layers = {
        member: KeyValues(grow(s.keys, 4), grow(s.values, 3)) if isinstance(s, KeyValues) else s
        for member, s in cache.layers.items()
    }
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
