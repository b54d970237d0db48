"""Continuous batching: rows that end give their slots to waiting rows.

A queue of rows is split evenly over the devices of a mesh. Each device fills its slots from its own
part, so that rows and their caches never move between devices. Every function here is meant to be
compiled; `generate` calls them in turn.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.model import (
    Cache,
    DecoderConfig,
    Params,
    decode_step,
    prefill,
    take_rows,
    unstack_layers,
)
from twinkle_jax.model.decoder.cache import CacheOrParams, Pages, put_rows, with_room
from twinkle_jax.model.decoder.pages import (
    empty_pages,
    keep_rows,
    page_size,
    put_in_pages,
    release,
    release_prompts,
)
from twinkle_jax.model.decoder.sharding import ROWS, backend_of, gather_tree
from twinkle_jax.sampler.sampling import TracedSampling, next_token, scaled_logits
from twinkle_jax.sampler.sizes import Setup, Status, most_new_prompts, slots_for

RUNNING, STOP, LENGTH = 0, 1, 2  # whether and why a row has ended

_CAST = ("kernel", "bias", "embedding", "lora_A", "lora_B", "lora_scale")  # used in no other type


class Completions(NamedTuple):
    """What was drawn. Rows are ordered by prompt, then by sample.

    Attributes:
        tokens: the completions, at the front of their rows, 0 behind them.
        mask: True for the tokens of a completion, including the stop token that was drawn.
        logprobs: log-probability of each token in the whole distribution at the temperature: what
            the trainer computes for the same token, and what a ratio of policies is made of.
        sampling_logprobs: log-probability in the distribution that was sampled from, after penalty
            and filters; equal to `logprobs` without them.
        finish_reasons: 1 (`STOP`) for a stop token, 2 (`LENGTH`) at the maximum number of tokens.
        lengths: tokens in each completion.
        routing: the experts of each token but the last, from the start of the prompt on, as
            `hidden_states` takes them; None unless asked for.
    """

    tokens: Int[Array, "rows new"]
    mask: Bool[Array, "rows new"]
    logprobs: Float[Array, "rows new"]
    sampling_logprobs: Float[Array, "rows new"]
    finish_reasons: Int[Array, " rows"]
    lengths: Int[Array, " rows"]
    routing: Int[Array, "rows time layers chosen"] | None = None


class Slots(NamedTuple):
    """Rows in the middle of their completions; padding is the size of the vocabulary."""

    row: Int[Array, " slots"]  # its index in its device's part of the queue; out of range: none
    pending: Int[Array, " slots"]  # the last token of each row, which the cache does not hold yet
    cache: Cache  # all tokens before it
    prompts: Int[Array, "slots time"]
    tokens: Int[Array, "slots new"]  # the completion so far
    logprobs: Float[Array, "slots new"]  # in the whole distribution
    sampling_logprobs: Float[Array, "slots new"]  # after penalty and filters
    lengths: Int[Array, " slots"]  # tokens drawn so far
    limits: Int[Array, " slots"]  # the most tokens of each completion
    reasons: Int[Array, " slots"]  # why a row has ended; 0 while it is running
    keys: jax.Array

    @property
    def running(self) -> Bool[Array, " slots"]:
        """Slots whose row has not ended."""
        return self.reasons == RUNNING


class Queue(NamedTuple):
    """Rows to be completed, the same number for each device.

    They get slots in an order: those with the largest limit first, and samples of a prompt next to
    each other, so that it is read once; padding rows last.
    """

    prompt: Int[Array, " rows"]  # its index
    keys: jax.Array
    limits: Int[Array, " rows"]  # the most tokens of each row; 0 for padding rows
    order: Int[Array, " rows"]
    taken: Int[Array, " devices"]  # rows of each device that have been given a slot


class ReadPrompts(NamedTuple):
    """Prompts that were read last, from which later rows of their groups begin.

    The cache has of each device a ring of lines: its i-th prompt lies in line i modulo their
    number. `prompts` of each device were read.
    """

    cache: Cache
    prompts: Int[Array, " devices"]


class State(NamedTuple):
    """State between two calls of `run`: slots, queue, and the completions so far.

    `read` is None if all rows have slots, or prompts one sample each.
    """

    slots: Slots
    queue: Queue
    results: Completions
    read: ReadPrompts | None = None


def lay_out_weights(params: Params, compute_dtype: DTypeLike | None, mesh: Mesh | None) -> Params:
    """Lay parameters out for many steps: in the compute type, gathered along fsdp.

    A training step gathers each parameter when it needs it. Decoding needs all of them for every
    token, so they are gathered once.
    """

    def cast(path: Any, leaf: Array) -> Array:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        casts = compute_dtype is not None and name in _CAST
        return leaf.astype(compute_dtype) if casts else leaf

    laid_out: Params = jax.tree_util.tree_map_with_path(cast, params)
    return laid_out if mesh is None else gather_tree(laid_out, mesh)


def begin(
    weights: Params,
    prompts: Int[Array, "prompts time"],
    mask: Bool[Array, "prompts time"],
    keys: jax.Array,
    limits: Int[Array, " rows"],
    *,
    setup: Setup,
    slots: int,
    capacity: int,
    prompt_pages: int = 0,
) -> State:
    """Make the queue, and give its first rows the slots.

    `slots` are per device. With pages, here and below, capacity counts those of a device that
    belong to one row each; `prompt_pages` come on top.
    """
    rows = len(limits)
    prompt = jnp.arange(rows, dtype=jnp.int32) // setup.num_samples
    prompt = jnp.minimum(prompt, len(prompts) - 1)  # of rows that only fill up
    order = on_devices(_order, setup.mesh)(prompt, limits)
    taken = jnp.zeros(setup.shards, jnp.int32)
    queue = Queue(prompt, keys, limits, order, taken)
    free = jnp.zeros(slots * setup.shards, bool)
    new, queue, read = _next_rows(weights, prompts, mask, queue, None, free, setup, slots, capacity)
    first = new.rows
    if setup.page is not None:
        put = partial(
            _in_pages, setup=setup, slots=slots, capacity=capacity, prompt_pages=prompt_pages
        )
        first = first._replace(cache=on_devices(put, setup.mesh)(new))
    full = prompts.shape[1] - 1 + setup.new
    state = State(first, queue, no_completions(rows, full, setup), read)
    return reusable(spread(state, setup.mesh))


def no_completions(rows: int, full: int, setup: Setup) -> Completions:
    """Make completions without tokens, of rows of at most `full` tokens."""
    zeros, none = jnp.zeros((rows, setup.new), jnp.float32), jnp.zeros(rows, jnp.int32)
    tokens, mask = zeros.astype(jnp.int32), zeros.astype(bool)
    routing = None
    if setup.keep_routing and setup.config.experts is not None:
        experts = setup.config.experts
        shape = rows, full, setup.config.layers, experts.chosen
        routing = jnp.zeros(shape, experts.index_dtype)
    return Completions(tokens, mask, zeros, zeros, none, none, routing)


def undrawn(
    row: Int[Array, " slots"],
    pending: Int[Array, " slots"],
    cache: Cache,
    prompts: Int[Array, "slots time"],
    limits: Int[Array, " slots"],
    keys: jax.Array,
    running: Bool[Array, " slots"],
    *,
    setup: Setup,
) -> Slots:
    """Make slots of rows of which nothing has been drawn; those that do not run have ended."""
    zeros = jnp.zeros((len(row), setup.new), jnp.float32)
    return Slots(
        row=row,
        pending=pending,
        cache=cache,
        prompts=prompts,
        tokens=jnp.full(zeros.shape, setup.config.vocab_size, jnp.int32),
        logprobs=zeros,
        sampling_logprobs=zeros,
        lengths=jnp.zeros_like(row),
        limits=limits,
        reasons=jnp.where(running, RUNNING, LENGTH),
        keys=keys,
    )


def fill(
    weights: Params,
    state: State,
    prompts: Int[Array, "prompts time"],
    mask: Bool[Array, "prompts time"],
    *,
    setup: Setup,
    capacity: int,
) -> State:
    """Give slots whose rows have ended to waiting rows, `setup.refill` on each device.

    A slot is overwritten as a whole, so that nothing of the previous row remains.
    """
    state = collect(state, setup)
    running, size = state.slots.running, setup.refill
    new, queue, read = _next_rows(
        weights, prompts, mask, state.queue, state.read, running, setup, size, capacity
    )

    def put(slots: Slots, new: _NewRows) -> Slots:
        if setup.page is None:
            cache = put_rows(slots.cache, new.rows.cache, new.slot)
        else:
            cache = _begin_in_pages(slots.cache, new, setup.config)
        put = jax.tree.map(
            lambda x, y: x.at[new.slot].set(y.astype(x.dtype), mode="drop"),
            _without_cache(slots),
            _without_cache(new.rows),
        )
        return put._replace(cache=cache)

    slots = on_devices(put, setup.mesh)(state.slots, new)
    state = state._replace(slots=slots, queue=queue, read=read)
    return reusable(spread(state, setup.mesh))


def resize(
    state: State, *, setup: Setup, slots: int, capacity: int, prompt_pages: int = 0
) -> State:
    """Change the number of slots per device, keeping running rows, and the capacity of caches."""
    state = collect(state, setup)

    def keep(rows: Slots) -> Slots:
        chosen = jnp.argsort(~rows.running, stable=True)[:slots]
        kept = jax.tree.map(lambda x: x[chosen], _without_cache(rows))
        if setup.page is None:
            return kept._replace(cache=take_rows(rows.cache, chosen))
        window_pages = setup.pages_of_sliding(slots, capacity)
        cache = keep_rows(rows.cache, chosen, capacity, window_pages, prompt_pages)
        return kept._replace(cache=cache)

    kept = state.slots
    if setup.page is not None or slots * setup.shards < len(kept.row):
        kept = on_devices(keep, setup.mesh)(kept)
    if setup.page is None:
        kept = kept._replace(cache=with_room(kept.cache, capacity))
    return reusable(spread(state._replace(slots=kept), setup.mesh))


def run(
    weights: Params,
    state: State,
    sampling: TracedSampling,
    *,
    setup: Setup,
    capacity: int,
    full: int,
    shrink: bool = True,
) -> tuple[State, Status]:
    """Draw tokens until slots can be refilled, half of them would do, or caches are full.

    Rows have at most `full` tokens: caches of this capacity never get full. Without `shrink`, it
    goes on where half the slots would do.
    """
    weights = for_many_steps(weights, setup.mesh)
    slots = len(state.slots.row) // setup.shards
    half = slots // 2 if shrink and slots_for(0, slots) < slots else 0
    limits = state.queue.limits.reshape(setup.shards, -1)
    waiting = jnp.sum(limits > 0, axis=1, dtype=jnp.int32) - state.queue.taken

    def of_device(numbers: Array) -> Array:
        return jnp.sum(numbers.reshape(setup.shards, -1), axis=1, dtype=jnp.int32)

    def pages_needed(rows: Slots, pages: Pages, running: Array) -> Array:
        """Count the pages that rows of each device have, and those that the next steps need.

        With ended rows, one page stays free for them, see `next_places`.
        """
        size, length = page_size(rows.cache), rows.cache.length
        later = length + jnp.minimum(setup.steps, rows.limits - rows.lengths)
        more = jnp.where(rows.running, -(-later // size) + (-length // size), 0)
        ended = (running < slots).astype(jnp.int32)
        return of_device(pages.owner < slots) + of_device(more) + ended

    def status_of(rows: Slots) -> Status:
        running = of_device(rows.running)
        filled = jnp.where(rows.running, rows.cache.length, 0).reshape(setup.shards, -1)
        pages = prompt_pages = jnp.zeros_like(running)
        if rows.cache.pages is not None:
            pages = pages_needed(rows, rows.cache.pages, running)
        if rows.cache.prompt_pages is not None:
            prompt_pages = of_device(rows.cache.prompt_pages.prompt >= 0)
        can_fill = ((waiting > 0) & (slots - running >= setup.refill)).astype(jnp.int32)
        numbers = [running, waiting, can_fill, jnp.max(filled, axis=1), pages, prompt_pages]
        # In one transfer over the devices.
        most = jnp.max(jnp.stack(numbers, axis=1), axis=0)
        if setup.prompt_pages:  # all devices are filled at once
            fits = most[5] + setup.new_prompt_pages <= setup.most_prompt_pages(slots)
            most = most.at[2].multiply(fits.astype(jnp.int32))
        return Status(*most)

    def can_continue(carry: tuple[Slots, Status]) -> bool:
        status = carry[1]
        useful = (status.running > half) | (status.waiting > 0)
        if state.slots.cache.pages is None:
            fits = (capacity >= full) | (status.filled + setup.steps <= capacity)
        else:
            fits = status.pages <= capacity
        return (status.running > 0) & useful & (status.fillable == 0) & fits

    def step(_: Array | int, rows: Slots) -> Slots:
        return spread(advance(weights, rows, sampling, setup), setup.mesh)

    def steps(carry: tuple[Slots, Status]) -> tuple[Slots, Status]:
        rows = jax.lax.fori_loop(0, setup.steps, step, carry[0])
        return rows, status_of(rows)

    start = state.slots, status_of(state.slots)
    rows, status = jax.lax.while_loop(can_continue, steps, start)
    return reusable(spread(state._replace(slots=rows), setup.mesh)), status


def collect(state: State, setup: Setup) -> State:
    """Copy the completions of rows in slots to the results."""

    def put(results: Completions, rows: Slots) -> Completions:
        columns = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)[None]
        mask = columns < rows.lengths[:, None]
        drawn = Completions(
            tokens=jnp.where(mask, rows.tokens, 0),
            mask=mask,
            logprobs=rows.logprobs,
            sampling_logprobs=rows.sampling_logprobs,
            finish_reasons=rows.reasons,
            lengths=rows.lengths,
            routing=rows.cache.routing,  # as far as the cache has grown
        )

        def write(held: Array, new: Array) -> Array:
            return held.at[(rows.row, *map(slice, new.shape[1:]))].set(new, mode="drop")

        return jax.tree.map(write, results, drawn)

    return state._replace(results=on_devices(put, setup.mesh)(state.results, state.slots))


def advance(params: Params, rows: Slots, sampling: TracedSampling, setup: Setup) -> Slots:
    """Read the pending token of each running row, and sample the next one."""
    running = rows.running
    hidden, cache = decode_step(
        params,
        setup.config,
        rows.pending,
        rows.cache,
        running,
        compute_dtype=setup.compute_dtype,
        mesh=setup.mesh,
    )
    chosen = next_token(
        scaled_logits(params, setup.config, hidden, jnp.asarray(sampling.temperature)),
        sampling,
        rows.keys,
        rows.lengths,
        (rows.prompts, rows.tokens),
        setup.mesh,
    )
    column = jnp.where(running, rows.lengths, rows.tokens.shape[1])  # beyond the end: not written

    put = jax.vmap(lambda row, column, value: row.at[column].set(value, mode="drop"))
    lengths = rows.lengths + running.astype(jnp.int32)
    stops = jnp.asarray(sampling.stop_tokens)
    stopped = jnp.any(chosen.token[:, None] == stops[None], axis=1)
    reason = jnp.where(stopped, STOP, jnp.where(lengths >= rows.limits, LENGTH, RUNNING))
    reasons = jnp.where(running, reason, rows.reasons)
    if cache.pages is not None and not setup.keeps_ended:
        cache = _release_pages(cache, reasons == RUNNING, setup)
    return rows._replace(
        pending=jnp.where(running, chosen.token, rows.pending),
        cache=cache,
        tokens=put(rows.tokens, column, chosen.token),
        logprobs=put(rows.logprobs, column, chosen.logprob),
        sampling_logprobs=put(rows.sampling_logprobs, column, chosen.sampling_logprob),
        lengths=lengths,
        reasons=reasons,
    )


def _order(prompt: Int[Array, " rows"], limits: Int[Array, " rows"]) -> Int[Array, " rows"]:
    """Order a device's rows by the largest limit of their prompt, samples of a prompt together."""
    local = prompt - prompt[0]
    longest = jax.ops.segment_max(limits, local, num_segments=len(limits))
    return jnp.argsort(jnp.where(limits > 0, -longest[local], 1), stable=True).astype(jnp.int32)


