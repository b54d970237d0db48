"""What tiles are for: memory, and no work that nobody asked for."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from twinkle_jax.loss import token_logprobs
from twinkle_jax.loss.vocabulary_tiles import LARGEST_TILE, tiling


def plain(hidden, head, tokens):
    logprobs = jax.nn.log_softmax(jnp.matmul(hidden, head))
    return jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]


def compiled(function, size, *, tied=False, gradient=()):
    """Compile a weighted sum of scores, or its value and gradients, without running it."""
    tokens, feature, vocab = size

    def loss(hidden, head, names, weights):
        return jnp.sum(weights * function(hidden, head.T if tied else head, names))

    program = jax.jit(jax.value_and_grad(loss, gradient) if gradient else loss)
    shape = jax.ShapeDtypeStruct
    return program.lower(
        shape((tokens, feature), jnp.float32),
        shape((vocab, feature) if tied else (feature, vocab), jnp.float32),
        shape((tokens,), jnp.int32),
        shape((tokens,), jnp.float32),
    ).compile()


def temporary(program):
    """Float32 numbers that fit into the program's temporary memory."""
    return program.memory_analysis().temp_size_in_bytes / 4


def largest_array(program):
    """Elements of the largest array that a program mentions, at the top or within a fusion."""
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", program.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.exhaustive
def test_memory_of_a_language_model():
    # The sizes of a small model with a large vocabulary; nothing of this is run.
    size = tokens, feature, vocab = 4096, 1024, 151_936
    logits, head = tokens * vocab, feature * vocab
    held = compiled(plain, size, gradient=(0, 1))
    assert largest_array(held) == logits
    ours = compiled(token_logprobs, size, gradient=(0, 1))
    assert largest_array(ours) == head < logits / 2
    assert temporary(ours) <= temporary(held) / 16
    tied = compiled(token_logprobs, size, tied=True, gradient=(0, 1))
    assert largest_array(tied) == head
    # The gradient of the head is transposed in the end, and the head itself never.
    assert temporary(tied) <= temporary(held) / 8
    assert temporary(tied) <= 1.5 * head


@pytest.mark.exhaustive
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 64])
def test_the_head_is_not_copied(tied, chunk_size):
    def score(hidden, head, tokens):
        return token_logprobs(hidden, head, tokens, chunk_size=chunk_size)

    _, feature, vocab = size = 64, 1024, 65_536  # four blocks, of which two may exist
    assert temporary(compiled(score, size, tied=tied)) < 0.6 * feature * vocab


@pytest.mark.exhaustive
def test_a_block_after_the_other():
    # Sixteen blocks: with all of them, or zeros for the gradient of all, this would be over 1.
    _, feature, vocab = size = 16, 4096, 65_536
    program = compiled(token_logprobs, size, gradient=(0, 1))
    assert temporary(program) < 0.4 * feature * vocab


@pytest.mark.exhaustive
def test_what_is_not_differentiated_costs_nothing():
    def products(*gradient):
        text = compiled(token_logprobs, (64, 8, 100), gradient=gradient).as_text()
        return text.count(" dot(")

    assert products(0) == products(1) == products(0, 1) - 1


def test_tilings():
    # Chunks of equal size, no larger than asked for; columns in whole multiples of 128.
    assert tiling(4096, 1024, 151_936, None).chunk == 1024
    assert tiling(4097, 1024, 151_936, None).chunk == 824  # five of 820, in multiples of 8
    assert tiling(100, 8, 1000, 30).chunk == 30  # four of 25 would be 32
    assert tiling(100, 8, 1000, 200).chunk == 100
    assert tiling(20, 8, 300, 6) == (6, (256, 44))
    # Two chunks at least, and two blocks where there are columns enough.
    assert tiling(4000, 8, 300, None) == (1000, (256, 44))
    assert tiling(512, 256, 32_768, None) == (256, (4096,) * 8)
    assert tiling(20, 8, 129, 20) == (20, (128, 1))
    # Of few logits, three chunks of one block.
    assert tiling(20, 8, 129, None) == (7, (129,))
    assert tiling(30, 8, 129, None) == (16, (129,))  # a third is ten; in multiples of 8
    assert tiling(6, 8, 129, None) == (2, (129,))
    assert tiling(1, 8, 129, None) == (1, (129,))
    assert tiling(768, 128, 512, None) == (256, (512,))
    assert tiling(1024, 8, 1024, None) == (344, (1024,))
    assert tiling(1025, 8, 1024, None) == (513, (512, 512))


@pytest.mark.parametrize("size", [(1, 1, 1), (4096, 1024, 151_936), (512, 256, 32_768),
                                  (333, 64, 50_257), (65_536, 8192, 262_144)])  # fmt: skip
@pytest.mark.parametrize("chunk_size", [None, 1, 100, 1024])
def test_tilings_cover_everything(size, chunk_size):
    time, feature, vocab = size
    rows, widths = tiling(time, feature, vocab, chunk_size)
    assert 1 <= rows <= min(time, chunk_size or 1024)
    assert sum(widths) == vocab and len(widths) <= 16 and min(widths) >= 1
    assert len(set(widths[:-1])) <= 1 and widths[-1] <= widths[0]
    assert rows * widths[0] <= LARGEST_TILE + 128 * rows
    if time * vocab > 2**24:
        assert rows * widths[0] <= time * vocab / 16 + 128 * rows
