"""Rows that hold several sequences: each computes what it computes alone, and in transformers."""

import numpy as np
import pytest

from tests.model.families import config_of, each, params_of
from tests.twinkle.rows import INPUTS, OLD, ROWS, SIDE, assert_same, gradient
from twinkle_jax.model import Decoder
from twinkle_jax.twinkle.model import TransformersModel


def packed(*features):
    """One row, in which positions start again."""
    row = {key: [x for f in features for x in f[key]] for key in features[0]}
    return row | {"position_ids": [t for f in features for t in range(len(f["input_ids"]))]}


@pytest.mark.parametrize("name", each(["qwen3", "qwen3_5_text"]))
def test_scores_are_those_of_the_sequences_alone(name):
    model = TransformersModel(Decoder(config_of(name), params_of(name)))
    everything = {"return_entropy": True, "return_logits": True}
    alone = model.forward_only(inputs=INPUTS, **everything)
    together = model.forward_only(inputs=[INPUTS[1], packed(INPUTS[0], INPUTS[2])], **everything)
    for key, values in together.items():
        assert values.shape[:2] == (2, 9)
        places = {1: values[0, :3], 0: values[1, :5], 2: values[1, 5:]}
        for row, scores_of_row in places.items():
            np.testing.assert_allclose(
                scores_of_row, alone[key][row, : len(scores_of_row)], atol=1e-5
            )
        assert not values[0, 3:].any()


def test_without_labels_no_token_is_scored_across_the_boundary(model):
    joined = packed(*({"input_ids": row} for row in ROWS))
    scores = model.forward_only(inputs=joined)["logps"][0]
    ends = np.cumsum([len(row) for row in ROWS]) - 1
    assert not scores[ends].any() and np.count_nonzero(scores) == len(scores) - 3


@pytest.mark.slow
def test_loss_and_gradient_are_those_of_the_sequences_alone(model):
    """Also of a loss that weighs sequences alike, for one advantage a sequence."""
    loss = model.forward_backward(inputs=INPUTS, **SIDE)["loss"]
    alone = gradient(model)
    model.zero_grad()
    row = packed(*INPUTS)
    again = model.forward_backward(inputs=[row], **SIDE)["loss"]
    np.testing.assert_allclose(again, loss, rtol=1e-6)
    assert_same(gradient(model), alone)
    model.zero_grad()
    # Numbers that were scored in the row itself go back as they came.
    numbers = [x for one in OLD for x in one]
    advantages = np.repeat(SIDE["advantages"], [5, 3, 4])[None]
    model.forward_backward(inputs=[row], advantages=advantages, old_logps=[numbers])
    assert_same(gradient(model), alone)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_transformers_computes_the_same(checkpoint, model):
    get = "pip install 'twinkle-jax[test,oracle]'"
    torch = pytest.importorskip("torch", reason=get)
    transformers = pytest.importorskip("transformers", reason=get)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    row = packed(*INPUTS)
    with torch.no_grad():
        logits = theirs(
            input_ids=torch.tensor([row["input_ids"]]),
            position_ids=torch.tensor([row["position_ids"]]),
            use_cache=False,  # with one it would take the row for one sequence
        ).logits[0]
    ours = model.forward_only(inputs=row, return_logits=True)["logits"][0]
    np.testing.assert_allclose(ours, logits.numpy(), atol=1e-4)
    # and across the boundary it is another number
    plain = row | {"position_ids": None}
    apart = model.forward_only(inputs=plain, return_logits=True)["logits"][0] - ours
    assert np.abs(apart[5:]).max() > 0.01 and np.abs(apart[:5]).max() < 1e-5
