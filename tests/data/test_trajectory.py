"""Conversations, and what samplers take and return."""

import dataclasses

import numpy as np
import pytest

from twinkle_jax.data import (
    SampledSequence,
    SampleResponse,
    SampleResponses,
    SamplingParams,
    completion_text,
    message_text,
    user_data_get,
)


@pytest.mark.parametrize("data", [[("a", 1), ("b", 2), ("a", 3)], {"a": 1, "b": 2}, [["a", 1]]])
def test_user_data_is_pairs_or_a_dictionary(data):
    assert user_data_get(data, "a") == 1
    assert user_data_get(data, "c", "none") == "none"
    assert user_data_get(None, "a") is None


@pytest.mark.parametrize("data", [["ab"], [("a",)], [5]])
def test_user_data_that_is_not_pairs(data):
    with pytest.raises(ValueError, match=r"^user_data"):
        user_data_get(data, "a")


def test_the_text_of_a_message():
    parts = [{"type": "text", "text": "a"}, "b", {"text": "c"}]
    assert message_text({"content": parts}) == "abc"
    assert message_text({"content": None}) == message_text({}) == ""
    with pytest.raises(ValueError, match="content"):
        message_text({"content": [{"type": "image"}]})


def test_the_completion_is_the_last_of_the_assistant():
    turns = [
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    assert completion_text({"messages": turns}) == "two"
    assert completion_text({"messages": turns[2:]}) == ""
    assert completion_text({}) == ""


def test_the_parameters_are_twinkles():
    assert [field.name for field in dataclasses.fields(SamplingParams)] == [
        "max_tokens",
        "seed",
        "stop",
        "include_stop_str_in_output",
        "temperature",
        "top_k",
        "top_p",
        "repetition_penalty",
        "logprobs",
        "prompt_logprobs",
        "num_samples",
        "min_p",
    ]
    defaults = SamplingParams()
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (1.0, -1, 1.0)
    assert (defaults.max_tokens, defaults.stop, defaults.num_samples) == (None, None, 1)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, float("nan"), float("inf")]),
        ("top_p", [0, 1.5]),
        ("min_p", [-0.1, 1.1]),
        ("top_k", [0, -2]),
        ("max_tokens", [-1]),
        ("seed", [-1]),
        ("logprobs", [-1]),
        ("prompt_logprobs", [-1]),
        ("num_samples", [0]),
        ("repetition_penalty", [0, float("inf")]),
        ("stop", ["", ["a", ""], [5, -1]]),
    ],
)
def test_values_out_of_range(name, values):
    params = SamplingParams()
    for value in values:
        with pytest.raises(ValueError, match=f"^{name}"):
            SamplingParams(**{name: value})
        with pytest.raises(ValueError, match=f"^{name}"):
            setattr(params, name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "1"),
        ("temperature", None),
        ("temperature", True),
        ("top_p", [1]),
        ("top_k", 1.0),
        ("top_k", True),
        ("top_k", None),
        ("max_tokens", 10.0),
        ("num_samples", None),
        ("num_samples", True),
        ("stop", 5),
        ("stop", ["a", 5]),
        ("stop", [True]),
        ("include_stop_str_in_output", 1),
    ],
)
def test_values_of_another_type(name, value):
    with pytest.raises(TypeError, match=f"^{name}"):
        SamplingParams(**{name: value})


def test_what_is_accepted():
    params = SamplingParams(max_tokens=1, seed=0, stop="x", temperature=0, top_k=-1, top_p=1)
    assert params.stop == "x"
    params.stop = ("a", "b")
    assert params.stop == ["a", "b"]
    params.stop = []
    assert params.stop is None
    assert SamplingParams(stop=[2, 3]).stop == [2, 3]
    (stop,) = SamplingParams(stop=[np.int64(3)]).stop
    assert type(stop) is int and stop == 3
    assert SamplingParams(top_k=np.int64(5), top_p=np.float32(0.5)).top_k == 5


def test_from_a_dictionary():
    options = {"max_new_tokens": 8, "top_p": 0.5}
    assert SamplingParams.from_dict(options) == SamplingParams(max_tokens=8, top_p=0.5)
    assert options == {"max_new_tokens": 8, "top_p": 0.5}
    with pytest.raises(TypeError, match="num_beams"):
        SamplingParams.from_dict({"num_beams": 2})
    both = {"max_tokens": 8, "max_new_tokens": 8}
    assert SamplingParams.from_dict(both) == SamplingParams(max_tokens=8)
    with pytest.raises(ValueError, match="max_new_tokens"):
        SamplingParams.from_dict(both | {"max_new_tokens": 9})


def test_the_results_are_twinkles_with_the_kind_of_logprobs():
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
    with pytest.raises(ValueError, match=r"sequences \[1\]"):
        _ = nothing.inputs
    silent = SampleResponses([SampleResponse([_sequence(None)])])
    with pytest.raises(ValueError, match="sequence 0"):
        _ = silent.trajectories
