"""Rows of a batch, computed a few at a time where that is faster: small models on a CPU.

A compiled program takes its working memory in one piece. The C library of Linux keeps pieces of up
to 32 MiB for the next one; larger ones go back to the system, which clears pages one by one when
they are touched again. For a small model that is a good part of a step's time.
"""

from functools import partial

import jax

from twinkle_jax.data.batch import Batch
from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.forward import Remat

KEPT_BYTES = 32 * 2**20
FEWEST_TOKENS = 512  # with fewer, products are too small, and gradients added up too often


def rows_together(config: DecoderConfig, rows: int, time: int, remat: Remat) -> int:
    """Choose how many rows to compute together: all, but on a CPU what fits `KEPT_BYTES`."""
    if jax.default_backend() != "cpu":
        return rows
    tokens = (KEPT_BYTES // 4 - _parameters(config)) // _floats(config, time, remat)
    if rows * time <= tokens:
        return rows
    divisors = (n for n in range(1, rows) if rows % n == 0)
    return max((n for n in divisors if FEWEST_TOKENS <= n * time <= tokens), default=rows)


@partial(jax.jit, static_argnames="rows")
def cut(batch: Batch, rows: int) -> list[Batch]:
    """Cut a batch into batches of so many rows, and of what is left."""
    starts = range(0, len(batch.tokens), rows)
    return [jax.tree.map(lambda x, at=start: x[at : at + rows], batch) for start in starts]


def _parameters(config: DecoderConfig) -> int:
    """Count the parameters of the matrices, roughly."""
    width = config.hidden_size
    layer = width * (_products(config) + config.intermediate_size)
    return config.layers * layer + config.vocab_size * width


def _products(config: DecoderConfig) -> int:
    """Count what the products of a layer give per token, for as much as the gradient needs it."""
    a = config.attention
    heads = (a.query_heads + 2 * a.key_value_heads) * a.head_dim
    return heads + config.hidden_size + 2 * config.intermediate_size


def _floats(config: DecoderConfig, time: int, remat: Remat) -> int:
    """Estimate the working memory per token: what is kept of all layers, and one layer at work.

    Fitted to what the compiler says of small models; `tests/model/test_row_blocks.py` asks it.
    """
    products, scores = _products(config), config.attention.query_heads * time
    kept = 2 if remat is True else config.layers if remat else 4 * config.layers
    return config.layers * config.hidden_size + (kept + 2) * products + 3 * scores
