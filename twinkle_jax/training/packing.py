"""Pack rows of different lengths into few lines of one width, so that there is little padding.

The decoder runs over lines, each of which holds several rows one after the other. Its results are
unpacked into rows before the loss, so losses, reductions and metrics do not depend on packing.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from twinkle_jax.data import IGNORE, Batch, bucket_size
from twinkle_jax.data.batch import batch_width

SMALLEST_WIDTH = 64  # tokens: a line holds several rows even if all are short

IntRows = np.ndarray[Any, np.dtype[np.int32]]
"""Host integers, one a row: lengths, or indices."""


class Packing(NamedTuple):
    """The position of each token of a batch in the lines, and back.

    Attributes:
        sources: for each place of a line, the flat index of its token in the batch; -1 if empty.
        segment_ids: for each place, the number of its row in the line, from 1; None if lines hold
            one row at most.
        positions: for each place, the position of its token in the row.
        places: for each token of the batch, the flat index of its place; -1 for padding.
    """

    sources: Int[Array | np.ndarray, "lines width"]
    segment_ids: Int[Array | np.ndarray, "lines width"] | None
    positions: Int[Array | np.ndarray, "lines width"]
    places: Int[Array | np.ndarray, "rows time"]


def assign_lines(lengths: IntRows, width: int, *, several: bool = True) -> list[list[int]]:
    """Deal rows to lines of a width: the longest first, each to the first line with room for it.

    No row is longer than `width`. Returns the rows of each line, those with the longest rows first.
    """
    order = np.argsort(-lengths, kind="stable")
    if not several:
        return [[int(row)] for row in order]
    lines: list[list[int]] = []
    room = np.zeros(len(lengths), np.int64)  # of each line
    for length, group in itertools.groupby(order.tolist(), lambda row: int(lengths[row])):
        rows, at = list(group), 0
        open_lines = np.flatnonzero(room[: len(lines)] >= length).tolist()
        for line in itertools.chain(open_lines, itertools.count(len(lines))):
            if at == len(rows):
                break
            if line == len(lines):
                lines.append([])
                room[line] = width
            most = int(room[line]) // length if length else len(rows)
            taken = rows[at : at + most]
            lines[line] += taken
            room[line] -= length * len(taken)
            at += len(taken)
    return lines


def plan(
    lengths: IntRows,
    time: int,
    *,
    tokens: int,
    shards: int = 1,
    several: bool = True,
    multiple: int = 1,
    together: int = 1,
) -> Iterator[tuple[np.ndarray[Any, np.dtype[np.bool_]], Packing]]:
    """Pack the rows of a batch into micro-batches of a token budget.

    Args:
        lengths: tokens of each row.
        time: columns of the batch.
        tokens: places of a micro-batch on each device; a longer line is a micro-batch by itself.
        shards: devices that lines are spread over: their number is a multiple of it.
        several: whether a line may hold several rows.
        multiple: what the width of lines must be a multiple of.
        together: rows of a group, next to each other, that share a micro-batch: 2 for pairs. They
            share a line if it may hold several.

    Yields:
        For each micro-batch, a mask of its rows, and their packing. Shapes depend on the arguments
        alone, and are few: each is compiled.
    """
    groups = lengths.reshape(-1, together)
    sizes, lines_each = (groups.sum(axis=1), 1) if several else (groups.max(axis=1), together)
    width, lines = _choose_lines(sizes, tokens, several, multiple)  # lines of groups

    def micro_batch_groups(count: int) -> int:
        return _micro_batch_lines(count, max(tokens // (width * lines_each), 1), shards, several)

    count = micro_batch_groups(len(lines))
    start = 0
    while start < len(lines):
        if not several:  # each micro-batch is as wide as its longest row, which comes first
            width = batch_width(int(sizes[lines[start][0]]), multiple=multiple)
            count = micro_batch_groups(len(lines) - start)
        part = [
            [group * together + i for group in line for i in range(together)]
            for line in lines[start : start + count]
        ]
        start += len(part)
        if not several:
            part = [[row] for line in part for row in line]
        members = np.zeros(len(lengths), bool)
        members[[row for line in part for row in line]] = True
        yield members, _place(part, lengths, time, count * lines_each, width, several)


def line_width(longest: int, tokens: int, *, multiple: int) -> int:
    """Choose the width of lines: a bucket, or little more than the longest row.

    A bucket beyond `tokens`, those of a micro-batch on each device, is not chosen.
    """
    width = bucket_size(longest, smallest=SMALLEST_WIDTH, multiple=multiple)
    return width if width <= tokens else _narrow(longest, multiple)


def _narrow(longest: int, multiple: int) -> int:
    return bucket_size(longest, smallest=16, multiple=multiple, per_doubling=4)


def _choose_lines(
    lengths: IntRows, tokens: int, several: bool, multiple: int
) -> tuple[int, list[list[int]]]:
    """Choose a width, and deal rows to lines: narrow ones if they take clearly fewer places."""
    longest = int(lengths.max())
    width, narrow = line_width(longest, tokens, multiple=multiple), _narrow(longest, multiple)
    lines = assign_lines(lengths, width, several=several)
    if narrow == width:
        return width, lines
    in_narrow = assign_lines(lengths, narrow, several=several)
    if 8 * width * len(lines) > 9 * narrow * len(in_narrow):
        return narrow, in_narrow
    return width, lines


def _micro_batch_lines(lines: int, most: int, shards: int, several: bool) -> int:
    """Choose the number of lines in a micro-batch, at most `most` on each device.

    Each number is compiled, so it should change little with the batch, and few lines should stay
    empty. A batch of at least four lines is cut into four micro-batches or more: of as many lines
    as the budget allows if it is large, else of a power of two. The last micro-batch is half empty
    on average.

    On several devices each micro-batch costs a transfer of gradients, and without packing each may
    have a width of its own. There a small batch is cut into as few micro-batches as the budget
    allows, equally full.
    """
    most *= shards
    if lines >= 4 * most:
        return most
    if several and shards == 1:
        return 1 << (max(lines // 4, 1).bit_length() - 1)
    share = -(-lines // -(-lines // most))
    return min(bucket_size(share, multiple=shards, per_doubling=4), most)


def _place(
    lines: list[list[int]], lengths: IntRows, time: int, count: int, width: int, several: bool
) -> Packing:
    """Compute where each token of some lines goes; further lines up to `count` stay empty."""
    sources = np.full((count, width), -1, np.int32)
    segments, positions = np.zeros_like(sources), np.zeros_like(sources)
    places = np.full((len(lengths), time), -1, np.int32)
    for number, line in enumerate(lines):
        column = 0
        for segment, row in enumerate(line, 1):
            length = int(lengths[row])
            steps = np.arange(length, dtype=np.int32)
            columns = slice(column, column + length)
            sources[number, columns] = row * time + steps
            segments[number, columns] = segment
            positions[number, columns] = steps
            places[row, :length] = number * width + column + steps
            column += length
    return Packing(sources, segments if several else None, positions, places)


def pack(batch: Batch, packing: Packing) -> Batch:
    """Put the tokens and labels of a batch, and their experts, into lines."""
    occupied = packing.sources >= 0
    index = jnp.maximum(packing.sources, 0)

    def lines(values: Array, fill: int) -> Array:
        return jnp.where(occupied, jnp.take(values.reshape(-1), index), fill)

    routing = batch.routing
    if routing is not None:  # that of empty places has no effect
        routing = jnp.take(routing.reshape(-1, *routing.shape[2:]), index, axis=0)

    return Batch(
        tokens=lines(batch.tokens, 0),
        labels=lines(batch.labels, IGNORE),
        positions=jnp.asarray(packing.positions),
        segment_ids=None if packing.segment_ids is None else jnp.asarray(packing.segment_ids),
        routing=routing,
    )


def unpack(
    values: Shaped[Array, "lines width *item"], packing: Packing
) -> Shaped[Array, "rows time *item"]:
    """Move values from places back to rows; 0 for padding."""
    item = values.shape[2:]
    taken = jnp.take(values.reshape(-1, *item), jnp.maximum(packing.places, 0), axis=0)
    occupied = (packing.places >= 0).reshape(*packing.places.shape, *[1] * len(item))
    return jnp.where(occupied, taken, jnp.zeros_like(taken))