class _NewRows(NamedTuple):
    """Rows that get slots, with their caches; with pages, the cache holds the prompts."""

    rows: Slots
    slot: Int[Array, " new"]  # out of range: none
    source: Int[Array, " new"]  # with pages, the row of the cache that its prompt lies in
    prompt: Int[Array, " new"]  # its index


def _next_rows(
    weights: Params,
    prompts: Int[Array, "prompts time"],
    mask: Bool[Array, "prompts time"],
    queue: Queue,
    held: ReadPrompts | None,
    running: Bool[Array, " slots"],
    setup: Setup,
    size: int,
    capacity: int,
) -> tuple[_NewRows, Queue, ReadPrompts | None]:
    """Give the next `size` rows of each device their prompts, and read those that were not.

    Returns them, the queue without them, and what was read. Surplus rows, without a free slot or a
    waiting row, are marked as ended.
    """
    vocab = setup.config.vocab_size
    rows = len(queue.limits) // setup.shards
    most = most_new_prompts(setup, rows, size)
    # When one device needs a prompt, all read ahead, so that not each reads at the others' pace.
    lines = 2 * most_new_prompts(setup, rows, setup.refill)

    def choose(queue: Queue, running: Array, *count: Array) -> tuple[Any, ...]:
        slot = jnp.nonzero(~running, size=size, fill_value=len(running))[0].astype(jnp.int32)
        rank = queue.taken[0] + jnp.arange(size, dtype=jnp.int32)
        at = jnp.minimum(rank, rows - 1)
        row = queue.order[at]
        real = (slot < len(running)) & (rank < rows) & (queue.limits[row] > 0)
        in_order = queue.prompt[queue.order]
        number = jnp.cumsum(jnp.diff(in_order, prepend=in_order[:1]) != 0, dtype=jnp.int32)
        by_number = jnp.zeros(rows, jnp.int32).at[number].set(in_order)
        first = number[at[0]]  # no row that comes needs a prompt before it
        start = count[0][0] if count else first
        new = start + jnp.arange(most, dtype=jnp.int32)
        end = jnp.minimum(start + most, first + lines)
        return (
            by_number[jnp.minimum(new, rows - 1)],
            jnp.where(new < end, new % lines, lines),
            end[None],
            jnp.any(real & (number[at] >= start))[None],
            number[at] % lines if count else number[at] - first,
            jnp.where(real, row, rows),
            jnp.where(real, slot, len(running)),
            queue.prompt[row],
            queue.keys[row],
            queue.limits[row],
            queue.taken + jnp.sum(real, dtype=jnp.int32),
        )

    counts = () if held is None else (held.prompts,)
    new, line, end, short, source, row, slot, prompt, keys, limits, taken = on_devices(
        choose, setup.mesh
    )(queue, running, *counts)

    def read() -> Cache:
        before, _ = _split_last(prompts[new], mask[new], vocab)
        _, cache = prefill(
            weights,
            setup.config,
            prompts[new],
            before,
            max_length=prompts.shape[1],
            compute_dtype=setup.compute_dtype,
            attention=setup.attention,
            mesh=setup.mesh,
            keep_routing=setup.keep_routing,
        )
        return cache

    def put(cache: Cache) -> Cache:
        return on_devices(put_rows, setup.mesh)(cache, read(), line)

    def keep(cache: Cache, source: Array) -> ReadPrompts:
        back = (source[-1] - jnp.arange(lines, dtype=jnp.int32)) % lines
        return ReadPrompts(take_rows(cache, jnp.maximum(source[-1] - back, 0)), source[-1:] + 1)

    if held is None:
        cache = read()
        if setup.num_samples > 1 and size < rows:
            held = on_devices(keep, setup.mesh)(cache, source)
    else:
        reads = jnp.any(short)
        cache = spread(jax.lax.cond(reads, put, lambda cache: cache, held.cache), setup.mesh)
        held = ReadPrompts(cache, jnp.where(reads, end, held.prompts))
    _, pending = _split_last(prompts[prompt], mask[prompt], vocab)
    if setup.page is None:
        cache = with_room(on_devices(take_rows, setup.mesh)(cache, source), capacity)
    cache = for_many_steps(cache, setup.mesh)
    tokens = jnp.where(mask[prompt], prompts[prompt], vocab)
    slots = undrawn(row, pending, cache, tokens, limits, keys, row < rows, setup=setup)
    return _NewRows(slots, slot, source, prompt), queue._replace(taken=taken), held


