"""Twinkle's sampler on a vLLM server: what it sends, and what it makes of answers."""

import asyncio
import ssl
import sys
from unittest import mock

import numpy as np
import pytest

from twinkle_jax.data import SamplingParams
from twinkle_jax.sampler import ServerError, vLLMSampler
from twinkle_jax.sampler.vllm_server import read_server_url
from twinkle_jax.twinkle.model import TransformersModel
from twinkle_jax.twinkle.model.transformers.moe.router_replay import RouterReplayAction
from twinkle_jax.twinkle.sampler import vLLMSampler as TwinkleSampler

pytest.importorskip("safetensors", reason="pip install 'twinkle-jax[checkpoints]'")
pytest.importorskip("tokenizers", reason="pip install 'twinkle-jax[data]'")

from tests.sampler.responses import (
    CHATS,
    assert_whole,
    gap,
    kinds_of,
    logprobs_of,
    of_drawn,
    policy_logprobs,
    tokens_of,
)
from tests.sampler.vllm.fake_server import (
    ROOM,
    FakeServer,
    odd_experts,
    send,
    write_checkpoint,
)

COMPLETIONS = "/v1/completions"


@pytest.fixture
def sampler(server, checkpoint):
    return vLLMSampler(model_id=checkpoint, base_url=server.url + "/v1", timeout=60)


@pytest.fixture(scope="module")
def actor(checkpoint):
    return TransformersModel(model_id=checkpoint)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_sequences_hold_what_training_needs(sampler, actor, temperature):
    params = SamplingParams(max_tokens=6, temperature=temperature)
    response = sampler.sample(CHATS, params, num_samples=3)
    assert [len(one.sequences) for one in response] == [3, 3]
    assert_whole(response, sampler.template.tokenizer, most=6)
    assert gap(response, actor, temperature) < 1e-5


def test_nothing_is_left_to_the_server(sampler, server):
    options = {"max_tokens": 4, "temperature": 0.5, "top_k": 3, "top_p": 0.8, "min_p": 0.1}
    asked = {**options, "repetition_penalty": 1.5, "stop": ["+3", "<|user|>"]}
    sampler.sample("12", asked, logprobs_kind="sampling")
    body = server.asked[-1][1]
    tokenizer = sampler.template.tokenizer
    assert body.items() >= {**options, "repetition_penalty": 1.5, "n": 1, "logprobs": 0}.items()
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
    for drawn, *others in one.sequences[0].logprobs:
        assert drawn[0] not in dict(others) and len(others) in (1, 2)
    for alone in (None, 0, 1):  # 1 is what Twinkle's scripts pass: the drawn token's
        seq = sampler.sample("12+", {"max_tokens": 3, "logprobs": alone})[0].sequences[0]
        assert [[pair[0] for pair in pairs] for pairs in seq.logprobs] == [[x] for x in seq.tokens]
    ids = one.prompt_token_ids
    scored = actor.forward_only(inputs=[{"input_ids": ids}])["logps"][0]
    assert one.prompt_logprobs[0] is None
    np.testing.assert_allclose(one.prompt_logprobs[1:], scored[: len(ids) - 1], atol=1e-5)
    logits = actor.forward_only(inputs=[{"input_ids": ids}], return_logits=True)["logits"][0]
    asked["prompt_logprobs"] = 3
    for top, response in ((1, one), (3, sampler.sample("12+", asked)[0])):
        assert response.topk_prompt_logprobs[0] is None
        listed = [[token for token, _ in row] for row in response.topk_prompt_logprobs[1:]]
        assert listed == np.argsort(-logits[: len(ids) - 1])[:, :top].tolist()
    scored = sampler.sample("12+", {"max_tokens": 0, "prompt_logprobs": 0})[0]
    assert scored.prompt_logprobs == one.prompt_logprobs
    assert [sequence.tokens for sequence in scored.sequences] == [[]]
    np.testing.assert_array_equal(scored.sequences[0].new_input_feature["input_ids"], ids)


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
    one = sampler.sample("12", {"max_tokens": 3, "logprobs": 2, "seed": 4})[0]
    assert all(7 not in dict(pairs) for pairs in one.sequences[0].logprobs)


