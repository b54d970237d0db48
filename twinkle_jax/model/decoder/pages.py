"""Pages of a cache: each holds consecutive tokens of one row, or of the prompt of a group.

These functions run on one device, with its own rows and pages.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.model.decoder.cache import (
    Cache,
    KeyValues,
    LayerState,
    Pages,
    PromptPages,
    WindowedKeyValues,
    map_states,
    put_routing,
    take_routing,
    with_room,
)
from twinkle_jax.model.decoder.config import DecoderConfig


def page_size(cache: Cache) -> int:
    """Count the tokens of a page."""
    layers = cache.layers[0] if isinstance(cache.layers, tuple) else cache.layers
    states = jax.tree.leaves(layers, is_leaf=lambda x: isinstance(x, KeyValues))
    return next(x.keys.shape[-1] for x in states if isinstance(x, KeyValues))


def pages_of_window(window: int, size: int) -> int:
    """Count the pages that `window` consecutive tokens lie in, at most."""
    return -(-(window - 1) // size) + 1


def _sliding_layers(config: DecoderConfig, cache: Cache) -> Any:
    """Say of each member which of its layers slide, in a tree of the members of `cache.layers`."""
    sliding = {
        name: column
        for stack in config.stacks
        if not stack.reuses
        for (name, _), column in zip(stack.members, stack.arranged(config.sliding).T, strict=True)
    }
    if isinstance(cache.layers, tuple):
        return tuple(
            {name: sliding[name][repeat : repeat + 1] for name in layers}
            for repeat, layers in enumerate(cache.layers)
        )
    return sliding


def empty_pages(
    prompts: Cache,
    config: DecoderConfig,
    *,
    rows: int,
    size: int,
    pages: int,
    window_pages: int | None = None,
    prompt_pages: int = 0,
    members: int = 1,
    max_length: int,
) -> Cache:
    """Make a cache of free pages.

    Args:
        prompts: a cache of whole rows, whose types and layers it gets.
        config: of the decoder.
        rows: their number.
        size: tokens of a page.
        pages: that belong to one row each.
        window_pages: pages of sliding layers; None: the same as of the others.
        prompt_pages: pages that the rows of a group share; 0: they share none.
        members: rows of a group, at most.
        max_length: the most tokens of a row, for whose experts there is room if they are kept.
    """

    def lines(state: KeyValues, layers: int, pages: int) -> KeyValues:
        line = (layers, pages, state.keys.shape[2])
        return KeyValues(
            jnp.zeros((*line, state.keys.shape[3], size), state.keys.dtype),
            jnp.zeros((*line, size, state.values.shape[4]), state.values.dtype),
        )

    def empty(state: LayerState, slides: np.ndarray) -> LayerState:
        if not isinstance(state, KeyValues):
            return jax.tree.map(lambda x: jnp.zeros((len(x), rows, *x.shape[2:]), x.dtype), state)
        if window_pages is None:
            return lines(state, len(slides), prompt_pages + pages)
        sliding = int(slides.sum())
        full = len(slides) - sliding
        return WindowedKeyValues(
            lines(state, full, prompt_pages + pages) if full else None,
            lines(state, sliding, window_pages) if sliding else None,
        )

    def free(pages: int) -> Pages:
        owner = jnp.full(pages, rows, jnp.int32)
        return Pages(owner, jnp.zeros_like(owner))

    none = jnp.full(prompt_pages, -1, jnp.int32)
    shared = PromptPages(
        none,
        jnp.zeros_like(none),
        jnp.full((prompt_pages, members), rows, jnp.int32),
        jnp.full(rows, -1, jnp.int32),
    )
    routing = prompts.routing
    if routing is not None:
        routing = jnp.zeros((rows, max_length, *routing.shape[2:]), routing.dtype)
    return Cache(
        map_states(empty, prompts.layers, _sliding_layers(config, prompts)),
        jnp.zeros(rows, jnp.int32),
        free(pages),
        None if window_pages is None else free(window_pages),
        shared if prompt_pages else None,
        routing,
    )


def put_in_pages(
    cache: Cache,
    prompts: Cache,
    source: Int[Array, " new"],
    slots: Int[Array, " new"],
    number: Int[Array, " new"],
    config: DecoderConfig,
) -> Cache:
    """Begin rows with prompts, in free pages.

    With `prompt_pages`, rows of one prompt share its full pages, and each gets a page for the rest.

    Args:
        cache: the rows in `slots` own no pages.
        prompts: in whole rows.
        source: the prompt that each row begins with.
        slots: the row that each becomes; out of range: it is not written.
        number: of each row's prompt; rows with the same number have the same prompt.
        config: of the decoder.
    """
    assert cache.pages is not None
    rows, size = len(cache.length), page_size(cache)
    count = -(-page_size(prompts) // size)  # the most pages that a prompt needs
    place = jnp.arange(count, dtype=jnp.int32)[None]
    lengths, shared = prompts.length[source], cache.prompt_pages
    before = 0 if shared is None else len(shared.prompt)
    # Without shared pages all of a prompt's, else the one that it does not fill.
    own = place if shared is None else (lengths // size)[:, None]
    is_written = (slots < rows)[:, None]

    def take(pages: Pages, place: Array, wanted: Array) -> tuple[Pages, tuple[Array, Array]]:
        """Give pages to rows, as wanted; return also where, and of which page they are copies."""
        line = _take_free(pages.owner, rows, wanted.reshape(-1))
        place = jnp.broadcast_to(place, wanted.shape)
        owner = pages.owner.at[line].set(jnp.repeat(slots, place.shape[1]), mode="drop")
        start = pages.start.at[line].set(place.reshape(-1) * size, mode="drop")
        return Pages(owner, start), (line, (source[:, None] * count + place).reshape(-1))

    pages, (line, page) = take(cache.pages, own, is_written & (own * size < lengths[:, None]))
    copies = [(before + line, page)]
    if shared is not None:
        number_of = jnp.full(len(prompts.length), -1, jnp.int32)  # -1: no row begins with it
        begun = jnp.where(is_written[:, 0], source, len(number_of))
        number_of = number_of.at[begun].max(number, mode="drop")
        shared = shared._replace(of_row=shared.of_row.at[slots].set(number, mode="drop"))
        shared, line = _take_prompt_pages(shared, number_of, prompts.length, count, size)
        line = jnp.where(line < before, line, before + len(pages.owner))
        copies.append((line, jnp.arange(len(line), dtype=jnp.int32)))
    window_pages, window_copies = cache.window_pages, copies
    if window_pages is not None and config.attention.window is not None:
        first = lengths - config.attention.window.size + 1  # that the next token attends to
        wanted = is_written & (place * size < lengths[:, None])
        wanted &= (place + 1) * size > first[:, None]
        window_pages, copied = take(window_pages, place, wanted)
        window_copies = [copied]

    def put(held: LayerState, new: Any, slides: np.ndarray) -> Any:
        if isinstance(held, KeyValues):
            return _copy_pages(held, new, copies)
        if isinstance(held, WindowedKeyValues):
            full, sliding = (jax.tree.map(lambda x, at=at: x[at], new) for at in (~slides, slides))
            return WindowedKeyValues(
                _copy_pages(held.full, full, copies),
                _copy_pages(held.sliding, sliding, window_copies),
            )
        return jax.tree.map(
            lambda x, y: x.at[:, slots].set(y[:, source].astype(x.dtype), mode="drop"), held, new
        )

    routing = put_routing(cache, take_routing(prompts, source), slots)
    prompts = with_room(prompts, count * size)
    layers = map_states(put, cache.layers, prompts.layers, _sliding_layers(config, cache))
    length = cache.length.at[slots].set(lengths, mode="drop")
    return Cache(layers, length, pages, window_pages, shared, routing)


def _take_prompt_pages(
    pages: PromptPages,
    number: Int[Array, " prompts"],
    length: Int[Array, " prompts"],
    count: int,
    size: int,
) -> tuple[PromptPages, Int[Array, " wanted"]]:
    """Give free pages to the prompts that have none yet, `count` each at most.

    Returns:
        The pages, and the one that each page of the prompts gets; out of range: none. Rows of a
        prompt that needs more than are free are marked.
    """
    # A prompt without a row has the number of free pages: while there are any, it gets none.
    has_pages = jnp.any(number[:, None] == pages.prompt[None], axis=1)
    begin = jnp.arange(count, dtype=jnp.int32) * size
    wanted = ~has_pages[:, None] & (begin[None] + size <= length[:, None])
    line = _take_free(pages.prompt, -1, wanted.reshape(-1))
    prompt = pages.prompt.at[line].set(jnp.repeat(number, count), mode="drop")
    start = pages.start.at[line].set(jnp.tile(begin, len(number)), mode="drop")
    is_short = jnp.any(wanted & (line.reshape(wanted.shape) == len(pages.prompt)), axis=1)
    short = jnp.where(is_short, number, -3)[None]  # no row has this number
    of_row = jnp.where(jnp.any(pages.of_row[:, None] == short, axis=1), -2, pages.of_row)
    taken = pages._replace(prompt=prompt, start=start, of_row=of_row)
    return _with_members(taken, pages.members.shape[1]), line


def _copy_pages(
    held: KeyValues | None, rows: KeyValues, copies: list[tuple[Array, Array]]
) -> KeyValues | None:
    """Write pages of whole rows over pages: of each, where to, and which it is, row by row."""
    if held is None:
        return None
    size = held.values.shape[3]

    def write(stack: Array, rows: Array, axis: int) -> Array:
        layers, _, *extents = rows.shape
        extents[axis - 2 : axis - 1] = [-1, size]
        rows = jnp.moveaxis(rows.reshape(*rows.shape[:2], *extents), axis, 2)
        pages = rows.reshape(layers, -1, *rows.shape[3:])
        for line, page in copies:
            copied = jnp.take(pages, page, axis=1, mode="clip").astype(stack.dtype)
            stack = stack.at[:, line].set(copied, mode="drop")
        return stack

    keys, values = finite_values(rows.keys, rows.values)
    return KeyValues(write(held.keys, keys, 4), write(held.values, values, 3))


def _with_members(pages: PromptPages, members: int) -> PromptPages:
    """Find the rows of each page's prompt, so many at most."""
    order = jnp.argsort(pages.of_row, stable=True).astype(jnp.int32)
    in_order = pages.of_row[order]
    at = jnp.searchsorted(in_order, pages.prompt).astype(jnp.int32)[:, None]
    at += jnp.arange(members, dtype=jnp.int32)[None]
    is_member = in_order.at[at].get(mode="fill", fill_value=-1) == pages.prompt[:, None]
    is_member &= pages.prompt[:, None] >= 0
    rows = order.at[at].get(mode="fill", fill_value=0)
    return pages._replace(members=jnp.where(is_member, rows, len(order)))


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


