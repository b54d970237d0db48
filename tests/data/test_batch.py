"""Batches: conversions and checks, buckets of sizes, micro-batches, padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax.data import Batch, bucket_size, pad_rows
from twinkle_jax.data.batch import check_batch, micro_batches
from twinkle_jax.data.features import read_features

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


WRAPS = 2**32 + 5  # becomes 5 in int32


@pytest.mark.parametrize(
    ("error", "name", "value"),
    [
        (ValueError, "tokens", np.full((2, 3), WRAPS)),
        (ValueError, "tokens", [[5, 6, 10], [8, 9, 0]]),
        (ValueError, "tokens", [5, 6, 7]),
        (ValueError, "tokens", [[5], [6, 7]]),
        (ValueError, "teacher_logprobs", np.zeros((2, 3, 1))),
        (ValueError, "labels", np.full((2, 3), WRAPS)),
        (ValueError, "labels", np.full((2, 3), 2**32 - 100)),
        (ValueError, "labels", [[-1] * 3] * 2),
        (ValueError, "labels", jnp.zeros((2, 2), "int32")),
        (TypeError, "labels", jnp.zeros((2, 3))),
        (ValueError, "positions", np.full((2, 3), 2**32)),
        (ValueError, "segment_ids", np.full((2, 3), 2**32)),
        (ValueError, "rows", [True] * 3),
        (ValueError, "advantages", jnp.ones(2)),
        (TypeError, "mask", [[1, 1, 1]] * 2),
        (TypeError, "mask", jnp.ones((2, 3), "int32")),
    ],
)
def test_batches_that_are_refused(error, name, value):
    with pytest.raises(error, match=f"^{name}"):
        check(**{name: value})


def test_every_size_fits_and_little_is_lost():
    buckets = [bucket_size(n) for n in range(1, 1025)]
    for n, bucket in enumerate(buckets, 1):
        assert n <= bucket and (bucket - n) * 3 < bucket
    assert sorted(set(buckets))[:12] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert len(set(buckets)) == 20
    assert all(bucket_size(b) == b for b in buckets)


@pytest.mark.parametrize(("per_doubling", "lost"), [(1, 1 / 2), (4, 1 / 5), (8, 1 / 9)])
def test_more_buckets_lose_less(per_doubling, lost):
    buckets = [bucket_size(n, per_doubling=per_doubling) for n in range(1, 1025)]
    for n, bucket in enumerate(buckets, 1):
        assert n <= bucket and (bucket - n) < lost * bucket
    assert len({b for b in buckets if 256 < b <= 512}) == per_doubling
    assert buckets[-1] == 1024


def test_smallest_and_multiple():
    assert [bucket_size(n, smallest=16) for n in (0, 16, 17)] == [16, 16, 24]
    assert [bucket_size(n, multiple=8) for n in (0, 1, 9, 25)] == [8, 8, 16, 32]
    assert bucket_size(0) == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"size": -1},
        {"size": 1, "smallest": 0},
        {"size": 1, "multiple": 0},
        {"size": 1, "per_doubling": 0},
        {"size": 1, "per_doubling": 3},
    ],
)
def test_sizes_that_are_refused(bad):
    with pytest.raises(ValueError, match="|".join(bad)):
        bucket_size(**bad)


FEATURES = read_features(
    [{"input_ids": list(range(1, n + 1))} for n in (3, 17, 2)], vocab_size=50, labels_needed=False
)


def test_sizes_are_buckets_or_what_is_asked():
    ((batch, count),) = micro_batches(FEATURES, {}, None)
    assert batch.tokens.shape == (3, 24) and count == 3
    shapes = [(b.tokens.shape, n) for b, n in micro_batches(FEATURES, {}, 2)]
    assert shapes == [((2, 24), 2), ((2, 16), 1)]
    ((batch, count),) = micro_batches(FEATURES, {}, 3, row_multiple=4, time_multiple=5)
    assert batch.tokens.shape == (4, 25) and count == 3
    assert batch.rows.tolist() == [True] * 3 + [False]


def test_padding_is_without_loss_and_numbers_go_along():
    advantages = [np.full(len(f["labels"]), i, np.float32) for i, f in enumerate(FEATURES)]
    _, (batch, _) = micro_batches(FEATURES, {"advantages": advantages, "old_logps": None}, 2)
    assert batch.tokens[0].tolist() == [1, 2] + [0] * 14
    assert batch.labels[0].tolist() == [2] + [-100] * 15
    assert batch.labels[1].tolist() == [-100] * 16 and batch.rows.tolist() == [True, False]
    assert batch.advantages[0].tolist() == [2, 2] + [0] * 14
    assert batch.old_logps is batch.mask is batch.positions is None


def test_masks_and_positions_only_where_they_matter():
    def make(*features):
        rows = read_features(list(features), vocab_size=50, labels_needed=False)
        return next(micro_batches(rows, {}, None))[0]

    plain = {"input_ids": [5, 6, 7]}
    assert make(plain, plain | {"attention_mask": [1, 1, 0]}).mask is None
    left = plain | {"attention_mask": [0, 1, 1]}
    batch = make(left, plain)
    assert batch.mask[:, :4].tolist() == [[False, True, True, False], [True, True, True, False]]
    batch = make(left, plain | {"position_ids": [7, 8, 9]})
    assert batch.positions[:, :3].tolist() == [[0, 0, 1], [7, 8, 9]]


@pytest.mark.parametrize("size", [0, -1, True, 2.0])
def test_wrong_sizes(size):
    with pytest.raises(ValueError, match="micro_batch_size"):
        next(micro_batches(FEATURES, {}, size))


def test_rows_are_padded_to_the_longest_or_further_on_either_side():
    rows = [[1, 2, 3], np.array([4], np.int32)]
    assert pad_rows(rows, 9).tolist() == [[1, 2, 3], [4, 9, 9]]
    assert pad_rows(rows, 9, length=4, left=True).tolist() == [[9, 1, 2, 3], [9, 9, 9, 4]]
    assert pad_rows(rows, length=2, count=3).tolist() == [[1, 2, 3], [4, 0, 0], [0, 0, 0]]
    assert pad_rows([[], [1]], 7, left=True).tolist() == [[7], [1]]
    pairs = pad_rows([np.ones((1, 2)), np.zeros((2, 2))], 5)
    assert pairs.tolist() == [[[1, 1], [5, 5]], [[0, 0], [0, 0]]]
    assert pad_rows(rows, dtype=np.float32).dtype == np.float32
