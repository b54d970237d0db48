"""Batches: lists and arrays are taken, and what would wrap or be misread is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax.data import Batch
from twinkle_jax.data.batch import check_batch

TOKENS = [[5, 6, 7], [8, 9, 0]]
LABELS = [[-100, 7, 8], [9, -100, -100]]


def check(**changes):
    return check_batch(Batch(**{"tokens": TOKENS, "labels": LABELS, **changes}), 10)


def test_lists_and_arrays_become_what_the_decoder_reads():
    batch = check(advantages=[[1] * 3] * 2, mask=np.ones((2, 3), bool), rows=[True, False])
    assert batch.tokens.dtype == batch.labels.dtype == np.int32
    assert batch.advantages.dtype == np.float32
    assert batch.mask.dtype == batch.rows.dtype == np.bool_
    on_device = jnp.asarray(TOKENS)
    assert check(tokens=on_device).tokens is on_device
    assert check(tokens=np.array(TOKENS, "int64")).tokens.dtype == np.int32


def test_traced_batches():
    shapes = jax.eval_shape(lambda tokens: check(tokens=tokens), jnp.asarray(TOKENS))
    assert shapes.tokens.shape == (2, 3)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"tokens": np.full((2, 3), 2**32 + 5)},
            ValueError,
            r"tokens .*\[0, 9\], got 4294967301",
        ),
        ({"tokens": [[5, 6, 10], [8, 9, 0]]}, ValueError, r"tokens must be in \[0, 9\], got 10"),
        (
            {"labels": np.full((2, 3), 2**32 + 5)},
            ValueError,
            r"labels .*\[0, 9\], got 4294967301",
        ),
        ({"labels": np.full((2, 3), 2**32 - 100)}, ValueError, "labels must be .*got 4294967196"),
        ({"labels": [[-1] * 3] * 2}, ValueError, r"labels must be in \[0, 9\], got -1"),
        (
            {"positions": np.full((2, 3), 2**32)},
            ValueError,
            "positions must .*got 4294967296",
        ),
        ({"segment_ids": np.full((2, 3), 2**32)}, ValueError, "segment_ids must be in"),
        (
            {"tokens": [5, 6, 7]},
            ValueError,
            r"tokens must have the shape \[batch, time\]",
        ),
        ({"tokens": [[5], [6, 7]]}, ValueError, "tokens must be a rectangular array"),
        (
            {"labels": jnp.zeros((2, 2), "int32")},
            ValueError,
            r"labels must have .*\(2, 3\)",
        ),
        ({"rows": [True] * 3}, ValueError, r"rows must have the shape \(2,\), got \(3,\)"),
        ({"labels": jnp.zeros((2, 3))}, TypeError, "labels must be integers, got float32"),
        (
            {"mask": [[1, 1, 1]] * 2},
            TypeError,
            "booleans, True for what counts, got int",
        ),
        ({"mask": jnp.ones((2, 3), "int32")}, TypeError, "mask must be booleans"),
    ],
)
def test_what_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        check(**changes)