@pytest.mark.parametrize(
    ("tokens", "text"), [([8, 9, 17], "1"), ([8, 9, 10], "123")], ids=["seen", "unseen by us"]
)
def test_a_completion_ends_behind_a_stop_string(sampler, server, tokens, text):
    def stops(answer):  # as vLLM does: tokens up to the string, and what it was
        for choice in answer["choices"]:
            choice.update(token_ids=tokens, finish_reason="stop", stop_reason="2+")
            choice["logprobs"] = {"token_logprobs": [-1.0] * 3}
        return answer

    sampler.sample("1", {"max_tokens": 1})
    server.alter[COMPLETIONS] = stops
    seq = sampler.sample("1", SamplingParams(max_tokens=9, stop="2+"))[0].sequences[0]
    assert (seq.decoded, seq.tokens, seq.stop_reason) == (text, tokens, "stop")
    if text == "1":
        shown = SamplingParams(max_tokens=9, stop="2+", include_stop_str_in_output=True)
        assert sampler.sample("1", shown)[0].sequences[0].decoded == "12+"


def test_the_server_may_have_less_room(sampler, server):
    server.max_model_len = 10
    one = sampler.sample({"input_ids": [8] * 6}, {"stop": [2]})[0].sequences[0]
    assert len(one.tokens) <= 4 and server.asked[-1][1]["max_tokens"] == 4
    bodies = [body for path, body in server.asked if path == COMPLETIONS]
    assert all(len(body["prompt"]) + body["max_tokens"] <= 10 for body in bodies)
    with pytest.raises(ValueError, match=r"inputs\[1\] must"):
        sampler.sample([{"input_ids": [8]}, {"input_ids": [8] * 11}])


BAD = [
    ("inputs", {"inputs": []}, ValueError),
    (r"inputs\[0\]", {"inputs": ["1" * 70]}, ValueError),
    ("temperature", {"sampling_params": {"temperature": 2.5}}, ValueError),
    ("temperature", {"sampling_params": {"temperature": 0.005}}, ValueError),
    ("seed", {"sampling_params": {"seed": 2**63}}, ValueError),
    ("logprobs", {"sampling_params": {"logprobs": 20}}, ValueError),
    ("prompt_logprobs", {"sampling_params": {"prompt_logprobs": 20}}, ValueError),
    ("stop", {"sampling_params": {"stop": "x"}}, ValueError),
    ("sampling_params", {"sampling_params": 3}, TypeError),
    ("num_samples", {"num_samples": 0}, ValueError),
    ("logprobs_kind", {"logprobs_kind": "raw"}, ValueError),
]


@pytest.mark.parametrize(("name", "change", "error"), BAD)
def test_errors_name_the_argument_before_the_server_is_asked(sampler, server, name, change, error):
    with pytest.raises(error, match=f"{name} must"):
        sampler.sample(**{"inputs": CHATS, **change})
    assert server.asked == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("base_url", "localhost:8000"),
        ("base_url", "http://x:y"),
        ("base_url", "http://x:99999"),
        ("base_url", 8000),
        ("base_url", "http://x?y"),
        ("base_url", "http://me:secret@x"),
        ("api_key", "secret\n"),
        ("api_key", "secret€"),
        ("retries", -1),
        ("timeout", 0),
        ("tolerance", float("nan")),
        ("max_length", 1),
    ],
)
def test_a_sampler_names_the_argument_that_it_refuses(checkpoint, name, value):
    with pytest.raises(ValueError, match=f"{name} must") as caught:
        vLLMSampler(**{"model_id": checkpoint, "base_url": "http://127.0.0.1:1", name: value})
    assert "secret" not in str(caught.value)


FILTERS = [{"top_p": 0.6}, {"top_k": 3}, {"min_p": 0.3}, {"repetition_penalty": 2.0}]
RAW, PROCESSED = "raw_logprobs", "processed_logprobs"


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_leave_the_policys_log_probabilities_at_temperature_1(
    sampler, server, actor, filters
):
    server.logprobs_mode = RAW
    asked = {"max_tokens": 6, "seed": 1, **filters}
    response = sampler.sample("12", asked, num_samples=4)
    assert kinds_of(response) == {"policy"}
    assert gap(response, actor) < 1e-5


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_renormalised_log_probabilities_are_never_called_the_policys(
    sampler, server, actor, filters, temperature
):
    asked = {"max_tokens": 6, "seed": 1, "temperature": temperature, **filters}
    error = (ServerError, "--logprobs-mode raw_logprobs$")
    if temperature != 1:
        error = (ValueError, "temperature must")
    with pytest.raises(error[0], match=error[1]):
        sampler.sample("12", asked)
    response = sampler.sample("12", asked, num_samples=4, logprobs_kind="sampling")
    assert kinds_of(response) == {"sampling"}
    assert gap(response, actor, temperature) > 0.1


