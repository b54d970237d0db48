"""Twinkle's sampler on a vLLM server: what it sends, and what it makes of answers."""

import numpy as np
import pytest

from twinkle_jax.data import SamplingParams, Template
from twinkle_jax.model import TransformersModel
from twinkle_jax.sampler import ServerError, vLLMSampler
from twinkle_jax.sampler.vllm.exchange import read_address

pytest.importorskip("safetensors", reason="pip install 'twinkle-jax[checkpoints]'")
pytest.importorskip("tokenizers", reason="pip install 'twinkle-jax[data]'")

from tests.sampler.vllm.fake_server import ROOM

CHATS = [
    {"messages": [{"role": "user", "content": "12+3="}], "user_data": [("ground_truth", "15")]},
    {"messages": [{"role": "user", "content": "4"}]},
]
COMPLETIONS = "/v1/completions"


@pytest.fixture
def sampler(server, checkpoint):
    return vLLMSampler(model_id=checkpoint, base_url=server.url + "/v1", timeout=60)


@pytest.fixture(scope="module")
def actor(checkpoint):
    return TransformersModel(model_id=checkpoint)


def tokens_of(response):
    return [s.tokens for one in response for s in one.sequences]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_sequences_hold_what_training_needs(sampler, actor, temperature):
    params = SamplingParams(max_tokens=6, temperature=temperature)
    response = sampler.sample(CHATS, params, num_samples=3)
    tokenizer = sampler.template.tokenizer
    assert [len(one.sequences) for one in response] == [3, 3]
    scored = iter(actor.forward_only(inputs=response.inputs, temperature=temperature)["logps"])
    for chat, one in zip(CHATS, response, strict=True):
        prompt = Template(tokenizer).encode(chat, add_generation_prompt=True)["input_ids"].tolist()
        assert one.prompt_token_ids == prompt
        for seq in one.sequences:
            feature = seq.new_input_feature
            assert feature["input_ids"].tolist() == prompt + seq.tokens
            assert feature["labels"].tolist() == [-100] * (len(prompt) - 1) + seq.tokens + [-100]
            ended = seq.tokens[-1] == tokenizer.eos_token_id
            assert seq.stop_reason == ("stop" if ended else "length")
            assert ended or len(seq.tokens) == 6
            assert seq.decoded == tokenizer.decode(seq.tokens)
            assert [pair[0][0] for pair in seq.logprobs] == seq.tokens
            row = next(scored)[np.flatnonzero(feature["labels"] != -100)]
            np.testing.assert_allclose([x[0][1] for x in seq.logprobs], row, atol=1e-5)
    assert response.trajectories[0]["user_data"] == [("ground_truth", "15")]


def test_nothing_is_left_to_the_server(sampler, server):
    given = {"max_tokens": 4, "temperature": 0.5, "top_k": 3, "top_p": 0.8, "min_p": 0.1}
    sampler.sample("12", {**given, "repetition_penalty": 1.5, "stop": ["+3", "<|user|>"]})
    body = server.asked[-1][1]
    tokenizer = sampler.template.tokenizer
    assert body.items() >= {**given, "repetition_penalty": 1.5, "n": 1, "logprobs": 0}.items()
    assert body["prompt"] == tokenizer.encode("12")
    assert body["stop"] == ["+3", "<|user|>"] and body["ignore_eos"]
    assert body["stop_token_ids"] == [1, tokenizer.backend.token_to_id("<|user|>")]
    sampler.sample("12")
    rest = server.asked[-1][1]
    assert (rest["temperature"], rest["top_k"], rest["max_tokens"]) == (1.0, 0, ROOM - 2)


def test_each_prompt_has_its_own_noise_and_a_seed_repeats_it(sampler, server, checkpoint):
    params = SamplingParams(max_tokens=6)
    first, second = (sampler.sample(["12", "12"], params) for _ in range(2))
    assert len({tuple(tokens) for tokens in tokens_of(first) + tokens_of(second)}) == 4
    resumed = vLLMSampler(model_id=checkpoint, base_url=server.url)
    resumed.calls = 1
    assert tokens_of(resumed.sample(["12", "12"], params)) == tokens_of(second)
    seeded = SamplingParams(max_tokens=6, seed=3)
    assert tokens_of(sampler.sample("12", seeded)) == tokens_of(sampler.sample("12", seeded))
    seeds = [body["seed"] for path, body in server.asked if path == COMPLETIONS]
    assert all(seed is None or 0 <= seed < 2**62 for seed in seeds)
    free = vLLMSampler(model_id=checkpoint, base_url=server.url, seed=None)
    free.sample("12", params)
    assert server.asked[-1][1]["seed"] is None


def test_what_is_certain_is_asked_for_once(sampler, server):
    response = sampler.sample("12", {"max_tokens": 3, "temperature": 0}, num_samples=3)
    assert server.asked[-1][1]["n"] == 1
    assert len(set(map(tuple, tokens_of(response)))) == 1 and len(tokens_of(response)) == 3


