"""Servers that are down, answer nonsense, die in the middle, or never end: an error says so."""

import gzip
import os
import signal
import socket
import threading
import time

import pytest

from tests.sampler.vllm.fake_server import FakeServer, send
from twinkle_jax.sampler import ServerError, vLLMSampler

pytest.importorskip("safetensors", reason="pip install 'twinkle-jax[checkpoints]'")
pytest.importorskip("tokenizers", reason="pip install 'twinkle-jax[data]'")

COMPLETIONS, MODELS = "/v1/completions", "/v1/models"
ASK = {"max_tokens": 2, "logprobs": 2, "prompt_logprobs": 0}


def ask(checkpoint, url, *, num_samples=2, timeout=30.0, retries=0):
    sampler = vLLMSampler(model_id=checkpoint, base_url=url, timeout=timeout, retries=retries)
    return sampler.sample(["12", "3"], ASK, num_samples=num_samples)


def test_a_server_that_is_down(checkpoint):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(
            ServerError, match=f"{url} must answer GET /v1/models, got ConnectError"
        ):
            ask(checkpoint, url, retries=1)


def test_a_server_that_ends_between_two_calls(checkpoint):
    with FakeServer(checkpoint) as server:
        sampler = vLLMSampler(model_id=checkpoint, base_url=server.url, retries=0)
        sampler.sample("12", {"max_tokens": 1})
        server.stop()
        with pytest.raises(ServerError, match="must answer GET /v1/models, got ConnectError"):
            sampler.sample("12", {"max_tokens": 1})


def test_a_connection_lost_once_is_tried_again(checkpoint, server):
    lost = []

    def lose(handler):
        if len(lost) == 3:
            return False
        lost.append(handler.path)
        kind = len(lost)
        if kind == 1:
            send(handler, 503, b"busy")
        elif kind == 2:
            send(handler, 200, b'{"choi', promised=1000)
        handler.close_connection = True
        return True

    calm = ask(checkpoint, server.url)
    server.take_over[COMPLETIONS] = lose
    troubled = ask(checkpoint, server.url, retries=3)
    assert len(lost) == 3
    tokens = [[s.tokens for one in r for s in one.sequences] for r in (calm, troubled)]
    assert tokens[0] == tokens[1]  # the same seeds: nothing is drawn twice


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_and_not_for_compressed_answers(checkpoint, server, status):
    encodings = []

    def busy_once(handler):
        encodings.append(handler.headers["Accept-Encoding"])
        return len(encodings) == 1 and (send(handler, status, b"busy") or True)

    server.take_over[MODELS] = busy_once
    ask(checkpoint, server.url, retries=1)
    assert encodings == ["identity"] * 2


def test_what_was_heard_in_all_attempts_is_said(checkpoint, server):
    answers = [(500, b"out of memory"), (503, b"engine dead")]

    def fail(handler):
        send(handler, *answers[min(len(server.asked) - 1, 1)])
        return True

    server.take_over[MODELS] = fail
    message = "got status 500: out of memory, then status 503: engine dead$"
    with pytest.raises(ServerError, match=message):
        ask(checkpoint, server.url, retries=2)
    assert len(server.asked) == 3


def test_a_refusal_is_not_repeated(checkpoint, server):
    server.take_over[COMPLETIONS] = lambda handler: send(handler, 400, b'{"message": "no"}') or True
    with pytest.raises(ServerError, match=r'for the probe .*, got status 400: .*"no"'):
        ask(checkpoint, server.url, retries=3)
    assert server.paths().count(COMPLETIONS) <= 2  # side by side, each sent once


def dying(handler):
    send(handler, 200, b'{"model"', promised=1000)
    handler.close_connection = True
    return True


def endless(handler):
    handler.send_response(200)
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(b"[" * 2**16)
    except OSError:
        return True


def endless_header(handler):
    handler.send_response(200)
    try:
        while True:
            handler.wfile.write(b"X-More: " + b"x" * 2**16 + b"\r\n")
    except OSError:
        return True


def compressed(handler):
    """A megabyte of spaces before the end, in a kilobyte."""
    handler.send_response(200)
    handler.send_header("Content-Encoding", "gzip")
    handler.end_headers()
    handler.wfile.write(gzip.compress(b"{}" + b" " * 2**20, mtime=0))
    return True