@pytest.mark.parametrize(
    ("mode", "params", "kind", "fits"),
    [
        (RAW, {}, "policy", True),
        (RAW, {"temperature": 0}, "policy", True),
        (RAW, {"temperature": 0, "top_p": 0.5, "repetition_penalty": 2.0}, "policy", True),
        (RAW, {"temperature": 0.7}, "policy", False),
        (RAW, {}, "sampling", True),
        (RAW, {"top_k": 19}, "sampling", True),
        (RAW, {"top_k": 18}, "sampling", False),
        (RAW, {"temperature": 0.7}, "sampling", False),
        (RAW, {"temperature": 0, "repetition_penalty": 2.0}, "sampling", True),
        (PROCESSED, {"top_k": 19, "temperature": 0.7}, "policy", True),
        (PROCESSED, {"temperature": 0, "top_k": 2}, "policy", True),
        (PROCESSED, {"temperature": 0, "repetition_penalty": 2.0}, "policy", False),
        (PROCESSED, {"temperature": 0, "repetition_penalty": 2.0}, "sampling", True),
        (RAW, {"temperature": 0.7, "min_p": 0.3}, None, True),
        (PROCESSED, {"temperature": 0.7, "min_p": 0.3}, None, True),
    ],
)
def test_a_server_is_used_if_it_has_the_log_probabilities(
    sampler, server, actor, mode, params, kind, fits
):
    server.logprobs_mode = mode
    asked = {"max_tokens": 6, "seed": 1, **params}
    if not fits:
        other = {RAW: PROCESSED, PROCESSED: RAW}[mode]
        for _ in range(2):
            with pytest.raises(ServerError, match=f"{mode}.* --logprobs-mode {other}"):
                sampler.sample("12", asked, logprobs_kind=kind)
        return
    response = sampler.sample("12", asked, num_samples=2, logprobs_kind=kind)
    assert kinds_of(response) == {kind}
    if kind is None:
        assert all(seq.logprobs is None for seq in response[0].sequences)
        return
    expected = policy_logprobs(actor, response, params.get("temperature") or 1.0)
    if kind == "sampling" and params.get("temperature") == 0:
        expected = 0 * expected
    np.testing.assert_allclose(logprobs_of(response), expected, atol=1e-5)


@pytest.mark.parametrize("shift", [0.0, 30.0, -2.0])
def test_a_server_that_gives_logits_is_refused(sampler, server, shift):
    server.logprobs_mode, server.shift = "raw_logits", shift
    with pytest.raises(ServerError, match="logprobs-mode"):
        sampler.sample("12", {"max_tokens": 1})


def test_the_mode_is_asked_for_once_and_again_after_an_error(sampler, server):
    server.take_over[COMPLETIONS] = lambda handler: send(handler, 400, b"no") or True
    with pytest.raises(ServerError):
        sampler.sample("12", {"max_tokens": 1})
    server.take_over.clear()
    for _ in range(2):
        sampler.sample("12", {"max_tokens": 1})
    forced = [body for _, body in server.asked if body and "allowed_token_ids" in body]
    assert len(forced) in (3, 4)  # two of a probe; the first error may have ended the other one


def test_a_call_inside_an_event_loop(sampler):
    async def cell():
        return sampler.sample("12", {"max_tokens": 2})

    assert tokens_of(asyncio.run(cell()))


