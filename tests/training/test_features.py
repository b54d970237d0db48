"""Lists of input features through scoring and gradients, packed or not, whole or in parts."""

import jax
import numpy as np
import pytest

from tests.model.families import config_of, each, params_of
from twinkle_jax.data import largest_logits
from twinkle_jax.loss import CrossEntropyLoss, DPOLoss, GKDLoss, GRPOLoss, SimPOLoss
from twinkle_jax.training import (
    FeatureRows,
    grad_features,
    loss_of_scores,
    pack_features,
    score_features,
    train_state,
)

CONFIG = config_of("qwen3")
ALONE = [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9, 10, 11]}]
PACKED = [{"input_ids": [5, 6, 7, 8, 9, 10, 11], "position_ids": [0, 1, 2, 3, 0, 1, 2]}]


def read(inputs, **options):
    return FeatureRows.read(inputs, vocab_size=48, **options)


def gradient(rows, loss=None, loss_inputs=None, **options):
    """Losses of the micro-batches, and the summed gradient."""
    start = train_state(jax.tree.map(np.array, params_of("qwen3")))
    passes = grad_features(
        start, rows, CONFIG, loss or CrossEntropyLoss(), loss_inputs=loss_inputs or {}, **options
    )
    losses, written, states = [], {}, []
    for state, summary, pieces in passes:
        states = [state]
        losses.append(float(summary.loss_sum))
        rows.write(written, "logps", summary.logps, pieces)
    return losses, written["logps"], jax.tree.leaves(states[0].gradient_sum)


def test_packed_rows_are_scored_as_their_sequences_are_alone():
    params = params_of("qwen3")
    alone = score_features(params, read(ALONE), CONFIG, micro_batch_size=2)["logps"]
    packed = score_features(params, read(PACKED), CONFIG, micro_batch_size=2)["logps"]
    assert alone.shape == (2, 4) and packed.shape == (1, 7)
    assert alone[0, 3] == alone[1, 2] == alone[1, 3] == 0 and (alone[0, :3] < 0).all()
    np.testing.assert_allclose(packed[0, :4], alone[0], atol=1e-6)
    np.testing.assert_allclose(packed[0, 4:], alone[1, :3], atol=1e-6)
    rows = read(ALONE)
    loss = loss_of_scores(CrossEntropyLoss(), rows, {"logps": alone}, {})
    np.testing.assert_allclose(loss, -alone.sum() / 5, rtol=1e-6)
    weighted = loss_of_scores(GRPOLoss(), rows, {"logps": alone}, {"advantages": [1.0, 0.5]})
    np.testing.assert_allclose(weighted, -0.75, rtol=1e-6)  # on policy: each ratio is 1
    with pytest.raises(ValueError, match="GKDLoss"):
        loss_of_scores(GKDLoss(), rows, {"logps": alone}, {})


@pytest.mark.slow
def test_experts_go_with_their_tokens():
    """Packed or not, and with those of a last token missing, for which the router chooses."""
    params, config = params_of("qwen3_moe"), config_of("qwen3_moe")
    shape = config.layers, config.experts.chosen
    rng = np.random.default_rng(0)
    experts = rng.random((7, config.layers, config.experts.number)).argsort(-1)[..., : shape[1]]
    alone = [
        ALONE[0] | {"routed_experts": experts[:4]},
        ALONE[1] | {"routed_experts": experts[4:6].tolist()},
    ]
    whole = experts.copy()
    whole[6] = -1
    packed = [PACKED[0] | {"routed_experts": whole}]
    scores = [
        score_features(params, read(rows), config, with_routing=True) for rows in (alone, packed)
    ]
    live = score_features(params, read(ALONE), config)["logps"]
    assert np.abs(scores[0]["logps"] - live).max() > 0.1
    np.testing.assert_allclose(scores[1]["logps"][0, :4], scores[0]["logps"][0], atol=1e-5)
    np.testing.assert_allclose(scores[1]["logps"][0, 4:], scores[0]["logps"][1, :3], atol=1e-5)
    routing = scores[1]["routing"]
    assert routing.shape == (1, 7, *shape) and routing.dtype == np.uint8
    np.testing.assert_array_equal(routing[0, :6], experts[:6])
    np.testing.assert_array_equal(scores[0]["routing"][1, 2], routing[0, 6])
    first = dict(enumerate(score_features(params, read(alone[:1]), config)["logps"]))
    mixed = read([alone[0], ALONE[1]])  # the router chooses for the second row
    got = score_features(params, mixed, config)["logps"]
    np.testing.assert_allclose(got, [first[0], live[1]], atol=1e-5)


