"""Calls of samplers: prompts at their limits, stops, and where a completion is cut."""

import dataclasses
import json

import pytest

from tests.data.chats import llama_tokenizer
from tests.model.families import config_of
from twinkle_jax.data import SamplingParams, Template, small_tokenizer
from twinkle_jax.sampler.requests import DrawnSequence, longest_row, make_responses, read_call

pytest.importorskip("tokenizers", reason="pip install 'twinkle-jax[data]'")

TEMPLATE = Template(small_tokenizer("0123456789+="))
VOCAB = len(TEMPLATE.tokenizer)


def read(inputs, number=1, **params):
    params = SamplingParams(**{"max_tokens": 9, **params})
    return read_call(inputs, params, number, TEMPLATE, "policy", vocab=VOCAB, max_length=8)


def test_a_prompt_leaves_room_for_a_token_and_is_in_the_vocabulary():
    assert len(read([{"input_ids": [VOCAB - 1] * 7}]).features) == 1
    for wrong in ([5] * 8, [VOCAB], [-1]):
        with pytest.raises(ValueError, match=r"inputs\[0\] must"):
            read([{"input_ids": wrong}])


def test_a_text_begins_as_the_tokenizer_begins_texts():
    template = Template(llama_tokenizer())
    params = SamplingParams(max_tokens=9)
    call = read_call(["5 + 2"], params, 1, template, "policy", vocab=400, max_length=32)
    tokens = call.features[0]["input_ids"].tolist()
    assert tokens == [template.tokenizer.bos_token_id, *template.tokenizer.encode("5 + 2")]
    assert read(["1+1="]).features[0]["input_ids"].tolist() == TEMPLATE.tokenizer.encode("1+1=")


def test_the_number_of_samples_may_be_a_parameter():
    assert read("1", num_samples=4).num_samples == 4
    assert read("1", 3, num_samples=4).num_samples == 3


@pytest.mark.parametrize(
    ("stops", "end", "shown", "text", "reason"),
    [
        (["+3", "2+"], "length", False, "1", "stop"),  # the string that begins first
        (["+3", "2+"], "length", True, "12+", "stop"),
        (["2+", "12+"], "length", False, "", "stop"),  # both end here; "12+" begins first
        (["2+"], "token", False, "1", "stop"),  # the string came before the token
        (["9"], "token", False, "12+3", "stop"),  # without the token
        (["9"], "token", True, "12+34", "stop"),
        (["9"], "length", False, "12+34", "length"),
    ],
)
def test_where_a_completion_is_cut(stops, end, shown, text, reason):
    call = read("1", stop=stops, include_stop_str_in_output=shown)
    tokens = TEMPLATE.tokenizer.encode("12+34")
    [response] = make_responses(call, [DrawnSequence(tokens, [[(x, -1.0)] for x in tokens], end)])
    [sequence] = response.sequences
    assert (sequence.decoded, sequence.stop_reason) == (text, reason)
    assert len(sequence.logprobs) == len(sequence.tokens)


@pytest.mark.parametrize(("length", "expected"), [(64, 64), (32_768, 4096), (None, 4096)])
def test_a_row_is_as_long_as_the_checkpoint_allows_up_to_4096(length, expected):
    original = json.dumps({"text_config": {"max_position_embeddings": length}})
    config = dataclasses.replace(config_of("qwen3"), original=original)
    assert longest_row(None, config) == expected and longest_row(5, config) == 5


def test_no_row_is_longer_than_one_list_of_factors_goes():
    config = config_of("phi3")  # made for 256 tokens, with another list of factors from 129 on
    assert longest_row(None, config) == 128 == longest_row(128, config)
    with pytest.raises(ValueError, match=r"^max_length must be at most 128, .* got 129"):
        longest_row(129, config)
