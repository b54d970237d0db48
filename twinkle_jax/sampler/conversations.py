"""Multi-turn sampling: rows keep their caches between turns, and read only new tokens."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from twinkle_jax.data.batch import pad_tokens
from twinkle_jax.model import (
    Cache,
    DecoderConfig,
    Params,
    extend,
    merge_params,
    prefill,
    take_rows,
)
from twinkle_jax.model.decoder.cache import with_room
from twinkle_jax.model.decoder.sharding import row_shards
from twinkle_jax.sampler import slots as device
from twinkle_jax.sampler.generate import compile_shapes, device_bytes, generate_memory
from twinkle_jax.sampler.sampling import Sampling, traced_sampling
from twinkle_jax.sampler.slots import Completions, Setup, Slots, State, on_devices, reusable, spread

_READ = (16, 64, 256)  # tokens of a row that are read at once
_FEW = 8  # slots: so few are never halved
_MOST_READ = 8192  # tokens of all rows that are read at once: attention's logits grow with them


class Conversations:
    r"""Conversations: a fixed number of rows, of which each call continues some.

    The keys, values and states of linear layers of a row stay on the device. A call reads only the
    tokens that it adds, so a conversation of $n$ tokens costs $n$ tokens, however many turns it
    has. Rows that begin with the same tokens, such as a group's prompt, read them once. If the
    tokens of a row do not begin with those that it held, they are read again from the first one
    that differs; with linear layers, from the start.

    A row's tokens depend only on the row, its key and `sampling`, as with
    [`generate`][twinkle_jax.sampler.generate].

    Args:
        params: a decoder's parameters, or adapters. They must not be donated while this is in use.
        config: the decoder.
        rows: number of conversations; on a mesh they are padded to a multiple of its devices.
        sampling: temperature, filters and stop tokens.
        max_length: the most tokens of a row.
        max_new_tokens: room for the tokens of a turn.
        frozen: parameters that `params` are merged into.
        compute_dtype: as for [`hidden_states`][twinkle_jax.model.hidden_states].
        mesh: devices of the parameters.

    Raises:
        ValueError: if a number is too small.

    Example:
        >>> import jax
        >>> from twinkle_jax.model import init_params, parse_config
        >>> from twinkle_jax.sampler import Conversations
        >>> config = parse_config({
        ...     "model_type": "qwen2", "vocab_size": 64, "hidden_size": 32,
        ...     "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        ... })
        >>> params = init_params(jax.random.key(0), config)
        >>> rows = Conversations(params, config, 2, max_length=32, max_new_tokens=4)
        >>> keys = jax.random.split(jax.random.key(1), 2)
        >>> drawn = rows.go_on({0: [1, 2, 3], 1: [4]}, keys)
        >>> drawn.lengths.tolist()
        [4, 4]
        >>> turn = drawn.tokens[1].tolist()
        >>> drawn = rows.go_on({1: [4, *turn, 5, 6]}, keys, limits={1: 2})
        >>> drawn.lengths.tolist(), rows.tokens_read  # two before the first turn, and two since
        ([0, 2], 4)
    """

    def __init__(
        self,
        params: Params,
        config: DecoderConfig,
        rows: int,
        sampling: Sampling = Sampling(),  # noqa: B008  # immutable
        *,
        max_length: int,
        max_new_tokens: int,
        frozen: Params | None = None,
        compute_dtype: DTypeLike | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        numbers = {"rows": (rows, 1), "max_length": (max_length, 2)}
        for name, (number, least) in {**numbers, "max_new_tokens": (max_new_tokens, 1)}.items():
            if number < least:
                raise ValueError(f"{name} must be at least {least}, got {number}")
        self._slots = _slots_of_a_device(rows, mesh)
        self._setup = Setup(
            config=config,
            num_samples=1,
            new=max_new_tokens,
            refill=1,
            compute_dtype=None if compute_dtype is None else jnp.dtype(compute_dtype),
            attention=None,
            mesh=mesh,
        )
        self._full = max_length - 1  # the last token of a row is drawn, and not read
        self._sampling = traced_sampling(sampling)
        self._weights = _lay_out(merge_params(frozen, params), self._setup.compute_dtype, mesh)
        self._capacity = device.capacity_for(0, self._full)
        self._cache = _empty(
            self._weights, self._setup, self._slots * row_shards(mesh), self._capacity
        )
        self._held: list[list[int]] = [[] for _ in range(rows)]
        self.tokens_read = 0
        """Tokens read so far, except those that were drawn."""

    def go_on(
        self,
        rows: Mapping[int, Sequence[int]],
        keys: jax.Array,
        limits: Mapping[int, int] | None = None,
    ) -> Completions:
        """Draw the next turn of some of the rows.

        Args:
            rows: from a row's number to all its tokens: those that it holds, and new ones.
            keys: one for each row; those of other rows are not used.
            limits: from a row's number to the most tokens that it may get; None for as many as
                there is room for.

        Returns:
            The completions of all rows, on the host; those of rows that are not in `rows` are
            empty.

        Raises:
            ValueError: if a row has no tokens, or no room for another one; if a limit is less than
                1 or more than the room.
        """
        limits = {i: self._room(len(row)) for i, row in rows.items()} if limits is None else limits
        self._check(rows, keys, limits)
        starts = {i: self._start(i, row) for i, row in rows.items()}
        new = {i: row[starts[i] : -1] for i, row in rows.items()}
        leaders = self._leaders(rows, starts)
        new = {i: [] if i in leaders else tokens for i, tokens in new.items()}
        self.tokens_read += sum(map(len, new.values()))
        longest = max(len(row) for row in rows.values()) - 1
        capacity = device.capacity_for(longest, self._full)
        most = int(np.bincount([i // self._slots for i in rows]).max())  # on a device
        slots = device.slots_for(most, self._slots)
        state = self._begin(rows, starts, limits, keys, slots, capacity)
        for tokens, mask in self._chunks(new, slots):
            state = _read(self._weights, state, tokens, mask, setup=self._setup)
        if leaders:
            source = np.arange(len(self._cache.length), dtype=np.int32) % self._slots
            source[list(leaders)] = [leader % self._slots for leader in leaders.values()]
            state = _copy(state, source, setup=self._setup)
        results: Completions = self._draw(state, slots, capacity)
        if not results.tokens.is_fully_addressable:  # some rows are on other processes
            results = multihost_utils.process_allgather(results, tiled=True)
        results = jax.device_get(results)
        for i, row in rows.items():
            self._held[i] = [*row, *results.tokens[i, : results.lengths[i] - 1].tolist()]
        return jax.tree.map(lambda x: x[: len(self._held)], results)

    def _draw(self, state: State, slots: int, capacity: int) -> Completions:
        """Draw until all rows have ended; save the caches of rows before their slots are freed."""
        setup, full = self._setup, self._full
        while True:
            state, status = _run(
                self._weights, state, self._sampling, setup=setup, capacity=capacity, full=full
            )
            status = device.Status(*map(int, jax.device_get(status)))
            fewer = device.slots_for(status.running, slots)
            needed = device.capacity_for(status.filled, full)
            if not status.running or fewer < slots or 2 * needed < capacity:
                if self._capacity < capacity:
                    self._cache, self._capacity = _grow(self._cache, capacity, setup), capacity
                self._cache = _keep(self._cache, state.slots, setup=setup)
            if not status.running:
                return _collect(state, setup=setup).results
            if fewer < slots or needed > capacity or 2 * needed < capacity:
                slots, capacity = fewer, needed
                state = _resize(state, setup=setup, slots=slots, capacity=capacity)

    def _begin(
        self,
        rows: Mapping[int, Sequence[int]],
        starts: Mapping[int, int],
        limits: Mapping[int, int],
        keys: jax.Array,
        slots: int,
        capacity: int,
    ) -> State:
        count = len(self._cache.length)
        chosen, start, pending, limit = (np.zeros(count, np.int32) for _ in range(4))
        seen = np.full((count, self._full + 1), self._setup.config.vocab_size, np.int32)
        for i, row in rows.items():
            chosen[i], start[i], pending[i], limit[i] = 1, starts[i], row[-1], limits[i]
            seen[i, : len(row)] = row
        return _start(
            self._cache,
            chosen.astype(bool),
            start,
            pending,
            limit,
            seen,
            keys,
            setup=self._setup,
            slots=slots,
            capacity=capacity,
        )

    def _chunks(
        self, new: Mapping[int, Sequence[int]], slots: int
    ) -> list[tuple[Int[np.ndarray, "rows time"], Bool[np.ndarray, "rows time"]]]:
        """Cut new tokens into arrays of a few sizes, so that few programs are compiled."""
        longest = max(map(len, new.values()))
        sizes = [size for size in _READ if size * slots <= _MOST_READ] or [_READ[0]]
        size = next((size for size in sizes if size >= longest), sizes[-1])
        chunks = []
        for begin in range(0, longest, size):
            parts = [new.get(i, ())[begin : begin + size] for i in range(len(self._held))]
            chunks.append(pad_tokens(parts, length=size, count=len(self._cache.length)))
        return chunks

    def _start(self, number: int, row: Sequence[int]) -> int:
        """Count the tokens at the front of a row that need not be read again."""
        held = self._held[number]
        if len(held) < len(row) and list(row[: len(held)]) == held:
            return len(held)
        if self._setup.config.delta_net is not None:  # a linear state cannot be rewound
            return 0
        pairs = enumerate(zip(held, row[:-1], strict=False))
        return next((i for i, (old, new) in pairs if old != new), len(row) - 1)

    def _leaders(
        self, rows: Mapping[int, Sequence[int]], starts: Mapping[int, int]
    ) -> dict[int, int]:
        """Map rows to an earlier row of their device with the same tokens, to copy it from."""
        first: dict[tuple[int, tuple[int, ...]], int] = {}
        leaders = {}
        for i, row in rows.items():
            if not starts[i] and len(row) > 1:
                leader = first.setdefault((i // self._slots, tuple(row[:-1])), i)
                if leader != i:
                    leaders[i] = leader
        return leaders

    def _room(self, length: int) -> int:
        return min(self._setup.new, self._full + 1 - length)

    def _check(self, rows: Mapping[int, Any], keys: jax.Array, limits: Mapping[int, int]) -> None:
        count = len(self._held)
        if not rows or not all(0 <= i < count for i in rows):
            raise ValueError(f"rows must have keys in [0, {count}), got {sorted(rows)}")
        if keys.shape != (count,):
            raise ValueError(f"keys must be one for each of {count} rows, got {keys.shape}")
        vocab = self._setup.config.vocab_size
        for i, row in rows.items():
            room = self._room(len(row))
            if not len(row) or room < 1:
                raise ValueError(
                    f"rows must have from 1 to {self._full} tokens, got {len(row)} in row {i}"
                )
            if min(row) < 0 or max(row) >= vocab:
                raise ValueError(
                    f"rows must have tokens in [0, {vocab}), the vocabulary, got "
                    f"{min(row)} to {max(row)} in row {i}"
                )
            if not 1 <= limits[i] <= room:
                raise ValueError(f"limits must be in [1, {room}] for row {i}, got {limits[i]}")


def conversations_memory(
    params: Any,
    config: DecoderConfig,
    rows: int,
    *,
    max_length: int,
    max_new_tokens: int,
    frozen: Any = None,
    compute_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> int:
    """Return the peak bytes per device that `Conversations` needs, when all its rows are full.

    Args:
        params: as for `Conversations`, or their shapes and shardings.
        config: the decoder.
        rows: number of conversations.
        max_length: the most tokens of a row.
        max_new_tokens: room for the tokens of a turn.
        frozen: parameters that `params` are merged into, or their shapes.
        compute_dtype: type of activations.
        mesh: devices of the parameters.

    Returns:
        The bytes of [`generate_memory`][twinkle_jax.sampler.generate_memory] for rows of this
        length, plus the cache once more: rows that are drawn have a copy in their slots.
    """
    options: dict[str, Any] = {"compute_dtype": compute_dtype, "mesh": mesh}
    drawing = generate_memory(
        params,
        config,
        prompts=rows,
        prompt_tokens=max(max_length - max_new_tokens, 1),
        num_samples=1,
        max_new_tokens=max_new_tokens,
        frozen=frozen,
        **options,
    )
    setup = Setup(config, 1, max_new_tokens, 1, attention=None, **options)
    count = _slots_of_a_device(rows, mesh) * row_shards(mesh)
    cache, _ = compile_shapes(_empty.lower(merge_params(frozen, params), setup, count, max_length))
    return drawing + device_bytes(cache)


def _slots_of_a_device(rows: int, mesh: Mesh | None) -> int:
    """Divide rows evenly; round up more than a few, so that slots can be halved."""
    share = -(-rows // row_shards(mesh))
    return share if share <= _FEW else share + -share % _FEW


# The compiled programs.


def start(
    cache: Cache,
    chosen: Bool[Array, " rows"],
    starts: Int[Array, " rows"],
    pending: Int[Array, " rows"],
    limits: Int[Array, " rows"],
    seen: Int[Array, "rows time"],
    keys: jax.Array,
    *,
    setup: Setup,
    slots: int,
    capacity: int,
) -> State:
    """Give slots to the chosen rows, with their caches of the first `starts` tokens."""
    count = len(chosen)
    index = jnp.minimum(jnp.arange(count, dtype=jnp.int32), len(keys) - 1)
    keys = jax.random.clone(keys)[index]  # padding rows draw nothing, so they may share a key

    def reset(path: Any, x: Array) -> Array:
        """Zero the states of rows that are read from the start; keys and values are masked."""
        if getattr(path[-1], "name", None) in ("keys", "values"):
            return x
        return jnp.where((starts > 0).reshape(1, -1, *(1,) * (x.ndim - 2)), x, jnp.zeros_like(x))

    layers = jax.tree_util.tree_map_with_path(reset, cache.layers)
    share = count // setup.shards
    row = jnp.where(chosen, jnp.arange(count, dtype=jnp.int32) % share, share)
    rows = device.undrawn(
        row, pending, Cache(layers, starts), seen, limits, keys, chosen, setup=setup
    )
    no_rows = jnp.zeros_like(limits)
    # An empty queue: every chosen row has a slot.
    queue = device.Queue(no_rows, keys, no_rows, no_rows, taken=jnp.zeros(setup.shards, jnp.int32))
    state = spread(State(rows, queue, device.no_completions(count, setup.new)), setup.mesh)
    return device.resize(state, setup=setup, slots=slots, capacity=capacity)


def read(
    weights: Params,
    state: State,
    tokens: Int[Array, "rows time"],
    mask: Bool[Array, "rows time"],
    *,
    setup: Setup,
) -> State:
    """Read new tokens of the rows in slots."""

    def choose(rows: Slots, tokens: Array, mask: Array) -> tuple[Array, Array]:
        chosen = tokens.at[rows.row].get(mode="fill", fill_value=0)
        return chosen, mask.at[rows.row].get(mode="fill", fill_value=False)

    rows = state.slots
    tokens, mask = on_devices(choose, setup.mesh)(rows, tokens, mask)
    _, cache = extend(
        weights,
        setup.config,
        tokens,
        rows.cache,
        mask,
        compute_dtype=setup.compute_dtype,
        mesh=setup.mesh,
    )
    return reusable(spread(state._replace(slots=rows._replace(cache=cache)), setup.mesh))


def copy(state: State, source: Int[Array, " rows"], *, setup: Setup) -> State:
    """Copy to each row in a slot the cache of row `source` of its device, which has a slot too."""

    def take(rows: Slots, source: Array) -> Cache:
        slot_of = jnp.zeros(len(source), jnp.int32)
        slot_of = slot_of.at[rows.row].set(jnp.arange(len(rows.row)), mode="drop")
        return take_rows(rows.cache, slot_of[source.at[rows.row].get(mode="fill", fill_value=0)])

    cache = on_devices(take, setup.mesh)(state.slots, source)
    state = state._replace(slots=state.slots._replace(cache=cache))
    return reusable(spread(state, setup.mesh))


def keep(cache: Cache, slots: Slots, *, setup: Setup) -> Cache:
    """Write the caches of the rows in slots back to the cache of all rows.

    Columns beyond the slots' capacity are kept: a row that ended earlier may use more of them.
    """

    def put(cache: Cache, slots: Slots) -> Cache:
        def write(path: Any, old: Array, new: Array) -> Array:
            if not any(getattr(key, "name", None) == "layers" for key in path):
                return old.at[slots.row].set(new, mode="drop")
            columns = (slice(size) for size in new.shape[2:])
            return old.at[(slice(None), slots.row, *columns)].set(new, mode="drop")

        return jax.tree_util.tree_map_with_path(write, cache, slots.cache)

    kept: Cache = spread(on_devices(put, setup.mesh)(cache, slots), setup.mesh)
    return kept


@partial(jax.jit, static_argnums=(1, 2, 3))
def _empty(weights: Params, setup: Setup, rows: int, capacity: int) -> Cache:
    def shapes() -> Cache:
        return prefill(
            weights,
            setup.config,
            jnp.zeros((rows, 1), jnp.int32),
            max_length=capacity,
            compute_dtype=setup.compute_dtype,
            attention="xla",
        )[1]

    cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(shapes))
    empty: Cache = spread(device.for_many_steps(cache, setup.mesh), setup.mesh)
    return empty


@partial(jax.jit, static_argnums=(1, 2))
def _grow(cache: Cache, capacity: int, setup: Setup) -> Cache:
    longer: Cache = spread(with_room(cache, capacity), setup.mesh)
    return longer


_lay_out = jax.jit(device.lay_out_weights, static_argnums=(1, 2))
_start = jax.jit(start, static_argnames=("setup", "slots", "capacity"))
_read = jax.jit(read, static_argnames="setup", donate_argnames="state")
_copy = jax.jit(copy, static_argnames="setup", donate_argnames="state")
_run = jax.jit(device.run, static_argnames=("setup", "capacity", "full"), donate_argnames="state")
_resize = jax.jit(device.resize, static_argnames=("setup", "slots", "capacity"))
_collect = jax.jit(device.collect, static_argnames="setup", donate_argnames="state")
_keep = jax.jit(keep, static_argnames="setup", donate_argnames="cache")
