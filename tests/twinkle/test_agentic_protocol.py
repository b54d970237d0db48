"""`twinkle_agentic.protocol`: what is sent to a server, and how its answer is read."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from twinkle_jax.data import SamplingParams
from twinkle_jax.twinkle.agentic.protocol.openai import OpenAI

pytest.importorskip("httpx", reason="pip install 'twinkle-jax[server]'")
TALK = {"messages": [{"role": "user", "content": "1+1="}]}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.fixture
def server():
    """Answers with `server.choices`, and keeps what it was asked."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            made.asked.append((self.path, self.headers["Authorization"], body))
            status = made.statuses.pop(0) if made.statuses else 200
            content = json.dumps({"choices": made.choices}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.asked, made.statuses = [], []
    made.choices = [{"message": {"role": "assistant", "content": "2"}, "finish_reason": "stop"}]
    made.url = f"http://127.0.0.1:{made.server_port}"
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def test_what_is_sent_and_what_comes_back(server, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    api = OpenAI("small", api_key="key", base_url=f"{server.url}/v1")
    params = SamplingParams(temperature=0.5, max_tokens=9, stop="\n", repetition_penalty=1.25)
    reply = api(TALK | {"tools": [{"type": "function"}]}, params, extra_body={"think": True}, n=1)
    assert reply == {"role": "assistant", "content": "2", "finish_reason": "stop"}
    path, key, body = server.asked[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer key")
    assert body == {
        "model": "small",
        "messages": TALK["messages"],
        "tools": [{"type": "function"}],
        "n": 1,
        "temperature": 0.5,
        "top_p": 1.0,
        "max_tokens": 9,
        "stop": ["\n"],
        "frequency_penalty": 0.25,
        "think": True,
    }
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)  # as it is: without a version
    OpenAI("small")(TALK, SamplingParams(seed=3, logprobs=1, stop=["a", "b"]), temperature=0.0)
    path, key, body = server.asked[1]
    assert (path, key, body["stop"], body["temperature"]) == (
        "/chat/completions",
        None,
        ["a", "b"],
        0.0,
    )
    assert (body["seed"], body["logprobs"], body["top_logprobs"]) == (3, True, 1)


def test_several_completions_reasoning_and_tool_calls(server):
    server.choices *= 2
    server.choices[1] = {"message": {"reasoning_content": "hm", "tool_calls": [CALL]}}
    api = OpenAI("small", base_url=f"{server.url}/v1")
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda n: api(TALK, SamplingParams(num_samples=n)), [2] * 4))
    assert replies[3] == [
        {"role": "assistant", "content": "2", "finish_reason": "stop"},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [CALL]},
    ]


def test_errors_of_servers_and_what_is_refused(server):
    url = f"{server.url}/v1"
    server.statuses = [503]
    assert OpenAI("m", base_url=url)(TALK, SamplingParams())["content"] == "2"
    assert len(server.asked) == 2
    server.statuses = [503]
    once = OpenAI("m", base_url=url, client_kwargs={"max_retries": 0, "timeout": 5})
    with pytest.raises(RuntimeError, match="status 503"):
        once(TALK, SamplingParams())
    for choices, message in (
        ([], "at least one choice, got none"),
        ([{"message": "2"}], "a message in each choice, got '2'"),
        ([{"message": {"tool_calls": [{"id": "1"}]}}], "a function in each tool call, got None"),
    ):
        server.choices = choices
        with pytest.raises(RuntimeError, match=message):
            once(TALK, SamplingParams())
    for params, name in (({"top_k": 5}, "top_k"), ({"min_p": 0.1}, "min_p"), ({"stop": [7]}, "7")):
        with pytest.raises(ValueError, match=f"{name}.*from_twinkle"):
            once(TALK, SamplingParams(**params))
    with pytest.raises(TypeError, match="extra_query"):
        once(TALK, SamplingParams(), extra_query={})
    with pytest.raises(TypeError, match="organization"):
        OpenAI("m", base_url=url, client_kwargs={"organization": "o"})