@pytest.mark.parametrize(
    "experts", [[[1, 2]] * 4, np.ones((5, 2, 2), int), [[[0.5]]], "all"], ids=str
)
def test_experts_of_another_shape_or_type_are_refused(experts):
    with pytest.raises((ValueError, TypeError), match="routed_experts"):
        read([ALONE[0] | {"routed_experts": experts}])


@pytest.mark.slow
def test_parts_add_up_to_the_whole():
    (expected_sum,), logps, expected = gradient(read(PACKED))
    losses, in_parts, summed = gradient(read(PACKED), micro_batch_size=1)
    assert len(losses) == 2
    np.testing.assert_allclose(sum(losses), expected_sum, rtol=1e-6)
    np.testing.assert_allclose(expected_sum, -logps.sum(), rtol=1e-6)
    np.testing.assert_allclose(in_parts, logps, atol=1e-6)
    for part, all_at_once in zip(summed, expected, strict=True):
        np.testing.assert_allclose(part, all_at_once, atol=1e-6 * np.abs(all_at_once).max())


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="labels"):
        read(ALONE, labels_needed=True)
    with pytest.raises(ValueError, match="teacher_logits"):
        gradient(read(ALONE), GKDLoss())
    with pytest.raises(ValueError, match="teacher_logits"):
        gradient(read(ALONE), teacher=(np.zeros((2, 4, 1)), np.zeros((2, 4, 1), np.int32)))
    with pytest.raises(ValueError, match="advantages"):
        gradient(read(ALONE), GRPOLoss(), {"advantages": [1.0]})
    with pytest.raises(ValueError, match=r"loss_inputs.*'advantage'"):
        gradient(read(ALONE), GRPOLoss(), {"advantage": [1.0, 1.0]})


@pytest.mark.parametrize("key", ["atention_mask", "position_id", "loss_mask", "attn_mask"])
def test_keys_that_look_as_if_they_had_an_effect(key):
    """Others are columns of a data set, such as its `label`."""
    with pytest.raises(ValueError, match=rf"inputs\[1\] must have keys among .*, got '{key}': "):
        read([ALONE[0], ALONE[1] | {key: [1, 1, 0]}])
    read([ALONE[0] | {"label": 1, "mask": "x", "positions": None, "prompt": "1+1="}])


@pytest.mark.parametrize(
    ("tokens", "labels", "refused"),
    [
        ([5, 6, 7, 8], [5, 6, 7, 8], True),  # as transformers' models take them
        ([5, 6, 7, 8], [-100, 6, 7, 8], True),
        ([5, 6, 7, 8], [-100, 7, 8, 3], False),
        ([5, 5, 5, 5], [-100, 5, 5, 5], False),  # one token again and again: both at once
        ([5, 6, 6, 8], [-100, -100, 6, 8], False),  # a single one may be there by chance
    ],
)
def test_labels_are_the_tokens_that_follow(tokens, labels, refused):
    row = {"input_ids": tokens, "labels": labels}
    if not refused:
        read([row])
        return
    with pytest.raises(ValueError, match=r"inputs\[0\]\['labels'\] must be .*: shift them"):
        read([row])


@pytest.mark.parametrize("row", [None, [1.0, None, 1.0]])
def test_numbers_that_are_missing(row):
    with pytest.raises(TypeError, match=r"advantages\[1\] must be numbers, got None"):
        gradient(read(ALONE), GRPOLoss(), {"advantages": [0.5, row]})


def test_a_loss_of_pairs_is_given_pairs():
    """Of five sequences the last one would be compared with the padding that makes them six."""
    with pytest.raises(ValueError, match=r"rows must be an even number .* got 5"):
        gradient(read(2 * ALONE + ALONE[:1]), SimPOLoss())
    with pytest.raises(ValueError, match=r"micro_batch_size must be an even number .* got 1"):
        gradient(read(ALONE), DPOLoss(), micro_batch_size=1)
    losses, _, _ = gradient(read(2 * ALONE), SimPOLoss(), micro_batch_size=2)
    assert len(losses) == 2


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", each([1, None]))
def test_the_loss_says_how_many_tokens_of_the_teacher_count(micro_batch_size):
    logits = np.random.default_rng(0).normal(size=(2, 4, 48)).astype(np.float32)
    options = {"micro_batch_size": micro_batch_size}
    expected = gradient(read(ALONE), GKDLoss(), teacher=largest_logits(logits, 3), **options)
    values, tokens = largest_logits(logits)
    shuffled = values[..., ::-1], tokens[..., ::-1]  # servers list the drawn token first
    cut = gradient(read(ALONE), GKDLoss(topk=3), teacher=shuffled, **options)
    np.testing.assert_allclose(cut[0], expected[0], rtol=1e-5)
    full = gradient(read(ALONE), GKDLoss(), teacher=(values, tokens), **options)
    assert not np.allclose(full[0], expected[0], rtol=1e-2)


