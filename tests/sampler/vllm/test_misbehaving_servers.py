"""Servers that are down, answer nonsense, die in the middle, or never end: an error says so."""

import gzip
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.sampler.vllm.fake_server import FakeServer, send
from twinkle_jax.sampler import ServerError, vllm_server, vLLMSampler

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
        with pytest.raises(ServerError, match=f"{url} .*ConnectError"):
            ask(checkpoint, url, retries=1)


def test_a_server_that_ends_between_two_calls(checkpoint):
    with FakeServer(checkpoint) as server:
        sampler = vLLMSampler(model_id=checkpoint, base_url=server.url, retries=0)
        sampler.sample("12", {"max_tokens": 1})
        server.stop()
        with pytest.raises(ServerError, match="ConnectError"):
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
    with pytest.raises(ServerError, match=r"500: out of memory.*503: engine dead"):
        ask(checkpoint, server.url, retries=2)
    assert len(server.asked) == 3


def test_a_refusal_is_not_repeated(checkpoint, server):
    server.take_over[COMPLETIONS] = lambda handler: send(handler, 400, b'{"message": "no"}') or True
    with pytest.raises(ServerError, match=r"400.*no"):
        ask(checkpoint, server.url, retries=3)
    assert server.paths().count(COMPLETIONS) <= 2  # side by side, each sent once


def test_a_server_with_a_key_is_given_one(checkpoint, server):
    server.take_over[MODELS] = lambda handler: send(handler, 401, b"Unauthorized") or True
    with pytest.raises(ServerError, match=r"401: Unauthorized: api_key must"):
        ask(checkpoint, server.url)


def test_a_server_that_is_silent_about_its_models_is_not_waited_for(
    checkpoint, server, monkeypatch
):
    """As long as for completions; it may hang, but its models need no computation."""
    monkeypatch.setattr(vllm_server, "_GET_TIMEOUT", 0.2)
    released = threading.Event()
    server.take_over[MODELS] = lambda handler: released.wait(20)
    with pytest.raises(ServerError, match=r"GET /v1/models, got ReadTimeout"):
        ask(checkpoint, server.url, timeout=20, retries=1)
    released.set()


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's list of connections")
def test_the_system_looks_whether_a_silent_server_is_still_there(checkpoint, server):
    """One whose machine loses its power closes no connection."""
    timers = []

    def look(handler):
        ports = f"{handler.client_address[1]:04X} {server.http.server_port:04X}"
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, here, there, _, _, timer = line.split()[:6]
            if f"{here[-4:]} {there[-4:]}" == ports:
                timers.append(timer.split(":"))
        return False

    server.take_over[COMPLETIONS] = look
    ask(checkpoint, server.url)
    kinds, ticks = zip(*timers, strict=True)  # of 10 ms
    assert set(kinds) == {"02"}  # keepalive
    assert all(0 < int(left, 16) <= 6000 for left in ticks)


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
    (dying, "RemoteProtocolError"),
    (endless_header, "RemoteProtocolError"),
    (lambda h: h.wfile.write(b"SSH-2.0\r\n") and True, "RemoteProtocolError"),
    (compressed, "JSON"),
    (endless, "bytes"),
    *(
        (lambda h, body=body: send(h, 200, body) or True, "JSON")
        for body in (b"<html>", b"", b"[" * 10**5, b"9" * 10**4, b"\xff\xfe{}")
    ),
    (lambda h: send(h, 302, b"elsewhere") or True, "302: elsewhere"),
]


def but_the_probe(handle):
    """Misbehave only when asked for completions, not for the probe that a sampler sends before."""
    return lambda handler: "allowed_token_ids" not in handler.body and handle(handler)


@pytest.mark.parametrize(("handle", "reason"), RAW)
def test_what_is_no_answer(checkpoint, server, handle, reason):
    server.take_over[COMPLETIONS] = but_the_probe(handle)
    with pytest.raises(ServerError, match=rf"for inputs\[\d\].* {reason}"):
        ask(checkpoint, server.url)


HEADERS = b"HTTP/1.1 200 OK\r\n\r\n"
DRIPS = [(b"", b""), (HEADERS, b" "), (b"", b"HTTP/1.1 100 Continue\r\n\r\n")]


