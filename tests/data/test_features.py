"""Input features: what is read, what is refused by name, and packed rows taken apart."""

import numpy as np
import pytest

from twinkle_jax.data.features import (
    align_loss_input,
    largest_logits,
    read_features,
    split_packed,
)


def read(*features, labels_needed=False, **options):
    return read_features(list(features), vocab_size=50, labels_needed=labels_needed, **options)


@pytest.mark.parametrize(
    "convert", [list, np.array, lambda x: [x], lambda x: np.array(x, "uint64")]
)
def test_lists_and_arrays_of_any_width(convert):
    (row,) = read({"input_ids": convert([5, 6, 7]), "labels": None})
    assert row["input_ids"].dtype == row["labels"].dtype == np.int32
    assert row["labels"].tolist() == [6, 7, -100]


@pytest.mark.parametrize(
    "mask", [[1, 1, 1, 0], np.array([True, True, True, False]), [True, True, True, False]]
)
def test_attention_masks_are_integers_or_booleans(mask):
    (row,) = read({"input_ids": [5, 6, 7, 0], "attention_mask": mask})
    assert row["labels"].tolist() == [6, 7, -100, -100]  # the padding is not scored
    (row,) = read({"input_ids": [5, 6, 7, 0], "labels": [6, 7, 8, 9], "attention_mask": mask})
    assert row["labels"].tolist() == [6, 7, 8, -100]


def test_what_follows_across_masked_tokens():
    (row,) = read({"input_ids": [0, 5, 0, 6, 7], "attention_mask": [0, 1, 0, 1, 1]})
    assert row["labels"].tolist() == [-100, 6, -100, 7, -100]


def test_a_trajectorys_own_keys_may_stay():
    trajectory = {"messages": [{"role": "user", "content": "5"}], "user_data": [("a", 1)]}
    (row,) = read({"input_ids": [5, 6], "length": 2, "pixel_values": None, **trajectory})
    assert set(row) == {"input_ids", "labels"}
    encoded = read(trajectory, template=lambda x: {"input_ids": [5, 6], **x})
    assert encoded[0]["input_ids"].tolist() == [5, 6]


WRAPS = 2**32 + 5  # becomes 5 in int32


@pytest.mark.parametrize(
    ("error", "key", "value"),
    [
        (ValueError, "input_ids", []),
        (ValueError, "input_ids", [48, 49, 50]),
        (ValueError, "input_ids", [5, WRAPS, 7]),
        (ValueError, "input_ids", [5, -(2**32) + 5, 7]),
        (ValueError, "input_ids", np.array([5, 2**63], "uint64")),
        (TypeError, "input_ids", [5, 2**70]),
        (TypeError, "input_ids", [0.5]),
        (TypeError, "input_ids", [True, False]),
        (ValueError, "input_ids", [[1], [2, 3]]),
        (ValueError, "input_ids", [[1], [2]]),
        (ValueError, "labels", [6, WRAPS, 8]),
        (ValueError, "labels", [6, 2**32 - 100, 8]),
        (ValueError, "labels", [6, -1, 8]),
        (ValueError, "labels", [6, 7]),
        (ValueError, "attention_mask", [1, 2, 1]),
        (ValueError, "attention_mask", [1, 2**32, 1]),
        (ValueError, "position_ids", [0, 1, 2**32 + 2]),
        (ValueError, "position_ids", [0, 1, -1]),
        (ValueError, "position_ids", [0, 1, 3]),
        (ValueError, "position_ids", [4, 5, 4]),
    ],
)
def test_values_that_are_refused(error, key, value):
    with pytest.raises(error, match=rf"^inputs\[0\]\['{key}'\]"):
        read({"input_ids": [5, 6, 7], key: value})


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("segment_ids", "'position_ids' start again"),
        ("cu_seqlens", "'position_ids' start again"),
        ("completion_mask", "'labels' are -100"),
        ("lables", "did you mean 'labels'"),
        ("attention_masks", "did you mean 'attention_mask'"),
        ("old_logps", "an argument of forward_backward"),
        ("pixel_values", "text only"),
        ("anything", ""),
    ],
)
def test_unknown_keys_are_refused_with_a_hint(key, hint):
    with pytest.raises(ValueError, match=f"'{key}'.*{hint}"):
        read({"input_ids": [5, 6, 7], key: [0, 1, 1]})


