"""Micro-batches: buckets, filling rows, padding, masks and positions."""

import numpy as np
import pytest

from twinkle_jax.data.features import read_features
from twinkle_jax.data.micro_batches import micro_batches

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
    with pytest.raises(ValueError, match=f"must be a positive int or None, got {size}"):
        next(micro_batches(FEATURES, {}, size))