@pytest.mark.slow
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
    with pytest.raises(ServerError, match=f"{path}.* 0.3 seconds"):
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
    with pytest.raises(ServerError, match=r"inputs\[1\].*400: no"):
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


def change(answer, path, value):
    """Put a value somewhere in the second choice of an answer."""
    if len(answer["choices"]) < 2:
        return answer
    *parents, last = (int(key) if key.isdigit() else key for key in path.split("/"))
    place = answer if path in answer else answer["choices"][1]
    for key in parents:
        place = place[key]
    place[last] = value(place[last])
    return answer


def of(value):
    return lambda old: value


TOKEN_LOGPROBS, TOP_LOGPROBS = "logprobs/token_logprobs", "logprobs/top_logprobs"
ALTERED = [
    ("model", of("another")),
    *(("choices", x) for x in (lambda x: x[:1], lambda x: [*x, x[0]], of(None), of([1, 2]))),
    ("index", of("1")),
    *(("token_ids", of(x)) for x in ([], [8] * 3)),
    *(("token_ids/0", of(x)) for x in (19, -1, True, 2.0)),
    ("prompt_token_ids", lambda x: x[1:]),
    ("logprobs", of(None)),
    (TOKEN_LOGPROBS, lambda x: x[1:]),
    *((f"{TOKEN_LOGPROBS}/0", of(x)) for x in (float("nan"), float("-inf"), 0.5, -(10**400), None)),
    (f"{TOP_LOGPROBS}/0", of({"1": -1.0})),
    (TOP_LOGPROBS, lambda x: x[1:]),
    *(("finish_reason", of(x)) for x in ("abort", "stop")),
]


def fails_with_the_name(checkpoint, server, alter, name, **options):
    server.alter[COMPLETIONS] = alter
    with pytest.raises(ServerError, match=rf"{COMPLETIONS} for inputs\[\d\] with .*{name}.*, got"):
        ask(checkpoint, server.url, **options)


@pytest.mark.parametrize(("path", "value"), ALTERED)
def test_what_cannot_be_an_answer(checkpoint, server, path, value):
    # A stop token is not drawn with this seed, so that all completions have two tokens.
    name = path.rstrip("/0").split("/")[-1]
    fails_with_the_name(checkpoint, server, lambda x: change(x, path, value), name, retries=3)


def test_a_limit_that_was_not_reached(checkpoint, server):
    def one_token_less(answer):
        for choice in answer["choices"][1:]:
            del choice["token_ids"][1:]
            for scores in choice["logprobs"].values():
                del scores[1:]
        return answer

    fails_with_the_name(checkpoint, server, one_token_less, "finish_reason")


PROMPTS = [
    lambda x: x[1:],
    of([None, None]),
    *(of([None, x]) for x in ({"3": {"logprob": -1.0}}, {"9": {"logprob": 1.0}}, {"9": -1.0})),
]


@pytest.mark.parametrize("value", PROMPTS)
def test_what_cannot_be_said_of_a_prompt(checkpoint, server, value):
    def alter(answer):
        choice = answer["choices"][0]
        if choice["prompt_logprobs"] and len(choice["prompt_logprobs"]) == 2:
            choice["prompt_logprobs"] = value(choice["prompt_logprobs"])
        return answer

    fails_with_the_name(checkpoint, server, alter, "prompt_logprobs")


MODEL_LISTS = [
    ("model", {"data": [{"id": "other", "max_model_len": 64}]}),
    ("model", {"data": []}),
    ("data", {"data": {}}),
    ("models", {"data": [3]}),
    ("object", []),
]


@pytest.mark.parametrize(("name", "answer"), MODEL_LISTS)
def test_a_server_with_another_model(checkpoint, server, name, answer):
    server.alter[MODELS] = lambda _: answer
    with pytest.raises(ServerError, match=f"{MODELS} with .*{name}"):
        ask(checkpoint, server.url)
    assert COMPLETIONS not in server.paths()


def test_a_model_without_a_length(checkpoint, server):
    server.alter[MODELS] = lambda answer: {"data": [{"id": server.name}]}
    with pytest.raises(ServerError, match="max_model_len"):
        ask(checkpoint, server.url)