@pytest.mark.parametrize(
    ("inputs", "error", "name"),
    [
        ([], ValueError, "inputs"),
        ("text", ValueError, "inputs"),
        ([[5, 6, 7]], TypeError, r"inputs\[0\]"),
        ([{"labels": [5]}], ValueError, r"inputs\[0\]"),
    ],
)
def test_inputs_that_are_no_features(inputs, error, name):
    with pytest.raises(error, match=f"^{name}"):
        read_features(inputs, vocab_size=50, labels_needed=False)


def test_labels_when_they_are_needed():
    with pytest.raises(ValueError, match=r"inputs\[0\]"):
        read({"input_ids": [5]}, labels_needed=True)


def test_packed_rows_are_taken_apart():
    features = read(
        {"input_ids": [5, 6, 7, 8, 9, 10], "position_ids": [0, 1, 2, 0, 1, 0]},
        {"input_ids": [11, 12], "position_ids": [3, 4]},
    )
    assert features[0]["labels"].tolist() == [6, 7, -100, 9, -100, -100]
    pieces = split_packed(features)
    assert [(p.row, p.columns.start, p.columns.stop) for p in pieces] == [
        (0, 0, 3),
        (0, 3, 5),
        (0, 5, 6),
        (1, 0, 2),
    ]
    assert [p.feature["input_ids"].tolist() for p in pieces] == [[5, 6, 7], [8, 9], [10], [11, 12]]
    # positions that only count are what a decoder takes anyway; others are kept
    assert ["position_ids" in p.feature for p in pieces] == [False, False, False, True]


def test_padding_starts_no_sequence():
    """transformers gives padding on the left the position 1 or 0."""
    for padding in ([1, 1], [0, 0]):
        (feature,) = read(
            {
                "input_ids": [0, 0, 5, 6, 7],
                "attention_mask": [0, 0, 1, 1, 1],
                "position_ids": [*padding, 0, 1, 0],
            }
        )
        pieces = split_packed([feature])
        assert [(p.columns.start, p.columns.stop) for p in pieces] == [(0, 4), (4, 5)]
        assert not any("position_ids" in p.feature for p in pieces)


def test_numbers_of_packed_rows():
    features = read(
        {
            "input_ids": [5, 6, 7, 8, 9],
            "labels": [6, 7, -100, 9, 3],
            "position_ids": [0, 1, 2, 0, 1],
        },
        {"input_ids": [11, 12], "labels": [12, -100]},
    )
    pieces = split_packed(features)

    def align(name, data):
        return [row.tolist() for row in align_loss_input(name, data, features, pieces)]

    assert align("advantages", [1.0, 2.0]) == [[1, 1, 1], [1, 1], [2, 2]]  # of a row
    assert align("advantages", [1.0, 2.0, 3.0]) == [[1, 1, 1], [2, 2], [3, 3]]  # of a sequence
    by_row = align("old_logps", [[-1, -2, -3, -4], [-5]])
    assert by_row == [[-1, -2, 0], [-3, -4], [-5, 0]]
    assert align("old_logps", [[-1, -2], [-3, -4], [-5]]) == by_row
    assert align_loss_input("old_logps", None, features, pieces) is None
    with pytest.raises(ValueError, match=r"^advantages"):
        align("advantages", [1.0] * 4)
    with pytest.raises(ValueError, match=r"^advantages"):
        align("advantages", 1.0)
    with pytest.raises(ValueError, match=r"^old_logps\[1\]"):
        align("old_logps", [[-1, -2, -3, -4], []])
    with pytest.raises(ValueError, match=r"^old_logps\[0\]"):
        align("old_logps", [[[-1]], [-5]])
    with pytest.raises(ValueError, match=r"^old_logps\[1\]"):
        align("old_logps", [[0] * 5, [1, 2, 3]])


def test_the_largest_logits_of_each_position_and_their_tokens():
    logits = [[[0.0, 3.0, 1.0, 2.0], [5.0, 4.0, 7.0, 5.0]]]
    values, tokens = largest_logits(logits, 2)
    assert values.tolist() == [[[3.0, 2.0], [7.0, 5.0]]] and tokens.tolist() == [[[1, 3], [2, 0]]]
    assert largest_logits(logits)[1].tolist() == [[[1, 3, 2, 0], [2, 0, 3, 1]]]
    assert (values.dtype, tokens.dtype) == (np.float32, np.int32)
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"count .*{count}"):
            largest_logits(logits, count)