def _without_cache(rows: Any) -> Any:
    return rows._replace(cache=None)


def _in_pages(
    new: _NewRows, *, setup: Setup, slots: int, capacity: int, prompt_pages: int
) -> Cache:
    """Make the cache of a device in pages, and put its first rows into it."""
    assert setup.page is not None
    empty = empty_pages(
        new.rows.cache,
        setup.config,
        rows=slots,
        size=setup.page,
        pages=capacity,
        window_pages=setup.pages_of_sliding(slots, capacity),
        prompt_pages=prompt_pages,
        members=min(setup.num_samples, slots),
        max_length=new.rows.prompts.shape[1] - 1 + setup.new,
    )
    return _begin_in_pages(empty, new, setup.config)


def _begin_in_pages(cache: Cache, new: _NewRows, config: DecoderConfig) -> Cache:
    return put_in_pages(cache, new.rows.cache, new.source, new.slot, new.prompt, config)


def _release_pages(cache: Cache, running: Bool[Array, " slots"], setup: Setup) -> Cache:
    """Free pages of ended rows; of sliding layers also pages that no later token attends to."""
    assert cache.pages is not None
    free, window = on_devices(release, setup.mesh), setup.config.attention.window
    cache = cache._replace(pages=free(cache.pages, running))
    if cache.prompt_pages is not None:
        shared = on_devices(release_prompts, setup.mesh)(cache.prompt_pages, running)
        cache = cache._replace(prompt_pages=shared)
    if cache.window_pages is None or window is None:
        return cache
    free = on_devices(partial(release, size=page_size(cache)), setup.mesh)
    first = cache.length - window.size + 1  # that the next token attends to
    return cache._replace(window_pages=free(cache.window_pages, running, first))