def test_the_key_is_sent_and_not_shown(server, checkpoint):
    seen = []

    def look(handler):
        seen.append(handler.headers["Authorization"])
        return False

    server.take_over[COMPLETIONS] = look
    server.alter["/v1/models"] = lambda answer: {"data": []}
    sampler = vLLMSampler(model_id=checkpoint, base_url=server.url, api_key="secret")
    with pytest.raises(ServerError, match="model") as caught:
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
    ("base_url", "url"),
    [
        ("http://gpu:8000", "http://gpu:8000"),
        ("http://gpu:8000/v1/", "http://gpu:8000"),
        ("http://gpu", "http://gpu"),
        ("https://gpu/vllm/v1", "https://gpu/vllm"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses(base_url, url):
    assert read_server_url(base_url) == url


def test_the_environments_proxies_and_passwords_are_not_used(
    server, checkpoint, monkeypatch, tmp_path
):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    headers = []
    server.take_over["/v1/models"] = lambda handler: headers.append(handler.headers)
    sampler = vLLMSampler(model_id=checkpoint, base_url=server.url, retries=0)
    assert tokens_of(sampler.sample("12", {"max_tokens": 1}))
    assert [one["Authorization"] for one in headers] == [None]


def test_a_missing_httpx_is_named_with_its_extra(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ImportError, match=r"\[server\]"):
        vLLMSampler(model_id=checkpoint, base_url="http://127.0.0.1:1")


def test_a_server_that_does_not_speak_tls(server, checkpoint):
    url = server.url.replace("http:", "https:")
    sampler = vLLMSampler(model_id=checkpoint, base_url=url, retries=0)
    with pytest.raises(ServerError, match=f"{url} .*SSL"):
        sampler.sample("12")


def test_certificates_are_read_once(server, checkpoint, monkeypatch):
    read = mock.Mock(side_effect=ssl.create_default_context)
    monkeypatch.setattr(ssl, "create_default_context", read)
    for _ in range(2):
        vLLMSampler(model_id=checkpoint, base_url=server.url).sample("12", {"max_tokens": 1})
    assert read.call_count <= 1


@pytest.mark.slow
def test_sequences_have_the_experts_that_the_server_chose(tmp_path):
    """Trained through them, tokens have the log-probabilities of the sampler."""
    place = write_checkpoint(tmp_path / "mixture", name="qwen3_moe")
    actor = TransformersModel(model_id=place, enable_router_replay=True)
    with FakeServer(place) as server:
        server.experts = True
        sampler = vLLMSampler(model_id=place, base_url=server.url, return_routed_experts=True)
        prompts = [{"input_ids": [5, 6, 7], "attention_mask": [0, 1, 1]}, {"input_ids": [8]}]
        response = sampler.sample(prompts, SamplingParams(max_tokens=6), num_samples=2)
        plain = vLLMSampler(model_id=place, base_url=server.url).sample(prompts)
        engine = {"enable_return_routed_experts": True}
        twinkles = TwinkleSampler(model_id=place, base_url=server.url, engine_args=engine)
        named = twinkles.sample(prompts, SamplingParams(max_tokens=6), num_samples=2)
    assert "routed_experts" not in plain[0].sequences[0].new_input_feature
    for one, other in zip(named.inputs, response.inputs, strict=True):
        np.testing.assert_array_equal(one["routed_experts"], other["routed_experts"])
    for feature in response.inputs:
        kept = np.flatnonzero(feature.get("attention_mask", np.ones(len(feature["input_ids"]))))
        tokens = np.asarray(feature["input_ids"])[kept]
        experts = feature["routed_experts"]
        assert len(experts) == len(feature["input_ids"])
        expected = odd_experts(actor.config, tokens[None])[0]
        np.testing.assert_array_equal(experts[kept[:-1]], expected[:-1])
        assert (experts[kept[-1]] == -1).all()
    assert (response.inputs[0]["routed_experts"][0] == -1).all()
    replay = {"router_replay_action": RouterReplayAction.REPLAY_FORWARD}
    scored = actor.forward_only(inputs=response.inputs, **replay)["logps"]
    drawn = np.concatenate(of_drawn(response, scored))
    assert np.abs(logprobs_of(response) - drawn).max() < 1e-5
    assert gap(response, actor) > 1e-2


def test_a_model_without_experts_has_none_to_return(checkpoint, server):
    with pytest.raises(ValueError, match="return_routed_experts"):
        vLLMSampler(model_id=checkpoint, base_url=server.url, return_routed_experts=True)
