"""Responses of a sampler: Twinkle's fields, and what is gathered from them to train on."""

import dataclasses

import pytest

from twinkle_jax.data import SampledSequence, SampleResponse, SampleResponses


def test_the_fields_are_twinkles_and_the_kind_of_logprobs():
    names = [field.name for field in dataclasses.fields(SampledSequence)]
    twinkles = ["stop_reason", "tokens", "logprobs", "decoded", "new_input_feature"]
    assert names == [*twinkles, "logprobs_kind"]


def _sequence(word, **more):
    feature = {"input_ids": [1, 2], "labels": [2, -100], **more}
    if word is not None:
        feature["messages"] = [{"role": "assistant", "content": word}]
    return SampledSequence("stop", [2], new_input_feature=feature)


def test_inputs_and_trajectories_of_all_responses():
    truth = [("ground_truth", "7")]
    responses = SampleResponses(
        [
            SampleResponse([_sequence("a", user_data=truth), _sequence("b")]),
            SampleResponse([_sequence("c")]),
        ]
    )
    assert len(responses.inputs) == 3 and responses.inputs[0]["input_ids"] == [1, 2]
    words = [t["messages"][-1]["content"] for t in responses.trajectories]
    assert words == ["a", "b", "c"]
    assert responses.trajectories[0]["user_data"] == truth
    assert [t["completion_length"] for t in responses.trajectories] == [1, 1, 1]
    assert "input_ids" not in responses.trajectories[0]


def test_responses_that_cannot_be_trained_on():
    nothing = SampleResponses([SampleResponse([_sequence("a"), SampledSequence("stop", [2])])])
    with pytest.raises(ValueError, match=r"sequences \[1\] must have a new_input_feature"):
        _ = nothing.inputs
    silent = SampleResponses([SampleResponse([_sequence(None)])])
    with pytest.raises(ValueError, match="sequence 0 must have messages, got"):
        _ = silent.trajectories