def keep_rows(
    cache: Cache,
    rows: Int[Array, " rows"],
    pages: int,
    window_pages: int | None = None,
    prompt_pages: int = 0,
) -> Cache:
    """Keep the chosen rows, each once, and their pages, in a cache of so many pages."""
    index = jnp.arange(len(rows), dtype=jnp.int32)
    slot = jnp.full(len(cache.length), len(rows), jnp.int32).at[rows].set(index)

    def used_first(is_free: Array, pages: int) -> Array:
        """Order pages, those in use first; more than there are begin as copies of the first."""
        order = jnp.argsort(is_free, stable=True).astype(jnp.int32)[:pages]
        return jnp.pad(order, (0, pages - len(order)))

    def keep_pages(held: Pages, pages: int) -> tuple[Pages, Array]:
        owner = slot.at[held.owner].get(mode="fill", fill_value=len(rows))
        order = used_first(owner == len(rows), pages)
        is_new = jnp.arange(pages, dtype=jnp.int32) >= len(held.owner)
        return Pages(jnp.where(is_new, len(rows), owner[order]), held.start[order]), order

    assert cache.pages is not None
    kept, order = keep_pages(cache.pages, pages)
    shared, window_kept, window_order = cache.prompt_pages, None, order
    if cache.window_pages is not None and window_pages is not None:
        window_kept, window_order = keep_pages(cache.window_pages, window_pages)
    if shared is not None:
        shared_order = used_first(shared.prompt < 0, prompt_pages)
        is_new = jnp.arange(prompt_pages, dtype=jnp.int32) >= len(shared.prompt)
        order = jnp.concatenate([shared_order, len(shared.prompt) + order])
        shared = _with_members(
            shared._replace(
                prompt=jnp.where(is_new, -1, shared.prompt[shared_order]),
                start=shared.start[shared_order],
                of_row=shared.of_row[rows],
            ),
            min(shared.members.shape[1], len(rows)),
        )

    def take(state: Any, order: Array) -> Any:
        return jax.tree.map(lambda x: jnp.take(x, order, axis=1, mode="clip"), state)

    def keep(state: LayerState) -> Any:
        if isinstance(state, KeyValues):
            return take(state, order)
        if isinstance(state, WindowedKeyValues):
            return WindowedKeyValues(take(state.full, order), take(state.sliding, window_order))
        return take(state, rows)

    return Cache(
        map_states(keep, cache.layers),
        cache.length[rows],
        kept,
        window_kept,
        shared,
        take_routing(cache, rows),
    )


