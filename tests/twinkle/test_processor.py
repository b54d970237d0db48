"""Twinkle's processor: padded batches, micro-batches, and rows joined into one."""

import pytest

from twinkle_jax.twinkle.processor import InputProcessor

ROWS = [
    {"input_ids": [1, 2], "labels": [2, -100], "user_data": ["a"]},
    {"input_ids": [3], "labels": [-100], "user_data": ["b"]},
]


def test_every_key_is_padded_with_its_own_value():
    rows = [
        {**row, "attention_mask": [1] * n, "position_ids": list(range(n)), "length": n}
        for n, row in zip((2, 1), ROWS, strict=True)
    ]
    batch = InputProcessor()(rows)
    assert batch["input_ids"].tolist() == [[1, 2], [3, 0]]
    assert batch["labels"].tolist() == [[2, -100], [-100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert batch["position_ids"].tolist() == [[0, 1], [0, -1]]
    assert batch["user_data"] == [["a"], ["b"]] and batch["length"] == [2, 1]
    left = InputProcessor(padding_side="left")(rows)
    assert left["labels"].tolist() == [[2, -100], [-100, -100]]
    assert left["position_ids"].tolist() == [[0, 1], [-1, 0]]


def test_joined_rows_have_positions_that_start_again():
    batch = InputProcessor(padding_free=True)(ROWS)
    assert batch["input_ids"].tolist() == [[1, 2, 3]]
    assert batch["position_ids"].tolist() == [[0, 1, 0]]
    assert "attention_mask" not in batch


def test_micro_batches_have_one_length_unless_it_may_vary():
    fixed = InputProcessor().collate_fn(ROWS, micro_batch_size=1)
    assert [x["input_ids"].shape for x in fixed] == [(1, 2), (1, 2)]
    loose = InputProcessor().collate_fn(ROWS, micro_batch_size=1, variable_seq_lengths=True)
    assert [x["input_ids"].shape for x in loose] == [(1, 2), (1, 1)]


def test_arguments_that_are_refused():
    with pytest.raises(ValueError, match="padding_side"):
        InputProcessor(padding_side="top")
    with pytest.raises(TypeError, match="pad_to"):
        InputProcessor(pad_to=8)