RAW = [
    (dying, r"for inputs\[\d\], got RemoteProtocolError: peer closed"),
    (endless_header, r"for inputs\[\d\], got RemoteProtocolError"),
    (compressed, r"with JSON, got b'\\x1f"),
    (endless, r"for inputs\[\d\] in at most \d+ bytes, got more"),
    (lambda h: send(h, 200, b"<html>") or True, r"for inputs\[\d\] with JSON, got b'<html>'"),
    (lambda h: send(h, 200, b"") or True, r"with JSON, got b''"),
    (lambda h: send(h, 200, b"[" * 10**5) or True, "with JSON, got b'"),
    (lambda h: send(h, 200, b"9" * 10**4) or True, "with JSON, got b'9999"),
    (lambda h: send(h, 200, b"\xff\xfe{}") or True, "with JSON, got b"),
    (lambda h: send(h, 302, b"elsewhere") or True, "got status 302: elsewhere"),
    (lambda h: h.wfile.write(b"SSH-2.0\r\n") and True, "got RemoteProtocolError"),
]


def but_the_probe(handle):
    """Misbehave only when asked for completions, not for the probe that a sampler sends before."""
    return lambda handler: "allowed_token_ids" not in handler.body and handle(handler)


@pytest.mark.parametrize(("handle", "message"), RAW)
def test_what_is_no_answer(checkpoint, server, handle, message):
    server.take_over[COMPLETIONS] = but_the_probe(handle)
    with pytest.raises(ServerError, match=message):
        ask(checkpoint, server.url)


HEADERS = b"HTTP/1.1 200 OK\r\n\r\n"
DRIPS = [(b"", b""), (HEADERS, b" "), (b"", b"HTTP/1.1 100 Continue\r\n\r\n")]


@pytest.mark.parametrize(("first", "then"), DRIPS)
@pytest.mark.parametrize("path", [MODELS, COMPLETIONS])
def test_no_call_takes_longer_than_it_may(checkpoint, server, first, then, path):
    released, waited_to_the_end = threading.Event(), []

    def drip(handler):
        try:
            handler.wfile.write(first)
            for _ in range(1000):  # 20 seconds
                if released.wait(0.02):
                    break
                handler.wfile.write(then)
                handler.wfile.flush()
            else:
                waited_to_the_end.append(path)
        except OSError:  # the sampler has gone
            pass
        handler.close_connection = True
        return True

    server.take_over[path] = drip
    with pytest.raises(ServerError, match=f"{path}.* within 0.3 seconds, got no answer"):
        ask(checkpoint, server.url, timeout=0.3, retries=5)
    assert not waited_to_the_end
    released.set()


def test_the_first_error_ends_the_other_requests(checkpoint, server):
    released, waited_to_the_end = threading.Event(), []

    def handle(handler):
        if handler.body["prompt"] == [10]:
            send(handler, 400, b"no")
            return True
        if handler.body["prompt"] != [8, 9]:
            return False
        try:
            for _ in range(1000):
                if released.wait(0.02):
                    return True
                handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            waited_to_the_end.append(handler.path)
        except OSError:
            pass
        return True

    server.take_over[COMPLETIONS] = handle
    with pytest.raises(ServerError, match=r"inputs\[1\], got status 400: no"):
        ask(checkpoint, server.url)
    assert not waited_to_the_end
    released.set()


@pytest.mark.exhaustive  # in a worker that ran hundreds of others, SIGINT has not come through
def test_an_interrupted_call_ends_at_once(checkpoint, server):
    reached, ended = threading.Event(), threading.Event()

    def wait(handler):
        reached.set()
        ended.wait(20)
        handler.close_connection = True
        return True

    def interrupt():
        reached.wait(20)
        for _ in range(3):  # Python ignores one that comes while a finalizer runs
            os.kill(os.getpid(), signal.SIGINT)
            if ended.wait(4):
                return

    server.take_over[MODELS] = wait
    interrupting = threading.Thread(target=interrupt)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupting.start()
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            ask(checkpoint, server.url)
        assert time.monotonic() - start < 15
    finally:
        ended.set()
        interrupting.join()  # so that none comes later
        signal.signal(signal.SIGINT, signal.SIG_DFL if handler is None else handler)


def change(*path, value):
    """Put a value somewhere in the second choice of an answer, or remove what is there."""

    def alter(answer):
        if len(answer["choices"]) < 2:
            return answer
        place = answer if path[0] in answer else answer["choices"][1]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value(place[path[-1]])
        return answer

    return alter


def of(value):
    return lambda old: value


def one_token_less(answer):
    """Say that the limit ended what is shorter."""
    for choice in answer["choices"][1:]:
        del choice["token_ids"][1:]
        for scores in choice["logprobs"].values():
            del scores[1:]
    return answer