def rows_of(*sizes):
    return [{"input_ids": [n] * size, "id": n} for n, size in enumerate(sizes)]


def test_rows_are_packed_once_each_the_longest_first():
    """A row that does not fit is one by itself."""
    packed = list(pack_features(rows_of(3, 12, 4, 2), 8))
    assert [row["id"] for row in packed] == [[1], [2, 0], [3]]
    assert packed[1]["input_ids"] == [2] * 4 + [0] * 3
    assert packed[1]["position_ids"] == [0, 1, 2, 3, 0, 1, 2]
    assert list(pack_features([])) == []
    scores = score_features(params_of("qwen3"), read(list(pack_features(ALONE))), CONFIG)
    alone = score_features(params_of("qwen3"), read(ALONE), CONFIG)
    np.testing.assert_allclose(scores["logps"][0, 4:], alone["logps"][1, :3], atol=1e-6)


def test_columns_of_packed_rows():
    features = [{"input_ids": np.array([5, 6]), "n": []}, {"input_ids": np.array([7]), "n": [1]}]
    (row,) = pack_features(features)
    assert row == {"input_ids": [5, 6, 7], "n": [1], "position_ids": [0, 1, 0]}
    labelled = {"input_ids": [5, 6], "labels": [6, -100]}
    for rows in ([{"input_ids": [7]}, labelled], [labelled, {"input_ids": [7]}]):
        with pytest.raises(ValueError, match="same columns"):
            list(pack_features(rows))


def test_packed_rows_are_packed_again():
    """Their sequences stay apart, and padding is not counted."""
    (once,) = pack_features(rows_of(1, 2))
    padded = {"input_ids": [9, 9, 8, 8], "id": 2, "attention_mask": [0, 0, 1, 1]}
    twice = list(pack_features([once, {"input_ids": [7], "id": 3, "position_ids": [0]}]))
    assert twice[0]["position_ids"] == [0, 1, 0, 0]
    unpadded = {"input_ids": [6, 7], "id": 1, "attention_mask": np.array([1, 1])}
    rows = read(list(pack_features([unpadded, padded, padded])))
    assert [piece.feature["attention_mask"].sum() for piece in rows.pieces] == [2, 2, 2]


@pytest.mark.parametrize("positions", [[2, 3], [0]])
def test_positions_of_packed_rows_start_at_0(positions):
    row = {"input_ids": [5, 6], "position_ids": positions}
    with pytest.raises(ValueError, match="position_ids"):
        list(pack_features([row]))


@pytest.mark.parametrize("name", ["max_length", "buffer"])
def test_nothing_is_packed_into_rows_of_no_length_or_from_no_rows(name):
    with pytest.raises(ValueError, match=name):
        list(pack_features(rows_of(3), **{name: 0}))


@pytest.mark.parametrize(
    ("row", "error", "name"),
    [
        ({"input_ids": [1, 2], "labels": [1]}, ValueError, "labels"),
        ({"input_ids": [1, 2], "attention_mask": [1] * 3}, ValueError, "attention_mask"),
        ({"labels": [1]}, TypeError, "input_ids"),
        ("12", TypeError, "input_ids"),
    ],
)
def test_columns_of_packed_rows_must_not_be_shifted(row, error, name):
    """The labels of the second row would have been those of other tokens."""
    other = {"input_ids": [3], "labels": [3, 2]} if "labels" in row else {"input_ids": [3]}
    with pytest.raises(error, match=rf"^rows must have '{name}'"):
        list(pack_features([row, other], 8))


def test_of_a_stream_the_last_packed_row_waits_for_more():
    unread = iter(rows_of(4, 4, 4, 4, 4))
    packed = pack_features(unread, 8, buffer=3)
    assert next(packed)["id"] == [0, 1] and [row["id"] for row in unread] == [3, 4]
    packed = pack_features(rows_of(4, 4, 4, 4, 4), 8, buffer=3)
    assert [row["id"] for row in packed] == [[0, 1], [2, 3], [4]]
