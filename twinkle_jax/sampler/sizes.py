"""Sizes of caches and slots: what is compiled, and when the host chooses another size."""

from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from twinkle_jax.model import AttentionImplementation, DecoderConfig
from twinkle_jax.model.decoder.config import LINEAR
from twinkle_jax.model.decoder.pages import pages_of_window
from twinkle_jax.model.decoder.sharding import backend_of, row_shards

_STEPS_ON_MESH = 8  # asking all devices whether they are done costs as much as part of a step
STEPS_OF_ROOM = 32  # free room of a new cache, at least
_SMALLEST_CACHE = 64
# Tokens of a page, by backend. On a CPU pages are not faster and compile more programs.
_PAGE = {"tpu": 128, "gpu": 128}
# Rows of at most so many tokens are not cut into pages: reading them whole costs little.
_SHORT = 512
_MOST_GROUPS = 4  # in slots, over those that fill them
_FEWEST_SLOTS = 8  # of a device: a step with fewer rows takes nearly as long


def check_count(name: str, count: Any, least: int = 1) -> None:
    """Refuse a number of rows or tokens that is no integer, or too small."""
    if isinstance(count, bool) or not isinstance(count, int | np.integer):
        raise TypeError(f"{name} must be an integer, got {count!r}")
    if count < least:
        raise ValueError(f"{name} must be at least {least}, got {count}")