def whole_rows(cache: Cache, rows: Int[Array, " some"], max_length: int) -> Cache:
    """Copy rows out of their pages, with room for `max_length` tokens; out of range: an empty row.

    Sliding layers must not have pages of their own.
    """
    assert cache.pages is not None
    assert cache.window_pages is None
    (owner, start), size = cache.pages, page_size(cache)
    count = -(-max_length // size)
    pages = jnp.full((len(cache.length), count), len(owner), jnp.int32)
    index = jnp.arange(len(owner), dtype=jnp.int32)
    pages = pages.at[owner, start // size].set(index, mode="drop")
    pages = pages.at[rows].get(mode="fill", fill_value=len(owner))

    def join(stack: Array, axis: int) -> Array:
        taken = jnp.take(stack, pages, axis=1, mode="fill", fill_value=0)
        taken = jnp.moveaxis(taken, 2, axis)  # pages in front of the tokens in them
        shape = (*taken.shape[:axis], count * size, *taken.shape[axis + 2 :])
        return jax.lax.slice_in_dim(taken.reshape(shape), 0, max_length, axis=axis)

    def state(state: LayerState) -> LayerState:
        if isinstance(state, KeyValues):
            return KeyValues(join(state.keys, 4), join(state.values, 3))
        return jax.tree.map(lambda x: jnp.take(x, rows, axis=1, mode="fill", fill_value=0), state)

    length = cache.length.at[rows].get(mode="fill", fill_value=0)
    whole = Cache(map_states(state, cache.layers), length, routing=take_routing(cache, rows))
    return with_room(whole, max_length)


def replace_rows(cache: Cache, new: Cache, rows: Int[Array, " new"]) -> Cache:
    """Replace rows by those of another cache in pages; out of range: the row is left out.

    There must be enough free pages. Sliding layers must not have pages of their own.
    """
    assert cache.pages is not None
    assert new.pages is not None
    count = len(cache.length)
    pages = release(cache.pages, jnp.ones(count, bool).at[rows].set(False, mode="drop"))
    owner = rows.at[new.pages.owner].get(mode="fill", fill_value=count)
    line = _take_free(pages.owner, count, owner < count)

    def put(held: LayerState, new: Any) -> Any:
        index = line if isinstance(held, KeyValues) else rows
        return jax.tree.map(lambda x, y: x.at[:, index].set(y, mode="drop"), held, new)

    return cache._replace(
        layers=map_states(put, cache.layers, new.layers),
        length=cache.length.at[rows].set(new.length, mode="drop"),
        pages=Pages(
            pages.owner.at[line].set(owner, mode="drop"),
            pages.start.at[line].set(new.pages.start, mode="drop"),
        ),
        routing=put_routing(cache, new.routing, rows),
    )


def release(
    pages: Pages,
    active: Bool[Array, " batch"],
    first: Int[Array, " batch"] | None = None,
    *,
    size: int = 0,
) -> Pages:
    """Free the pages of inactive rows, and pages of `size` tokens before a row's `first` one."""
    is_used = active.at[pages.owner].get(mode="fill", fill_value=False)
    if first is not None:
        is_used &= pages.start + size > first.at[pages.owner].get(mode="fill", fill_value=0)
    return pages._replace(owner=jnp.where(is_used, pages.owner, len(active)))


def release_prompts(pages: PromptPages, active: Bool[Array, " batch"]) -> PromptPages:
    """Free the pages of prompts whose rows are all inactive."""
    is_read = active.at[pages.members].get(mode="fill", fill_value=False)
    return PromptPages(
        jnp.where(jnp.any(is_read, axis=1), pages.prompt, -1),
        pages.start,
        jnp.where(is_read, pages.members, len(active)),
        jnp.where(active, pages.of_row, -1),
    )


class Places(NamedTuple):
    """Where the next token of each row is written: a page, and a slot in it.

    The slot of an inactive row is out of range, and so is the page of a row that got none.
    """

    page: Int[Array, " batch"]
    slot: Int[Array, " batch"]


class PageTable(NamedTuple):
    """Pages, those of the next tokens included, where these are written, and pages of prompts."""

    pages: Pages
    places: Places
    prompts: PromptPages | None = None

    @property
    def before(self) -> int:
        """Pages of prompts, which lie before the others."""
        return 0 if self.prompts is None else len(self.prompts.prompt)


def next_places(
    pages: Pages, length: Int[Array, " batch"], active: Bool[Array, " batch"], size: int
) -> PageTable:
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
    places = Places(jnp.where(active, page, spare), slot)
    return PageTable(Pages(owner, start), places)


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
