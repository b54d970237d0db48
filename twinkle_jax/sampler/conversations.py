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

from twinkle_jax.data.batch import pad_tokens, read_integers
from twinkle_jax.model import (
    Cache,
    DecoderConfig,
    Params,
    extend,
    merge_params,
    prefill,
    take_rows,
)
from twinkle_jax.model.decoder.cache import put_rows, with_room
from twinkle_jax.model.decoder.pages import (
    empty_pages,
    keep_rows,
    put_in_pages,
    release,
    replace_rows,
    whole_rows,
)
from twinkle_jax.model.decoder.parameters import check_decoder
from twinkle_jax.model.decoder.sharding import row_shards
from twinkle_jax.sampler import sizes
from twinkle_jax.sampler import slots as device
from twinkle_jax.sampler.generate import (
    check_key_type,
    compile_shapes,
    device_bytes,
    generate_memory,
)
from twinkle_jax.sampler.sampling import Sampling, threefry_keys, traced_sampling
from twinkle_jax.sampler.sizes import Setup
from twinkle_jax.sampler.slots import Completions, Slots, State, on_devices, spread

_DEFAULT = Sampling()
_READ = (16, 64, 256)  # tokens of a row that are read at once
_UNKNOWN = -1  # no token
_FEW = 8  # slots: so few are never halved; and rows that a device reads at once
_MOST_READ = 2**23  # tokens read at once times the room of their rows: attention's logits