def test_further_log_probabilities_are_there_when_asked_for(sampler, actor):
    asked = {"max_tokens": 3, "logprobs": 2, "prompt_logprobs": 1}
    one = sampler.sample("12+", asked)[0]
    for own, *others in one.sequences[0].logprobs:
        assert own[0] not in dict(others) and len(others) in (1, 2)
    ids = one.prompt_token_ids
    scored = actor.forward_only(inputs=[{"input_ids": ids}])["logps"][0]
    assert one.prompt_logprobs[0] is None
    np.testing.assert_allclose(one.prompt_logprobs[1:], scored[: len(ids) - 1], atol=1e-5)
    assert [row and row[0][0] for row in one.topk_prompt_logprobs] == [None, *ids[1:]]
    assert sampler.sample("12+", {"max_tokens": 3, "prompt_logprobs": 0})[0].prompt_logprobs


def test_choices_may_come_in_any_order(sampler, server):
    asked = {"max_tokens": 4, "seed": 1}
    calm = sampler.sample("12", asked, num_samples=4)
    server.alter[COMPLETIONS] = lambda answer: {**answer, "choices": answer["choices"][::-1]}
    turned = sampler.sample("12", asked, num_samples=4)
    assert tokens_of(calm) == tokens_of(turned) and len(set(map(tuple, tokens_of(calm)))) > 1


def test_what_filters_have_dropped_is_not_listed(sampler, server):
    def add(answer):  # vLLM writes -9999 for the logarithm of 0
        for choice in answer["choices"]:
            for tops in choice["logprobs"]["top_logprobs"]:
                tops["token_id:7"] = -9999.0
        return answer

    server.alter[COMPLETIONS] = add
    one = sampler.sample("12", {"max_tokens": 3, "logprobs": 1, "seed": 4})[0]
    assert all(7 not in dict(pairs) for pairs in one.sequences[0].logprobs)


def test_a_completion_ends_behind_a_stop_string(sampler, server):
    def stops(answer):  # as vLLM does: tokens up to the string, and what it was
        for choice in answer["choices"]:
            choice.update(token_ids=[8, 9, 17], finish_reason="stop", stop_reason="2+")
            choice["logprobs"] = {"token_logprobs": [-1.0] * 3}
        return answer

    sampler.sample("1", {"max_tokens": 1})
    server.alter[COMPLETIONS] = stops
    seq = sampler.sample("1", SamplingParams(max_tokens=9, stop="2+"))[0].sequences[0]
    assert (seq.decoded, seq.tokens, seq.stop_reason) == ("1", [8, 9, 17], "stop")
    shown = SamplingParams(max_tokens=9, stop="2+", include_stop_str_in_output=True)
    assert sampler.sample("1", shown)[0].sequences[0].decoded == "12+"


def test_the_server_may_see_a_stop_string_where_we_see_none(sampler, server):
    def stops(answer):
        for choice in answer["choices"]:
            choice.update(token_ids=[8, 9, 10], finish_reason="stop", stop_reason="2+")
            choice["logprobs"] = {"token_logprobs": [-1.0] * 3}
        return answer

    sampler.sample("1", {"max_tokens": 1})
    server.alter[COMPLETIONS] = stops
    seq = sampler.sample("1", SamplingParams(max_tokens=9, stop="2+"))[0].sequences[0]
    assert (seq.decoded, seq.tokens, seq.stop_reason) == ("123", [8, 9, 10], "stop")


def test_the_server_may_have_less_room(sampler, server):
    server.max_model_len = 10
    one = sampler.sample({"input_ids": [8] * 6}, {"stop": [2]})[0].sequences[0]
    assert len(one.tokens) <= 4 and server.asked[-1][1]["max_tokens"] == 4
    bodies = [body for path, body in server.asked if path == COMPLETIONS]
    assert all(len(body["prompt"]) + body["max_tokens"] <= 10 for body in bodies)
    message = r"inputs\[1\] must have fewer tokens than the server's max_model_len=10, got 11"
    with pytest.raises(ValueError, match=message):
        sampler.sample([{"input_ids": [8]}, {"input_ids": [8] * 11}])