def _split_last(
    prompts: Int[Array, "prompts time"], mask: Bool[Array, "prompts time"], vocab: int
) -> tuple[Bool[Array, "prompts time"], Int[Array, " prompts"]]:
    """Split the last token off each prompt: return the mask without it, and the token.

    An empty prompt gets a token outside the vocabulary, which makes its row NaN.
    """
    columns = jnp.arange(prompts.shape[1], dtype=jnp.int32)[None]
    last = jnp.max(jnp.where(mask, columns, -1), axis=1)
    token = jnp.take_along_axis(prompts, jnp.maximum(last, 0)[:, None], axis=1)[:, 0]
    return mask & (columns != last[:, None]), jnp.where(last >= 0, token, vocab)


def for_many_steps(stacked: CacheOrParams, mesh: Mesh | None) -> CacheOrParams:
    """Unstack the layers of a cache or of parameters, except on a TPU.

    Elsewhere XLA copies each layer out of the stack before it reads it.
    """
    return stacked if backend_of(mesh) == "tpu" else unstack_layers(stacked)


def _specs(tree: Any, mesh: Mesh) -> Any:
    """Spread rows over data and fsdp, and the heads of their caches over tensor."""

    def spec(path: Any, x: Any) -> PartitionSpec:
        names = [getattr(key, "name", None) for key in path]
        if "layers" not in names:
            return PartitionSpec(ROWS)
        heads = names[-1] != "window" and x.shape[2] % mesh.shape["tensor"] == 0
        return PartitionSpec(None, ROWS, "tensor" if heads else None)

    return jax.tree_util.tree_map_with_path(spec, tree)


def on_devices(function: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    """Run a function on each device's rows by `shard_map`, so that no row leaves its device."""
    if mesh is None:
        return function

    def on_mesh(*args: Any) -> Any:
        out = jax.eval_shape(function, *args)
        return jax.shard_map(
            function,
            mesh=mesh,
            in_specs=_specs(args, mesh),
            out_specs=_specs(out, mesh),
            check_vma=False,
        )(*args)

    return on_mesh


def spread(tree: Any, mesh: Mesh | None) -> Any:
    """Keep rows on their devices."""
    if mesh is None:
        return tree
    where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), _specs(tree, mesh))
    return jax.lax.with_sharding_constraint(tree, where)


def reusable(state: State) -> State:
    """Clone keys for JAX's check of key reuse: each is used again on purpose, by position."""
    keys = jax.random.clone(state.queue.keys), jax.random.clone(state.slots.keys)
    queue, slots = state.queue._replace(keys=keys[0]), state.slots._replace(keys=keys[1])
    return state._replace(queue=queue, slots=slots)
