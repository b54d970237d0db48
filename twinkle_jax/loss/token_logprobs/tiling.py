"""How logits are cut into tiles: chunks of tokens against blocks of the vocabulary."""

from typing import NamedTuple

LARGEST_TILE = 2**24  # logits: 64 MiB in float32
SMALLEST_TILE = 2**20


class Tiling(NamedTuple):
    """How logits are cut: into chunks of `chunk` tokens and blocks of `widths` columns."""

    chunk: int
    widths: tuple[int, ...]


def tiling(time: int, feature: int, vocab: int, chunk_size: int | None) -> Tiling:
    """Cut so that a tile is a small part of the logits, and a block a small part of the head."""
    # Of few logits, the masked ones in the last chunk cost more than the number of chunks.
    few = chunk_size is None and time * vocab <= SMALLEST_TILE
    largest = min(time, chunk_size or min(1024, -(-time // (3 if few else 2))))
    chunks = -(-time // largest)
    rows = -(-time // (8 * chunks)) * 8
    rows = rows if few and largest >= 8 else min(rows, largest)
    tile = min(max(time * vocab // 48, SMALLEST_TILE), LARGEST_TILE)
    blocks = max(1 if few else 2, -(-rows * vocab // tile), -(-feature * vocab // LARGEST_TILE))
    width = -(-vocab // (128 * min(16, blocks))) * 128  # matrix units want multiples of 128
    return Tiling(rows, tuple(min(width, vocab - start) for start in range(0, vocab, width)))
