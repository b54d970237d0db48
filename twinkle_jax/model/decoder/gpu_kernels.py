"""Kernels for NVIDIA GPUs: attention of decoding to keys and values that lie in pages.

XLA computes it in several kernels, between which logits and weights of all heads lie in memory, and
reads free pages too. Here one kernel reads each page once and leaves a sum over its tokens for each
head of each row that reads it; a second one adds up the pages of each row, in the order of their
tokens.

Importing Pallas takes a quarter of a second, so this file is imported where a kernel is traced.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from twinkle_jax.loss.token_logprobs import soft_capped
from twinkle_jax.model.decoder.cache import PromptPages

_QUERIES = 16  # the fewest rows of a product that Triton takes
_MOST_QUERIES = 64  # of a block of a group's rows
_PAGES = 16  # of a row, that the second kernel adds up at once


class RowPages(NamedTuple):
    """The pages of each row, in the order of their tokens.

    Attributes:
        page: indices of pages, those of each row one after the other.
        begin: where those of a row begin.
        number: how many it has.
    """

    page: Int[Array, " pages"]
    begin: Int[Array, " rows"]
    number: Int[Array, " rows"]


def pages_of_rows(
    owner: Int[Array, " pages"], start: Int[Array, " pages"], size: int, rows: int
) -> RowPages:
    """Sort pages by row and start. The pages of a row hold consecutive tokens, `size` each."""
    place = start // size
    number = jnp.zeros(rows, jnp.int32).at[owner].add(1, mode="drop")
    first = jnp.full(rows, jnp.iinfo(jnp.int32).max).at[owner].min(place, mode="drop")
    begin = jnp.cumsum(number, dtype=jnp.int32) - number
    rank = begin.at[owner].get(mode="fill", fill_value=len(owner))
    rank += place - first.at[owner].get(mode="fill", fill_value=0)
    index = jnp.arange(len(owner), dtype=jnp.int32)
    page = jnp.zeros(len(owner), jnp.int32).at[rank].set(index, mode="drop")
    return RowPages(page, begin, number)


def attend_to_pages(
    query: Float[Array, "rows groups queries width"],
    keys: Float[Array, "layers pages groups width size"],
    values: Float[Array, "layers pages groups size width"],
    repeat: Int[Array, ""],
    owner: Int[Array, " pages"],
    start: Int[Array, " pages"],
    first: Int[Array, " rows"],
    last: Int[Array, " rows"],
    *,
    prompts: PromptPages | None = None,
    sinks: Float[Array, "groups queries"] | None = None,
    scale: float,
    soft_cap: float | None = None,
    interpret: bool,
) -> Float[Array, "rows groups queries width"]:
    r"""Attend to the tokens of each row from position `first` to `last`.

    Over the pages $p$ of a row, with logits $z$ and $m_p = \max_t z_{pt}$:

    $$o = \frac{\sum_p e^{m_p - m} \sum_t e^{z_{pt} - m_p} v_{pt}}{\sum_p e^{m_p - m} \sum_t
    e^{z_{pt} - m_p}},\quad m = \max_p m_p$$

    The weights $e^{z - m_p}$ are rounded to the type of the query before the product with values,
    as cuDNN's attention does; sums are float32.

    Args:
        query: of the newest token of each row.
        keys: of all layers, in pages.
        values: likewise.
        repeat: the layer.
        owner: the row of each page; out of range for a free page.
        start: position of the first token of each page.
        first: position of the first token that each row attends to.
        last: of the last one.
        prompts: pages that several rows read, which lie before those of `owner`.
        sinks: one more logit of each head in $m$ and in the denominator; None for none.
        scale: factor on the products of queries and keys.
        soft_cap: bound of the logits; None for none.
        interpret: whether to interpret the kernels, as other backends must.

    Returns:
        The output of each query, float32; 0 for a row without pages.
    """
    rows, groups, queries, width = query.shape
    size, heads = values.shape[3], groups * queries
    before = 0 if prompts is None else len(prompts.start)
    parts = [(before, owner[:, None], start)]
    if prompts is not None:
        parts.insert(0, (0, prompts.members, prompts.start))
    sums: list[Array] = []
    for offset, members, begin in parts:
        pages, most = members.shape
        block = max(1, min(most, _MOST_QUERIES // queries))
        moment = jax.ShapeDtypeStruct((pages, most * heads + 1), jnp.float32)
        of_pages = pl.pallas_call(
            partial(_page_kernel, scale=scale, soft_cap=soft_cap, offset=offset, block=block),
            out_shape=(moment, moment, moment.update(shape=(*moment.shape, width))),
            grid=(pages, groups, -(-most // block)),
            name="attend_to_page",
            compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
            cost_estimate=pl.CostEstimate(
                flops=4 * pages * most * heads * size * width,
                transcendentals=pages * most * heads * size,
                bytes_accessed=2 * pages * groups * size * width * keys.dtype.itemsize,
            ),
            interpret=interpret,
        )(repeat[None], members, begin, first, last, query, keys, values)
        listed = pages_of_rows(members.reshape(-1), jnp.repeat(begin, most), size, rows)
        sums += [*listed, *of_pages]
    if sinks is not None:
        sums.append(sinks.astype(jnp.float32).reshape(heads))
    output = pl.pallas_call(
        partial(_row_kernel, has_sinks=sinks is not None),
        out_shape=jax.ShapeDtypeStruct((rows, heads, width), jnp.float32),
        grid=(rows, heads),
        name="add_up_pages",
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
    )(*sums)
    return output.reshape(rows, groups, queries, width)


def _page_kernel(
    repeat: Any,
    members: Any,
    start: Any,
    first: Any,
    last: Any,
    query: Any,
    keys: Any,
    values: Any,
    largest: Any,
    summed: Any,
    attended: Any,
    *,
    scale: float,
    soft_cap: float | None,
    offset: int,
    block: int,
) -> None:
    """Attend to one page and group for some of its rows; write nothing if they are none."""
    page, group = pl.program_id(0), pl.program_id(1)
    (rows, groups, queries, _), most = query.shape, members.shape[1]
    # Products have more rows than there are queries, a power of two: others are written aside.
    padded = max(_QUERIES, pl.next_power_of_2(block * queries))
    each = jax.lax.broadcasted_iota(jnp.int32, (padded,), 0)
    member = pl.program_id(2) * block + jax.lax.div(each, queries)
    number = jax.lax.rem(each, queries)
    row = members[page, jnp.minimum(member, most - 1)]
    is_asked = (each < block * queries) & (member < most) & (row < rows)

    @pl.when(jnp.max(is_asked.astype(jnp.int32)) > 0)
    def attend() -> None:
        layer, asking = repeat[0], jnp.where(is_asked, row, 0)
        asked = query[asking, group, number]
        at = jnp.where(is_asked, (member * groups + group) * queries + number, largest.shape[1] - 1)
        key = keys[layer, offset + page, group].astype(asked.dtype)
        logits = plgpu.dot(asked, key, **_exact(asked))
        position = start[page] + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        seen = (position >= first[asking][:, None]) & (position <= last[asking][:, None])
        logits = jnp.where(seen, soft_capped(logits * scale, soft_cap), -jnp.inf)
        most = jnp.max(logits, axis=1)
        weights = jnp.exp(logits - jnp.where(most == -jnp.inf, 0.0, most)[:, None])
        value = values[layer, offset + page, group].astype(asked.dtype)
        largest[page, at] = most
        summed[page, at] = jnp.sum(weights, axis=1)
        attended[page, at] = plgpu.dot(weights.astype(asked.dtype), value, **_exact(asked))


def _exact(query: Array) -> dict[str, Any]:
    """Options of a product: float32 is not cut to TensorFloat-32."""
    return {"allow_tf32": False} if query.dtype == jnp.float32 else {}


def _row_kernel(*arrays: Any, has_sinks: bool) -> None:
    """Add up the pages of one row for one head, some at a time, part by part."""
    *inputs, output = arrays
    sinks = inputs.pop() if has_sinks else None
    row, head = pl.program_id(0), pl.program_id(1)
    _, heads, width = output.shape

    def add(
        step: Array, carry: tuple[Array, Array, Array], part: list[Any]
    ) -> tuple[Array, Array, Array]:
        (most, total, out), (page, begin, number, largest, summed, attended) = carry, part
        at = step * _PAGES + jax.lax.broadcasted_iota(jnp.int32, (_PAGES,), 0)
        count, members = number[row], page.shape[0] // largest.shape[0]
        held = at < count
        entry = page[begin[row] + jnp.minimum(at, count - 1)]
        which = jax.lax.div(entry, members), jax.lax.rem(entry, members) * heads + head
        page_most = jnp.where(held, largest[which], -jnp.inf)
        page_sum, page_out = summed[which], attended[which]
        new = jnp.maximum(most, jnp.max(page_most))
        base = jnp.where(new == -jnp.inf, 0.0, new)
        before, share = jnp.exp(most - base), jnp.exp(page_most - base)
        total = before * total + jnp.sum(share * page_sum)
        return new, total, before * out + jnp.sum(share[:, None] * page_out, axis=0)

    zero = jnp.zeros((), jnp.float32)
    first = (zero - jnp.inf, zero) if sinks is None else (sinks[head], zero + 1)
    sums = *first, jnp.zeros(width, jnp.float32)
    for i in range(0, len(inputs), 6):
        part = inputs[i : i + 6]
        steps = jax.lax.div(part[2][row] + _PAGES - 1, _PAGES)
        sums = jax.lax.fori_loop(0, steps, partial(add, part=part), sums)
    _, total, out = sums
    output[row, head] = out / jnp.where(total == 0, 1.0, total)