LOGPROBS = ("logprobs", "token_logprobs")
ALTERED = [
    (change("model", value=of("another")), "with model '.*', got 'another'"),
    (change("choices", value=lambda x: x[:1]), r"with 2 choices, numbered from 0, got \[0\]"),
    (change("choices", value=lambda x: [*x, x[0]]), r"with 2 choices, .* got \[0, 1, 0\]"),
    (change("choices", value=of(None)), "with a list of choices, got None"),
    (change("choices", value=of([1, 2])), "with choices that are objects, got 1"),
    (change("index", value=of("1")), "with an index in each choice, got '1'"),
    (change("token_ids", value=of([])), "with 1 to 2 token_ids, got 0"),
    (change("token_ids", value=of([8] * 3)), "with 1 to 2 token_ids, got 3"),
    (change("token_ids", 0, value=of(19)), r"with token_ids in \[0, 19\), got 19"),
    (change("token_ids", 0, value=of(-1)), r"with token_ids in \[0, 19\), got -1"),
    (change("token_ids", 0, value=of(True)), "with token_ids that are integers, got True"),
    (change("token_ids", 0, value=of(2.0)), "with token_ids that are integers, got 2.0"),
    (change("prompt_token_ids", value=lambda x: x[1:]), "with the prompt_token_ids that were sent"),
    (change("logprobs", value=of(None)), "with logprobs that are an object, got None"),
    (change(*LOGPROBS, value=lambda x: x[1:]), r"with token_logprobs for \d token_ids, got"),
    (change(*LOGPROBS, 0, value=of(float("nan"))), "with token_logprobs that are finite .* nan"),
    (change(*LOGPROBS, 0, value=of(float("-inf"))), "with token_logprobs that are finite .* -inf"),
    (change(*LOGPROBS, 0, value=of(0.5)), "with token_logprobs that are finite and at most 0"),
    (change(*LOGPROBS, 0, value=of(-(10**400))), "with token_logprobs that are finite"),
    (change(*LOGPROBS, 0, value=of(None)), "with token_logprobs that are finite .* None"),
    (change("logprobs", "top_logprobs", 0, value=of({"1": -1.0})), "with tokens as 'token_id:ID'"),
    (change("logprobs", "top_logprobs", value=lambda x: x[1:]), "with token_logprobs for"),
    (
        change("finish_reason", value=of("abort")),
        "with finish_reason and stop_reason .*'abort'",
    ),
    (one_token_less, "with finish_reason and stop_reason .*'length'"),
    (change("finish_reason", value=of("stop")), "with finish_reason and stop_reason that fit"),
]


@pytest.mark.parametrize(("alter", "message"), ALTERED)
def test_what_cannot_be_an_answer(checkpoint, server, alter, message):
    server.alter[COMPLETIONS] = alter
    # A stop token is not drawn with this seed, so that all completions have two tokens.
    with pytest.raises(ServerError, match=rf"POST /v1/completions for inputs\[\d\] {message}"):
        ask(checkpoint, server.url, retries=3)


PROMPTS = [
    (lambda x: x[1:], "with prompt_logprobs for 2 tokens, got 1"),
    (lambda x: [None, None], "with prompt_logprobs that are objects, got None"),
    (lambda x: [None, {"3": {"logprob": -1.0}}], "with the prompt_logprobs of token 9, got"),
    (lambda x: [None, {"9": {"logprob": 1.0}}], "with log-probabilities that are finite"),
    (lambda x: [None, {"9": -1.0}], "with prompt_logprobs, got -1.0"),
]


@pytest.mark.parametrize(("value", "message"), PROMPTS)
def test_what_cannot_be_said_of_a_prompt(checkpoint, server, value, message):
    def alter(answer):
        choice = answer["choices"][0]
        if choice["prompt_logprobs"] and len(choice["prompt_logprobs"]) == 2:
            choice["prompt_logprobs"] = value(choice["prompt_logprobs"])
        return answer

    server.alter[COMPLETIONS] = alter
    with pytest.raises(ServerError, match=rf"for inputs\[0\] {message}"):
        ask(checkpoint, server.url)


MODEL_LISTS = [
    ({"data": [{"id": "other", "max_model_len": 64}]}, r"with model '.*qwen3' .*got \['other'\]"),
    ({"data": []}, r"with model .* got \[\]"),
    ({"data": {}}, "with a list of data, got {}"),
    ({"data": [3]}, "with models that are objects, got 3"),
    ([], r"with an object, got \[\]"),
]


@pytest.mark.parametrize(("answer", "message"), MODEL_LISTS)
def test_a_server_with_another_model(checkpoint, server, answer, message):
    server.alter[MODELS] = lambda _: answer
    with pytest.raises(ServerError, match=f"must answer GET /v1/models {message}"):
        ask(checkpoint, server.url)
    assert COMPLETIONS not in server.paths()


def test_a_model_without_a_length(checkpoint, server):
    server.alter[MODELS] = lambda answer: {"data": [{"id": server.name}]}
    with pytest.raises(ServerError, match="with an integer as max_model_len, got None"):
        ask(checkpoint, server.url)