class Conversations:
    r"""Conversations: a fixed number of rows, of which each call continues some.

    The keys, values and states of linear layers of a row stay on the device; those of long rows lie
    in pages on GPUs and TPUs, so that memory grows with the tokens. A call reads only the tokens
    that it adds, so a conversation of $n$ tokens costs $n$ tokens, however many turns it
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
        keep_routing: whether to return the experts that each token of a row went through.

    Raises:
        ValueError: if a number is too small, or `keep_routing` is set for a decoder without
            experts.

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
        sampling: Sampling = _DEFAULT,
        *,
        max_length: int,
        max_new_tokens: int,
        frozen: Params | None = None,
        compute_dtype: DTypeLike | None = None,
        mesh: Mesh | None = None,
        keep_routing: bool = False,
    ) -> None:
        check_decoder(params, config)
        sizes.check_count("rows", rows)
        sizes.check_count("max_length", max_length, 2)
        sizes.check_count("max_new_tokens", max_new_tokens)
        self._slots = _slots_of_a_device(rows, mesh)
        self._full = max_length - 1  # the last token of a row is drawn, and not read
        setup = _setup(config, max_new_tokens, compute_dtype, mesh, keep_routing)
        self._setup = setup.in_pages(self._full)
        self._sampling = traced_sampling(sampling)
        self._weights = _lay_out(merge_params(frozen, params), self._setup.compute_dtype, mesh)
        self._held: list[list[int]] = [[] for _ in range(rows)]
        count, self._capacity = self._slots * row_shards(mesh), self._capacity_for({})
        self._cache = _empty(self._weights, self._setup, count, self._capacity, self._full)
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
            limits: the most new tokens of each of `rows`, by its number; None for as many as there
                is room for.

        Returns:
            The completions of all rows, on the host; those of rows that are not in `rows` are
            empty.

        Raises:
            ValueError: if a row has no tokens, or no room for another one; if a limit is missing,
                less than 1 or more than the room.
            TypeError: if `rows` is no mapping; if its keys, tokens or limits are not integers; or
                if `keys` are not keys.
        """
        if not isinstance(rows, Mapping):
            raise TypeError(f"rows must map a row's number to its tokens, got {rows!r:.80}")
        limits = {i: self._room(len(row)) for i, row in rows.items()} if limits is None else limits
        self._check(rows, keys, limits)
        try:
            results = self._continue(rows, keys, limits)
        except BaseException:
            # The device may have any of their tokens by now.
            for i, row in rows.items():
                most = max(len(self._held[i]), min(len(row) + self._setup.new, self._full))
                self._held[i] = [_UNKNOWN] * most
            raise
        for i, row in rows.items():
            self._held[i] = [*row, *results.tokens[i, : results.lengths[i] - 1].tolist()]
        return jax.tree.map(lambda x: x[: len(self._held)], results)

    def _continue(
        self, rows: Mapping[int, Sequence[int]], keys: jax.Array, limits: Mapping[int, int]
    ) -> Completions:
        self._read(rows)
        most = int(np.bincount([i // self._slots for i in rows]).max())  # on a device
        slots = sizes.slots_for(most, self._slots)
        lengths = {i: len(row) - 1 for i, row in rows.items()}
        capacity = self._capacity_for(lengths, more=sizes.STEPS_OF_ROOM)
        state = self._begin(rows, limits, threefry_keys(keys), slots, capacity)
        results: Completions = self._draw(state, slots, capacity)
        if not results.tokens.is_fully_addressable:  # some rows are on other processes
            results = multihost_utils.process_allgather(results, tiled=True)
        return jax.device_get(results)

    def _capacity_for(self, lengths: Mapping[int, int], more: int = 0) -> int:
        """Choose a capacity for rows of these lengths; in pages, that get so many more tokens."""
        setup, full = self._setup, self._full
        if setup.page is None:
            return sizes.capacity_for(max(lengths.values(), default=0), full)
        pages = np.ones(setup.shards, int)  # a free one, see `next_places`
        for i, length in lengths.items():
            pages[i // self._slots] += setup.pages_of_row(min(length + more, full))
        return setup.pages_for(int(pages.max()), self._slots, full)

    def _reserve(self, capacity: int) -> None:
        if capacity > self._capacity:
            self._cache, self._capacity = _grow(self._cache, capacity, self._setup), capacity

    def _read(self, rows: Mapping[int, Sequence[int]]) -> None:
        """Read the new tokens of rows, all but the last, a few rows of each device at a time."""
        starts = {i: self._start(i, row) for i, row in rows.items()}
        leaders = self._leaders(rows, starts)
        followers: dict[int, list[int]] = {}
        for i, leader in leaders.items():
            followers.setdefault(leader, []).append(i)
        changed = [
            i
            for i, row in rows.items()
            if i not in leaders and not starts[i] == len(row) - 1 == len(self._held[i])
        ]
        if not changed:
            return
        # A row that gets shorter may be replaced after others have grown.
        lengths = {i: max(len(held), len(rows.get(i, ())) - 1) for i, held in enumerate(self._held)}
        self._reserve(self._capacity_for(lengths))
        # Rows with many new tokens together, so that others do not wait for them.
        changed.sort(key=lambda i: starts[i] - len(rows[i]))
        queues = [
            [i for i in changed if i // self._slots == shard] for shard in range(self._setup.shards)
        ]
        size = min(_FEW, self._slots)
        for begin in range(0, max(map(len, queues)), size):
            group = [queue[begin : begin + size] for queue in queues]
            new = [[rows[i][starts[i] : -1] for i in part] for part in group]
            self.tokens_read += sum(len(tokens) for part in new for tokens in part)
            longest = max(len(rows[i]) for part in group for i in part)
            capacity = sizes.capacity_for(longest - 1, self._full)
            local = self._by_device([[i % self._slots for i in part] for part in group], size)
            begun = self._by_device([[starts[i] for i in part] for part in group], size, 0)
            whole = _take(self._cache, local, begun, setup=self._setup, capacity=capacity)
            for tokens, mask in _chunks(new, size, capacity):
                whole = _extend(self._weights, whole, tokens, mask, setup=self._setup)
            copies = [
                [(line, j) for line, i in enumerate(part) for j in (i, *followers.get(i, ()))]
                for part in group
            ]
            for first in range(0, max(map(len, copies)), size):
                some = [part[first : first + size] for part in copies]
                source = self._by_device([[line for line, _ in part] for part in some], size, 0)
                target = [[j % self._slots for _, j in part] for part in some]
                self._cache = _put(
                    self._cache, whole, source, self._by_device(target, size), setup=self._setup
                )

    def _by_device(
        self, parts: Sequence[Sequence[int]], size: int, fill: int | None = None
    ) -> Int[np.ndarray, " lines"]:
        """Lay numbers of each device side by side, `size` each; the rest is no row."""
        lines = np.full((len(parts), size), self._slots if fill is None else fill, np.int32)
        for line, part in zip(lines, parts, strict=True):
            line[: len(part)] = part
        return lines.reshape(-1)

    def _draw(self, state: State, slots: int, capacity: int) -> Completions:
        """Draw until all rows have ended; save the caches of rows before their slots are freed."""
        setup, full = self._setup, self._full
        while True:
            state, status = _run(
                self._weights, state, self._sampling, setup=setup, capacity=capacity, full=full
            )
            status = sizes.Status(*map(int, jax.device_get(status)))
            fewer = sizes.slots_for(status.running, slots)
            needed = sizes.next_capacity(setup, status, fewer, capacity, 0, full)
            if not status.running or fewer < slots or needed < capacity:
                kept = capacity
                if setup.page is not None:
                    pages = int(jax.device_get(_pages_with(self._cache, state.slots, setup=setup)))
                    kept = setup.pages_for(pages, self._slots, full)
                self._reserve(kept)
                self._cache = _keep(self._cache, state.slots, setup=setup)
            if not status.running:
                return _collect(state, setup=setup).results
            if (fewer, needed) != (slots, capacity):
                slots, capacity = fewer, needed
                state = _resize(state, setup=setup, slots=slots, capacity=capacity)

    def _begin(
        self,
        rows: Mapping[int, Sequence[int]],
        limits: Mapping[int, int],
        keys: jax.Array,
        slots: int,
        capacity: int,
    ) -> State:
        count = len(self._cache.length)
        chosen, pending, limit = (np.zeros(count, np.int32) for _ in range(3))
        seen = np.full((count, self._full + 1), self._setup.config.vocab_size, np.int32)
        for i, row in rows.items():
            chosen[i], pending[i], limit[i] = 1, row[-1], limits[i]
            seen[i, : len(row)] = row
        return _start(
            self._cache,
            chosen.astype(bool),
            pending,
            limit,
            seen,
            keys,
            setup=self._setup,
            slots=slots,
            capacity=capacity,
        )

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
        for i in rows:
            if isinstance(i, bool) or not isinstance(i, int | np.integer):
                raise TypeError(f"rows must have integers as keys, got {i!r:.80}")
        if not rows or not all(0 <= i < count for i in rows):
            raise ValueError(f"rows must have keys in [0, {count}), got {sorted(rows)}")
        check_key_type("keys", keys)
        if keys.shape != (count,):
            raise ValueError(f"keys must be one for each of {count} rows, got {keys.shape}")
        vocab = self._setup.config.vocab_size
        for i, row in rows.items():
            room = self._room(len(row))
            if not len(row) or room < 1:
                raise ValueError(
                    f"rows must have from 1 to {self._full} tokens, got {len(row)} in row {i}"
                )
            read_integers(f"rows[{i}]", row)
            if min(row) < 0 or max(row) >= vocab:
                raise ValueError(
                    f"rows must have tokens in [0, {vocab}), the vocabulary, got "
                    f"{min(row)} to {max(row)} in row {i}"
                )
            if i not in limits:
                raise ValueError(f"limits must have each of the rows, got none for row {i}")
            sizes.check_count(f"limits[{i}]", limits[i], 0)
            if not 1 <= limits[i] <= room:
                raise ValueError(f"limits must be in [1, {room}] for row {i}, got {limits[i]}")


def conversations_memory(
    params: Any,
    config: DecoderConfig,
    rows: int,
    *,
    max_length: int,
    max_new_tokens: int,
    sampling: Sampling = _DEFAULT,
    frozen: Any = None,
    compute_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    keep_routing: bool = False,
) -> int:
    """Return the peak bytes per device that `Conversations` needs, when all its rows are full.

    Args:
        params: as for `Conversations`, or their shapes and shardings.
        config: the decoder.
        rows: number of conversations.
        max_length: the most tokens of a row.
        max_new_tokens: room for the tokens of a turn.
        sampling: as for `Conversations`.
        frozen: parameters that `params` are merged into, or their shapes.
        compute_dtype: type of activations.
        mesh: devices of the parameters.
        keep_routing: whether the experts of each token are returned.

    Returns:
        The bytes of [`generate_memory`][twinkle_jax.sampler.generate_memory] for rows of this
        length, plus the cache once more: rows that are drawn have a copy in their slots.
    """
    options: dict[str, Any] = {
        "compute_dtype": compute_dtype,
        "mesh": mesh,
        "keep_routing": keep_routing,
    }
    drawing = generate_memory(
        params,
        config,
        prompts=rows,
        prompt_tokens=max(max_length - max_new_tokens, 1),
        num_samples=1,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        frozen=frozen,
        **options,
    )
    setup = _setup(config, max_new_tokens, **options).in_pages(max_length - 1)
    slots = _slots_of_a_device(rows, mesh)
    capacity = max_length if setup.page is None else setup.most_pages(slots, max_length - 1)
    lowered = _empty.lower(
        merge_params(frozen, params), setup, slots * setup.shards, capacity, max_length - 1
    )
    return drawing + device_bytes(compile_shapes(lowered)[0])


def _setup(
    config: DecoderConfig,
    new: int,
    compute_dtype: DTypeLike | None,
    mesh: Mesh | None,
    keep_routing: bool,
) -> Setup:
    return Setup(
        config=config,
        num_samples=1,
        new=new,
        refill=1,
        compute_dtype=None if compute_dtype is None else jnp.dtype(compute_dtype),
        attention=None,
        mesh=mesh,
        keeps_ended=True,
        keep_routing=keep_routing,
    )


def _slots_of_a_device(rows: int, mesh: Mesh | None) -> int:
    """Divide rows evenly; round up more than a few, so that slots can be halved."""
    share = -(-rows // row_shards(mesh))
    return share if share <= _FEW else share + -share % _FEW


def _chunks(
    new: Sequence[Sequence[Sequence[int]]], lines: int, capacity: int
) -> list[tuple[Int[np.ndarray, "lines time"], Bool[np.ndarray, "lines time"]]]:
    """Cut new tokens of each device's rows into arrays of a few sizes: few programs compile."""
    rows = [row for part in new for row in (*part, *[()] * (lines - len(part)))]
    longest = max(map(len, rows))
    sizes = [size for size in _READ if size * lines * capacity <= _MOST_READ] or [_READ[0]]
    size = next((size for size in sizes if size >= longest), sizes[-1])
    return [
        pad_tokens([row[begin : begin + size] for row in rows], length=size, count=len(rows))
        for begin in range(0, longest, size)
    ]


# The compiled programs.


def start(
    cache: Cache,
    chosen: Bool[Array, " rows"],
    pending: Int[Array, " rows"],
    limits: Int[Array, " rows"],
    seen: Int[Array, "rows time"],
    keys: jax.Array,
    *,
    setup: Setup,
    slots: int,
    capacity: int,
) -> State:
    """Give slots to the chosen rows, with copies of their caches."""
    count = len(chosen)
    index = jnp.minimum(jnp.arange(count, dtype=jnp.int32), len(keys) - 1)
    keys = jax.random.clone(keys)[index]  # padding rows draw nothing, so they may share a key
    share = count // setup.shards
    row = jnp.where(chosen, jnp.arange(count, dtype=jnp.int32) % share, share)
    rows = device.undrawn(row, pending, cache, seen, limits, keys, chosen, setup=setup)
    if cache.pages is not None:  # only the chosen rows' pages are copied

        def choose(cache: Cache, chosen: Array) -> Cache:
            assert cache.pages is not None
            return cache._replace(pages=release(cache.pages, chosen))

        rows = rows._replace(cache=on_devices(choose, setup.mesh)(cache, chosen))
    no_rows = jnp.zeros_like(limits)
    # An empty queue: every chosen row has a slot.
    queue = device.Queue(no_rows, keys, no_rows, no_rows, taken=jnp.zeros(setup.shards, jnp.int32))
    none = device.no_completions(count, seen.shape[1] - 1, setup)
    state = spread(State(rows, queue, none), setup.mesh)
    return device.resize(state, setup=setup, slots=slots, capacity=capacity)


def take(
    cache: Cache,
    rows: Int[Array, " lines"],
    starts: Int[Array, " lines"],
    *,
    setup: Setup,
    capacity: int,
) -> Cache:
    """Copy the first `starts` tokens of each device's rows; out of range: an empty row."""

    def copied(cache: Cache, rows: Array, starts: Array) -> Cache:
        if cache.pages is None:
            taken = with_room(take_rows(cache, jnp.minimum(rows, len(cache.length) - 1)), capacity)
        else:
            taken = whole_rows(cache, rows, capacity)

        def reset(path: Any, x: Array) -> Array:
            """Zero the states of rows that are read from the start; keys and values are masked."""
            if getattr(path[-1], "name", None) in ("keys", "values"):
                return x
            begun = (starts > 0).reshape(1, -1, *(1,) * (x.ndim - 2))
            return jnp.where(begun, x, jnp.zeros_like(x))

        layers = jax.tree_util.tree_map_with_path(reset, taken.layers)
        return taken._replace(layers=layers, length=starts)

    return spread(on_devices(copied, setup.mesh)(cache, rows, starts), setup.mesh)


def read(
    weights: Params,
    cache: Cache,
    tokens: Int[Array, "lines time"],
    mask: Bool[Array, "lines time"],
    *,
    setup: Setup,
) -> Cache:
    """Read new tokens of whole rows."""
    _, longer = extend(
        weights,
        setup.config,
        tokens,
        cache,
        mask,
        compute_dtype=setup.compute_dtype,
        mesh=setup.mesh,
    )
    return spread(longer, setup.mesh)


def put(
    cache: Cache,
    new: Cache,
    source: Int[Array, " lines"],
    rows: Int[Array, " lines"],
    *,
    setup: Setup,
) -> Cache:
    """Write line `source` of the whole rows `new` over each device's `rows`."""

    def replaced(cache: Cache, new: Cache, source: Array, rows: Array) -> Cache:
        if cache.pages is None:
            return put_rows(cache, take_rows(new, source), rows)
        kept = jnp.ones(len(cache.length), bool).at[rows].set(False, mode="drop")
        cache = cache._replace(pages=release(cache.pages, kept))
        return put_in_pages(cache, new, source, rows, source, setup.config)

    written = on_devices(replaced, setup.mesh)(cache, new, source, rows)
    return spread(written, setup.mesh)


def keep(cache: Cache, slots: Slots, *, setup: Setup) -> Cache:
    """Write the caches of the rows in slots back to the cache of all rows."""

    def replaced(cache: Cache, slots: Slots) -> Cache:
        write = put_rows if cache.pages is None else replace_rows
        return write(cache, slots.cache, slots.row)

    return spread(on_devices(replaced, setup.mesh)(cache, slots), setup.mesh)


def pages_with(cache: Cache, slots: Slots, *, setup: Setup) -> Int[Array, ""]:
    """Count the pages of a device, at most, when rows in slots are written back; and a free one."""

    def count(cache: Cache, slots: Slots) -> Int[Array, " devices"]:
        assert cache.pages is not None
        assert slots.cache.pages is not None
        others = jnp.ones(len(cache.length), bool).at[slots.row].set(False, mode="drop")
        held = release(cache.pages, others).owner < len(cache.length)
        has_row = slots.row < len(cache.length)
        new = has_row.at[slots.cache.pages.owner].get(mode="fill", fill_value=False)
        return (jnp.sum(held) + jnp.sum(new) + 1).astype(jnp.int32)[None]

    return jnp.max(on_devices(count, setup.mesh)(cache, slots))


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _empty(weights: Params, setup: Setup, rows: int, capacity: int, full: int) -> Cache:
    """Make the cache of rows of `full` tokens; the capacity is of a row, or pages of a device."""

    def shapes() -> Cache:
        return prefill(
            weights,
            setup.config,
            jnp.zeros((rows, 1), jnp.int32),
            max_length=capacity if setup.page is None else 1,
            compute_dtype=setup.compute_dtype,
            attention="xla",
            keep_routing=setup.keep_routing,
        )[1]

    def in_pages(cache: Cache) -> Cache:
        assert setup.page is not None
        sizes = {"rows": len(cache.length), "size": setup.page, "pages": capacity}
        return empty_pages(cache, setup.config, **sizes, max_length=full)

    cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(shapes))
    cache = device.for_many_steps(cache, setup.mesh)
    if setup.page is not None:
        cache = on_devices(in_pages, setup.mesh)(cache)
    return spread(cache, setup.mesh)


@partial(jax.jit, static_argnums=(1, 2))
def _grow(cache: Cache, capacity: int, setup: Setup) -> Cache:
    def more_pages(cache: Cache) -> Cache:
        return keep_rows(cache, jnp.arange(len(cache.length), dtype=jnp.int32), capacity)

    in_pages = setup.page is not None
    larger = on_devices(more_pages, setup.mesh)(cache) if in_pages else with_room(cache, capacity)
    return spread(larger, setup.mesh)


_lay_out = jax.jit(device.lay_out_weights, static_argnums=(1, 2))
_start = jax.jit(start, static_argnames=("setup", "slots", "capacity"))
_take = jax.jit(take, static_argnames=("setup", "capacity"))
_extend = jax.jit(read, static_argnames="setup", donate_argnames="cache")
_put = jax.jit(put, static_argnames="setup", donate_argnames="cache")
_run = jax.jit(device.run, static_argnames=("setup", "capacity", "full"), donate_argnames="state")
_resize = jax.jit(device.resize, static_argnames=("setup", "slots", "capacity"))
_collect = jax.jit(device.collect, static_argnames="setup", donate_argnames="state")
_pages_with = jax.jit(pages_with, static_argnames="setup")
_keep = jax.jit(keep, static_argnames="setup", donate_argnames="cache")
