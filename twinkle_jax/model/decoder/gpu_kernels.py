"""Kernels for NVIDIA GPUs: attention of decoding to keys and values that lie in pages.

XLA computes it in several kernels, between which logits and weights of all heads lie in memory, and
reads free pages too. Here one kernel reads each page once and leaves a sum over its tokens for each
head; a second one adds up the pages of each row, in the order of their tokens.

Importing Pallas takes a quarter of a second, so this file is imported where a kernel is traced.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

_QUERIES = 16  # the fewest rows of a product that Triton takes
_PAGES = 16  # of a row, that the second kernel adds up at once


class RowPages(NamedTuple):
    """The pages of each row, in the order of their tokens.

    Attributes:
        page: pages, those of each row one after the other.
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
    scale: float,
    interpret: bool,
) -> Float[Array, "rows groups queries width"]:
    r"""Attend to the tokens of each row from position `first` to `last`.

    Over the pages $p$ of a row, with logits $z$ and $m_p = \max_t z_{pt}$:

    $$o = \frac{\sum_p e^{z_p - m} \sum_t e^{z_{pt} - m_p} v_{pt}}{\sum_p e^{m_p - m} \sum_t
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
        scale: factor on the products of queries and keys.
        interpret: whether to interpret the kernels, as other backends must.

    Returns:
        The output of each query, float32; 0 for a row without pages.
    """
    rows, groups, queries, width = query.shape
    pages, size = values.shape[1], values.shape[3]
    heads = groups * queries
    moment = jax.ShapeDtypeStruct((pages, heads + 1), jnp.float32)
    call = partial(pl.pallas_call, interpret=interpret)
    largest, summed, attended = call(
        partial(_page_kernel, scale=scale),
        out_shape=(moment, moment, moment.update(shape=(pages, heads + 1, width))),
        grid=(pages, groups),
        name="attend_to_page",
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        cost_estimate=pl.CostEstimate(
            flops=4 * pages * heads * size * width,
            transcendentals=pages * heads * size,
            bytes_accessed=2 * pages * groups * size * width * keys.dtype.itemsize,
        ),
    )(repeat[None], owner, start, first, last, query, keys, values)
    sorted_pages = pages_of_rows(owner, start, size, rows)
    output = call(
        _row_kernel,
        out_shape=jax.ShapeDtypeStruct((rows, heads, width), jnp.float32),
        grid=(rows, heads),
        name="add_up_pages",
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
    )(*sorted_pages, largest, summed, attended)
    return output.reshape(rows, groups, queries, width)


def _page_kernel(
    repeat: Any,
    owner: Any,
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
) -> None:
    """Attend to one page and group; write nothing for a free page."""
    page, group = pl.program_id(0), pl.program_id(1)
    rows, _, queries, _ = query.shape
    row = owner[page]

    @pl.when(row < rows)
    def attend() -> None:
        layer = repeat[0]
        # Products have more rows than there are queries: repeat the last one, and write it aside.
        padded = -(-queries // _QUERIES) * _QUERIES
        each = jax.lax.broadcasted_iota(jnp.int32, (padded,), 0)
        asked = query[row, group, jnp.minimum(each, queries - 1)]
        at = jnp.where(each < queries, group * queries + each, largest.shape[1] - 1)
        key = keys[layer, page, group].astype(asked.dtype)
        logits = plgpu.dot(asked, key, **_exact(asked))
        position = start[page] + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        seen = (position >= first[row]) & (position <= last[row])
        logits = jnp.where(seen, logits * scale, -jnp.inf)
        most = jnp.max(logits, axis=1)
        weights = jnp.exp(logits - jnp.where(most == -jnp.inf, 0.0, most)[:, None])
        value = values[layer, page, group].astype(asked.dtype)
        largest[page, at] = most
        summed[page, at] = jnp.sum(weights, axis=1)
        attended[page, at] = plgpu.dot(weights.astype(asked.dtype), value, **_exact(asked))


def _exact(query: Array) -> dict[str, Any]:
    """Options of a product: float32 is not cut to TensorFloat-32."""
    return {"allow_tf32": False} if query.dtype == jnp.float32 else {}


def _row_kernel(
    page: Any, begin: Any, number: Any, largest: Any, summed: Any, attended: Any, output: Any
) -> None:
    """Add up the pages of one row for one head, some at a time."""
    row, head = pl.program_id(0), pl.program_id(1)
    width, count = output.shape[2], number[row]

    def add(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        most, total, out = carry
        at = step * _PAGES + jax.lax.broadcasted_iota(jnp.int32, (_PAGES,), 0)
        held = at < count
        which = page[begin[row] + jnp.minimum(at, count - 1)]
        page_most = jnp.where(held, largest[which, head], -jnp.inf)
        page_sum, page_out = summed[which, head], attended[which, head]
        new = jnp.maximum(most, jnp.max(page_most))
        base = jnp.where(new == -jnp.inf, 0.0, new)
        before, share = jnp.exp(most - base), jnp.exp(page_most - base)
        total = before * total + jnp.sum(share * page_sum)
        return new, total, before * out + jnp.sum(share[:, None] * page_out, axis=0)

    steps = jax.lax.div(count + _PAGES - 1, _PAGES)
    zero = jnp.zeros((), jnp.float32)
    _, total, out = jax.lax.fori_loop(
        0, steps, add, (zero - jnp.inf, zero, jnp.zeros(width, jnp.float32))
    )
    output[row, head] = out / jnp.where(total == 0, 1.0, total)