BAD = [
    ({"inputs": []}, ValueError, "inputs must be trajectories, .* at least one"),
    ({"inputs": ["1" * 70]}, ValueError, r"inputs\[0\] must have fewer tokens than max_length=64"),
    ({"params": {"temperature": 2.5}}, ValueError, r"temperature must be 0 or in \[0.01, 2\]"),
    ({"params": {"temperature": 0.005}}, ValueError, "temperature must be 0 or in .* got 0.005"),
    ({"params": {"seed": 2**63}}, ValueError, "seed must be at most"),
    ({"params": {"logprobs": 20}}, ValueError, "logprobs must be at most 19"),
    ({"params": {"prompt_logprobs": 20}}, ValueError, "prompt_logprobs must be at most 19"),
    ({"params": {"stop": "x"}}, ValueError, "stop must be text .* got 'x'"),
    ({"params": 3}, TypeError, "sampling_params must be SamplingParams, got 3"),
    ({"num_samples": 0}, ValueError, "num_samples must be at least 1, got 0"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_what_does_not_fit_is_named_before_the_server_is_asked(
    sampler, server, change, error, message
):
    with pytest.raises(error, match=message):
        sampler.sample(
            change.get("inputs", CHATS),
            change.get("params"),
            num_samples=change.get("num_samples", 1),
        )
    assert server.asked == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_url": "localhost:8000"}, "base_url must be http://HOST:PORT .* got 'localhost:8"),
        ({"base_url": "http://x:y"}, "base_url must be http://HOST:PORT"),
        ({"base_url": "http://me:secret@x"}, "base_url must be without a name and password"),
        ({"retries": -1}, "retries must be an int of at least 0, got -1"),
        ({"timeout": 0}, "timeout must be a finite number above 0, got 0"),
        ({"tolerance": float("nan")}, "tolerance must be a finite number above 0, got nan"),
        ({"max_length": 1}, "max_length must be at least 2, got 1"),
        ({"model_id": "/nowhere"}, "path_or_id must be a directory or a hub id"),
    ],
)
def test_a_sampler_is_not_made_of_what_does_not_fit(checkpoint, change, message):
    with pytest.raises(ValueError, match=message) as caught:
        vLLMSampler(**{"model_id": checkpoint, "base_url": "http://127.0.0.1:1", **change})
    assert "secret" not in str(caught.value)


def test_log_probabilities_must_be_of_what_is_drawn_from(sampler, server):
    server.processed = False
    for _ in range(2):
        with pytest.raises(ServerError, match="start it with --logprobs-mode processed_logprobs"):
            sampler.sample("12", {"max_tokens": 1})
    server.processed = True
    sampler.sample("12", {"max_tokens": 1})


def test_the_key_is_sent_and_not_shown(server, checkpoint):
    seen = []

    def look(handler):
        seen.append(handler.headers["Authorization"])
        return False

    server.take_over[COMPLETIONS] = look
    server.alter["/v1/models"] = lambda answer: {"data": []}
    sampler = vLLMSampler(model_id=checkpoint, base_url=server.url, api_key="secret")
    with pytest.raises(ServerError, match="must answer GET /v1/models with model") as caught:
        sampler.sample("12")
    assert "secret" not in str(caught.value)
    server.alter.clear()
    sampler.sample("12", {"max_tokens": 1})
    assert set(seen) == {"Bearer secret"}


def test_a_model_may_have_another_name(server, checkpoint):
    server.alter["/v1/models"] = lambda answer: {
        "data": [{"id": "policy", "root": "/elsewhere", "max_model_len": ROOM}]
    }
    server.models["policy"] = server.models[server.name]
    named = vLLMSampler(model_id=checkpoint, base_url=server.url, served_name="policy")
    assert tokens_of(named.sample("12", {"max_tokens": 2}))
    assert server.asked[-1][1]["model"] == "policy"
    server.alter["/v1/models"] = lambda answer: {
        "data": [{"id": "policy", "root": str(checkpoint), "max_model_len": ROOM}]
    }
    assert vLLMSampler(model_id=checkpoint, base_url=server.url).sample("12", {"max_tokens": 2})
    assert server.asked[-1][1]["model"] == "policy"
    server.alter["/v1/models"] = lambda answer: {"data": [{"id": "policy"}]}
    with pytest.raises(ServerError, match=r"served_name .*got \['policy'\]"):
        vLLMSampler(model_id=checkpoint, base_url=server.url).sample("12")


@pytest.mark.parametrize(
    ("base_url", "url", "port", "prefix"),
    [
        ("http://gpu:8000", "http://gpu:8000", 8000, ""),
        ("http://gpu:8000/v1/", "http://gpu:8000", 8000, ""),
        ("http://gpu", "http://gpu", 80, ""),
        ("https://gpu/vllm/v1", "https://gpu/vllm", 443, "/vllm"),
        ("http://[::1]:8000", "http://[::1]:8000", 8000, ""),
    ],
)
def test_addresses(base_url, url, port, prefix):
    address = read_address(base_url)
    assert (address.url, address.port, address.prefix) == (url, port, prefix)
    assert (address.tls is not None) == base_url.startswith("https")


def test_a_server_that_does_not_speak_tls(server, checkpoint):
    url = server.url.replace("http:", "https:")
    sampler = vLLMSampler(model_id=checkpoint, base_url=url, retries=0)
    with pytest.raises(ServerError, match=f"{url} must answer GET /v1/models, got SSLError"):
        sampler.sample("12")