class Setup(NamedTuple):
    """Static settings: each value is compiled once for each number of slots and capacity."""

    config: DecoderConfig
    num_samples: int  # rows of each prompt
    new: int  # the most tokens of a completion
    refill: int  # free slots of a device at which they are filled
    compute_dtype: DTypeLike | None
    attention: AttentionImplementation | None  # how prompts are read
    mesh: Mesh | None  # that rows are spread over
    page: int | None = None  # tokens of a page of the cache; None where rows are whole
    window_pages: int | None = None  # the most of a row in sliding layers; None: they keep all
    # Full pages of the longest prompt, which the rows of a group share; 0: each row has its own.
    prompt_pages: int = 0
    keeps_ended: bool = False  # whether rows that have ended keep their pages, to go on later
    keep_routing: bool = False  # whether to return the experts of each token

    def in_pages(self, full: int) -> "Setup":
        """Choose pages for rows of at most `full` tokens; sliding layers then keep their window."""
        page, window = page_for(self.config, full, self.mesh), self.config.attention.window
        if page is None:
            return self
        shared = (full - self.new) // page if self.num_samples > 1 else 0
        most = None if window is None else pages_of_window(window.size, page)
        if most is not None and (self.keeps_ended or most >= -(-full // page)):
            most = None  # a row that is kept may be cut to where its window was
        return self._replace(page=page, window_pages=most, prompt_pages=shared)

    def pages_of_row(self, tokens: int) -> int:
        """Bound the pages of its own that a row of at most so many tokens has."""
        assert self.page is not None
        if self.prompt_pages:  # of a prompt only what does not fill a page
            tokens = min(tokens, self.page - 1 + self.new)
        return -(-tokens // self.page)

    def most_pages(self, slots: int, full: int) -> int:
        """Bound the pages of a device that belong to one row each, of at most `full` tokens."""
        # Steps with ended rows need a free page, see `next_places`.
        return slots * self.pages_of_row(full) + self.keeps_ended

    def pages_for(self, needed: int, slots: int, full: int) -> int:
        """Round up the pages of a device that belong to one row each."""
        # Conversations begin each turn with another number, and would compile too often.
        return pages_for(needed, self.most_pages(slots, full), parts=4 if self.keeps_ended else 8)

    @property
    def new_prompt_pages(self) -> int:
        """Bound the pages that the prompts of `refill` rows take, which come in order.

        They may be the end of one group, the two groups that a device shares with others, of which
        it may have one row each, and whole ones.
        """
        groups = 3 + -(-max(0, self.refill - 3) // self.num_samples)
        return min(self.refill, groups) * self.prompt_pages

    def most_prompt_pages(self, slots: int) -> int:
        """Bound the pages of a device's prompts: slots are not refilled while there are as many.

        With K rows a group, of geometric lengths, there are about 1 + 1/2 + … + 1/K times as many
        groups as fill the slots: 2.7 for 8, 3.4 for 16.
        """
        groups = _MOST_GROUPS * -(-slots // self.num_samples)
        return min(slots * self.prompt_pages, groups * self.prompt_pages + self.new_prompt_pages)

    def pages_of_sliding(self, slots: int, capacity: int) -> int | None:
        """Bound the pages of a device's sliding layers; None where they share the others' pages."""
        if self.window_pages is None:
            return None
        most = slots * self.window_pages
        return most if self.prompt_pages else min(capacity, most)

    @property
    def shards(self) -> int:
        """Devices that rows are spread over."""
        return row_shards(self.mesh)

    @property
    def steps(self) -> int:
        """Steps between two looks at which rows have ended."""
        return 1 if self.mesh is None else _STEPS_ON_MESH


class Status(NamedTuple):
    """What the host decides the next call by: integers there, scalar arrays in a program.

    Numbers are those of the device that has most.
    """

    running: int  # slots whose row has not ended
    waiting: int  # rows without a slot
    fillable: int  # whether some device has enough free slots, and all have pages for prompts
    filled: int  # tokens in the cache of the longest running row
    pages: int  # of their own that rows have or need now; 0 without pages
    prompt_pages: int = 0  # of prompts, which rows share


def page_for(config: DecoderConfig, full: int, mesh: Mesh | None) -> int | None:
    """Choose the tokens of a page; None for short rows and decoders without attention layers."""
    has_attention = any(kind != LINEAR for kind in config.block)
    return _PAGE.get(backend_of(mesh)) if has_attention and full > _SHORT else None


def pages_for(needed: int, most: int, parts: int = 8) -> int:
    """Round up the pages of a device, by at most 2 / `parts`, so that few sizes are compiled."""
    step = 1
    while parts * step <= needed:
        step *= 2
    return min(-(-needed // step) * step, most)


def first_capacity(setup: Setup, slots: int, longest: int, full: int) -> int:
    """Choose the initial capacity, for prompts of up to `longest` tokens."""
    if setup.page is None:
        return capacity_for(longest, full)
    begun = setup.page - 1 if setup.prompt_pages else longest
    each = setup.pages_of_row(min(begun + STEPS_OF_ROOM, full))
    return setup.pages_for(slots * each, slots, full)


def first_prompt_pages(setup: Setup, slots: int, rows: int) -> int:
    """Choose the initial number of pages for prompts of a device with so many rows."""
    needed = most_new_prompts(setup, rows, slots) * setup.prompt_pages
    return pages_for(needed, setup.most_prompt_pages(slots))


def next_capacity(
    setup: Setup, status: Status, slots: int, capacity: int, longest: int, full: int
) -> int:
    """Choose the next capacity: a new one if the current one is too small or twice too large."""
    if setup.page is None:
        needed = capacity_for(status.filled, full)
        if status.waiting:  # a prompt longer than all running rows must fit, too
            needed = max(needed, capacity_for(longest, full))
        return needed if needed > capacity or 2 * needed < capacity else capacity
    begun = setup.page - 1 if setup.prompt_pages else longest
    new = setup.refill * -(-begun // setup.page) if status.fillable else 0
    needed = setup.pages_for(status.pages + new, slots, full)
    return needed if needed > capacity or 2 * needed < capacity else capacity


def next_prompt_pages(setup: Setup, status: Status, slots: int, pages: int) -> int:
    """Choose the next number of pages for prompts, as `next_capacity` does."""
    if not setup.prompt_pages:
        return 0
    needed = max(1, status.prompt_pages + (setup.new_prompt_pages if status.fillable else 0))
    # When slots have been halved, there may be more than as many slots would begin with.
    needed = pages_for(needed, max(needed, setup.most_prompt_pages(slots)))
    return needed if needed > pages or 2 * needed < pages else pages


def capacity_for(filled: int, full: int) -> int:
    """Choose the capacity of a cache, a power of two with room for more steps, or `full`."""
    capacity = _SMALLEST_CACHE
    while capacity < filled + STEPS_OF_ROOM:
        capacity *= 2
    return full if 5 * capacity >= 4 * full else capacity


def slots_for(running: int, slots: int) -> int:
    """Halve the slots of a device while that leaves enough for the running rows."""
    while slots % 2 == 0 and slots >= 2 * _FEWEST_SLOTS and running <= slots // 2:
        slots //= 2
    return slots


def most_new_prompts(setup: Setup, rows: int, size: int) -> int:
    """Bound the prompts of `size` of a device's rows that rows before them do not have.

    Where groups do not end with the devices, the first and the last group of one may be short.
    """
    samples = setup.num_samples
    if rows % samples == 0:
        return -(-size // samples)
    return min(-(-size // samples) + 2, (rows + samples - 2) // samples + 1)
