"""A vLLM server: requests with one deadline for a call, and completions with checked answers.

httpx sends the requests. It limits each wait for bytes, not a request as a whole, reads an answer
however long it is, and retries no request that was sent. What is added here, and tested in
`tests/sampler/vllm/test_misbehaving_servers.py`:

* one deadline for all requests of a call and their retries, also for a server that sends a byte now
  and then: `test_no_call_takes_longer_than_it_may`
* the first error, or Ctrl-C, cancels the other requests:
  `test_the_first_error_ends_the_other_requests`, `test_an_interrupted_call_ends_at_once`
* an answer has at most `Request.max_bytes`, and is never decompressed: `test_what_is_no_answer`
* a request is sent again after a lost connection and after some statuses:
  `test_a_connection_lost_once_is_tried_again`, `test_a_refusal_is_not_repeated`
"""

import base64
import io
import json
import math
import reprlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import numpy as np

from twinkle_jax._package import require
from twinkle_jax.data import SamplingParams
from twinkle_jax.data.batch import HostArray
from twinkle_jax.model import DecoderConfig
from twinkle_jax.sampler.requests import DrawnSequence, End, Stops

if TYPE_CHECKING:
    import httpx

_PAUSES = (0.1, 0.5, 2.0, 5.0)  # seconds between attempts; the last one again and again
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)  # statuses after which a request is sent again
_BUSY = (429, 502, 503, 504)  # those among them of servers that are overloaded, or not there
_CONNECTIONS = 256  # open at a time
_CONNECT_TIMEOUT = 10.0  # seconds
_GET_TIMEOUT = 30.0  # seconds without a byte of an answer for which no model runs
_HINTS = dict.fromkeys((401, 403), ": api_key must be the server's")

# A server whose machine has lost its power closes no connection, and a router in between may forget
# one on which a long answer is awaited: the system asks after a minute, and ends it after two.
_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
_SOCKET_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in _KEEPALIVE
        if hasattr(socket, name)  # not on every system
    ),
]


@cache  # reading them takes longer than a short answer
def _trusted_certificates() -> ssl.SSLContext:
    return ssl.create_default_context()


class ServerError(RuntimeError):
    """A server cannot be reached, or answers invalidly."""


class LostServerError(ServerError):
    """A server is gone or busy, or was restarted: later it may answer, once it has the weights."""


class Request(NamedTuple):
    """A request, and how its answer is read.

    `read` reads the JSON of an answer, and raises a ValueError of the form "EXPECTED, got VALUE".
    Without it, only the status is checked.
    """

    method: str
    path: str
    body: Any = None  # to be sent as JSON
    read: Callable[[Any], Any] | None = None
    purpose: str = ""  # what it is for, in errors
    max_bytes: int = 2**20  # of an answer
    hints: Mapping[int, str] | None = None  # what to do after a status, in errors
    repeat: bool = True  # whether it may be sent again


class Deadline:
    """The time limit of a call, for all of its requests together, in seconds from now on."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._end - time.monotonic())


class Client:
    """Sends requests to one server.

    Proxies and passwords from the environment are not used. Another thread may set `cancelled`:
    requests that are running or come later then end with a ServerError.

    Args:
        base_url: `http://HOST:PORT` or `https://…`; a `/v1` at its end is left out.
        api_key: the server's key; None if it has none.
        retries: how often a request is sent again after a lost connection or a server error.

    Raises:
        ValueError: for a malformed address or key, and numbers out of range.
        ImportError: if httpx is not installed.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, retries: int = 3) -> None:
        require("httpx", "server")
        self.url = read_server_url(base_url)
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise ValueError(f"retries must be an int of at least 0, got {retries!r}")
        self._retries = retries
        # Not compressed: a short answer could otherwise become a very long one.
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key is not None:
            if not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key):
                raise ValueError("api_key must be printable ASCII without spaces around it")
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.cancelled = threading.Event()

    def decide(self, compute: Callable[[], str]) -> str:
        """Return what is computed; a client of several processes returns the same in each."""
        return compute()

    def send_request(self, deadline: Deadline, request: Request) -> Any:
        """Send one request, as `send_requests`."""
        return self.send_requests(deadline, [request])[0]

    def send_requests(self, deadline: Deadline, requests: Sequence[Request]) -> list[Any]:
        """Send requests concurrently, with retries; return the results of their `read`, in order.

        Raises:
            ServerError: for the first request that fails, takes too long or gets an invalid
                answer. The others are cancelled.
        """
        from anyio.from_thread import start_blocking_portal

        # A thread of its own: the caller may be inside an event loop, as notebooks are.
        with start_blocking_portal() as portal:
            answers = portal.start_task_soon(self._send_all, deadline, requests)
            # A signal may come to another thread: this one wakes up now and then to see it.
            while not answers.done():
                wait([answers], timeout=0.2)
                if self.cancelled.is_set():
                    answers.cancel()
                    raise ServerError(f"requests to {self.url} were cancelled")
            return answers.result()

    async def _send_all(self, deadline: Deadline, requests: Sequence[Request]) -> list[Any]:
        import anyio
        import httpx

        answers: list[Any] = [None] * len(requests)
        errors: list[Exception] = []
        transport = httpx.AsyncHTTPTransport(
            verify=_trusted_certificates(),
            trust_env=False,
            limits=httpx.Limits(max_connections=_CONNECTIONS, max_keepalive_connections=0),
            socket_options=_SOCKET_OPTIONS,
        )
        client = httpx.AsyncClient(headers=self._headers, transport=transport, trust_env=False)
        async with client, anyio.create_task_group() as group:

            async def send(i: int, request: Request) -> None:
                try:
                    answers[i] = await self._send(client, deadline, request)
                except Exception as error:
                    errors.append(error)
                    group.cancel_scope.cancel()

            for i, request in enumerate(requests):
                group.start_soon(send, i, request)
        if errors:
            raise errors[0]
        return answers

    async def _send(self, client: "httpx.AsyncClient", deadline: Deadline, request: Request) -> Any:
        import anyio
        import httpx

        connection_errors = (httpx.TransportError, OSError)
        expected = f"{self.url} must answer {request.method} {request.path}"
        expected += f" for {request.purpose}" if request.purpose else ""
        failures: list[str] = []
        status, lost = None, False  # of the last attempt
        with anyio.move_on_after(deadline.remaining) as scope:
            for attempt in range(1 + (self._retries if request.repeat else 0)):
                if attempt:
                    await anyio.sleep(_PAUSES[min(attempt, len(_PAUSES)) - 1])
                try:
                    status, content = await self._receive(client, request)
                except _TooLongError:
                    raise ServerError(
                        f"{expected} in at most {request.max_bytes} bytes, got more"
                    ) from None
                except connection_errors as error:
                    failures.append(f"{type(error).__name__}: {error}")
                    status, lost = None, True
                    continue
                if status == 200:
                    return _read_answer(content, request, expected)
                failures.append(f"status {status}: {content.decode(errors='replace')[:300]}")
                lost = status in _BUSY
                if status not in _TRANSIENT:
                    break
        got = ", then ".join(dict.fromkeys(failures)) or "no answer"
        if scope.cancelled_caught:
            raise ServerError(f"{expected} within {deadline.seconds:g} seconds, got {got}")
        hint = (_HINTS | dict(request.hints or {})).get(status or 0, "")
        raise (LostServerError if lost else ServerError)(f"{expected}, got {got}{hint}")

    async def _receive(self, client: "httpx.AsyncClient", request: Request) -> tuple[int, bytes]:
        """Send a request once, and read its status and its body."""
        import httpx

        body = None if request.body is None else json.dumps(request.body).encode()
        url = self.url + request.path
        wait = _GET_TIMEOUT if request.method == "GET" else None
        timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT, read=wait)
        async with client.stream(request.method, url, content=body, timeout=timeout) as response:
            content = bytearray()
            async for part in response.aiter_raw():
                content += part
                if len(content) > request.max_bytes:
                    raise _TooLongError
            return response.status_code, bytes(content)


class _TooLongError(Exception):
    """An answer is longer than `Request.max_bytes`."""


class _AbortedError(ValueError):
    """A server has ended a completion before its end, as one does that is shut down."""


def read_server_url(base_url: Any) -> str:
    """Check `http://HOST:PORT` or `https://…`, and leave out a `/v1` at its end."""
    import httpx

    try:
        url = httpx.URL(base_url if isinstance(base_url, str) else "")
    except httpx.InvalidURL:
        url = httpx.URL("")
    usable = url.scheme in ("http", "https") and url.host and (url.port or 0) < 2**16
    if not usable or url.query or url.fragment:
        raise ValueError(f"base_url must be http://HOST:PORT or https://…, got {base_url!r}")
    if url.userinfo:
        raise ValueError("base_url must be without a name and password, got one: use api_key")
    prefix = url.raw_path.decode().rstrip("/").removesuffix("/v1")
    return f"{url.scheme}://{url.netloc.decode()}{prefix}"


def _read_answer(content: bytes, request: Request, expected: str) -> Any:
    if request.read is None:
        return None
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        raise ServerError(f"{expected} with JSON, got {reprlib.repr(content)}") from None
    try:
        return request.read(answer)
    except _AbortedError as error:
        raise LostServerError(f"{expected} with {error}") from None
    except ValueError as error:
        raise ServerError(f"{expected} with {error}") from None


# Values in the JSON of an answer, with checks of their type and range.


def read_logprob(name: str, value: Any) -> float:
    """Read a log-probability: a number, finite and at most 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not -1e30 < value <= 1e-3:  # a little above 0 is rounding
        refuse(f"{name} that are finite and at most 0", value)
    return float(value)


def read_integer(expected: str, value: Any) -> int:
    """Read an integer."""
    if not isinstance(value, int) or isinstance(value, bool):
        refuse(expected, value)
    return int(value)


def read_list(name: str, holder: Mapping[str, Any]) -> list[Any]:
    """Read the list of that name."""
    value = holder.get(name)
    if not isinstance(value, list):
        refuse(f"a list of {name}", value)
    return list(value)


def read_object(expected: str, value: Any) -> dict[str, Any]:
    """Read an object."""
    if not isinstance(value, dict):
        refuse(expected, value)
    return dict(value)


def refuse(expected: str, value: Any) -> NoReturn:
    """Raise a ValueError: what a part of an answer must be, and what arrived."""
    raise ValueError(f"{expected}, got {reprlib.repr(value)}")


# Completions: what is requested, and the checks of what arrives.

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]  # of a server: --logprobs-mode
TopLogprobs = list[tuple[int, float]]

_TOKEN_BYTES, _TOP_BYTES = 4096, 128  # of an answer: a token with its text; one likely token more
_LOG_ZERO = -9999.0  # what vLLM writes for the logarithm of 0


class Routing(NamedTuple):
    """The experts of a model: how many layers and experts it has, and how many a token chooses.

    The first `dense` of these layers have none: for them vLLM returns numbers without a meaning.
    """

    layers: int
    experts: int
    chosen: int
    dense: int = 0

    @classmethod
    def of(cls, config: DecoderConfig) -> "Routing | None":
        """Return the experts of a decoder; None if it has none."""
        experts = config.experts
        if experts is None:
            return None
        return cls(config.layers, experts.number, experts.chosen, config.dense_layers)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest type that holds the number of each expert, and one more for none."""
        return np.min_scalar_type(self.experts)


class CompletionSettings(NamedTuple):
    """One prompt, and how it is completed."""

    model: str  # the server's name of the model or the adapter
    prompt: list[int]
    num_samples: int
    max_tokens: int  # of each
    seed: int | None  # None leaves it to the server
    params: SamplingParams
    stops: Stops
    vocab: int  # token ids lie below it
    routing: Routing | None = None  # None: experts are not read


class ServerCompletions(NamedTuple):
    """The completions of a prompt, and the log-probabilities of the prompt if requested."""

    drawn: list[DrawnSequence]
    prompt: list[TopLogprobs | None] | None


def completion_request(settings: CompletionSettings, purpose: str, **parameters: Any) -> Request:
    """Request completions with every parameter set: no default of the server applies."""
    params, greedy = settings.params, settings.params.temperature == 0
    tops = max(_tops(params), params.prompt_logprobs or 0)
    tokens = settings.num_samples * (len(settings.prompt) + settings.max_tokens)
    token_bytes = _TOKEN_BYTES + tops * _TOP_BYTES
    if settings.routing is not None:  # four bytes each at most, and base64 writes 4 for 3
        token_bytes += 6 * settings.routing.layers * settings.routing.chosen
    body = {
        "model": settings.model,
        "prompt": settings.prompt,
        "n": 1 if greedy else settings.num_samples,  # vLLM refuses several that are the same
        "max_tokens": settings.max_tokens,
        "seed": settings.seed,
        "temperature": params.temperature,
        "top_k": max(params.top_k, 0),
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": settings.stops.strings,
        "stop_token_ids": settings.stops.tokens,
        "ignore_eos": True,  # stop_token_ids have the end of a sequence
        "skip_special_tokens": True,
        "logprobs": _tops(params),
        "prompt_logprobs": params.prompt_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **parameters,
    }
    return Request(
        "POST",
        "/v1/completions",
        body,
        partial(_read_completions, settings),
        purpose,
        max_bytes=2**20 + tokens * token_bytes,
    )


def _tops(params: SamplingParams) -> int:
    """Return how many likely tokens to request; `logprobs=1` means the drawn one alone."""
    return 0 if params.logprobs == 1 else params.logprobs or 0


def _read_completions(settings: CompletionSettings, answer: Any) -> ServerCompletions:
    """Read completions; raises a ValueError if the answer does not fit the request."""
    count = 1 if settings.params.temperature == 0 else settings.num_samples
    answer = read_object("an object", answer)
    if answer.get("model") != settings.model:
        refuse(f"model {settings.model!r}", answer.get("model"))
    choices = [read_object("choices that are objects", x) for x in read_list("choices", answer)]
    indices = [read_integer("an index in each choice", x.get("index")) for x in choices]
    if sorted(indices) != list(range(count)):
        refuse(f"{count} choices, numbered from 0", indices)
    choices.sort(key=lambda choice: int(choice["index"]))
    drawn = [_read_choice(settings, choice) for choice in choices]
    prompt = None
    if settings.params.prompt_logprobs is not None:
        prompt = _read_prompt_logprobs(settings, choices[0])
    return ServerCompletions(drawn * (settings.num_samples // count), prompt)


def _read_choice(settings: CompletionSettings, choice: Mapping[str, Any]) -> DrawnSequence:
    if choice.get("prompt_token_ids") != settings.prompt:
        refuse("the prompt_token_ids that were sent", choice.get("prompt_token_ids"))
    tokens = [_read_token(settings, x) for x in read_list("token_ids", choice)]
    if not 1 <= len(tokens) <= settings.max_tokens:
        refuse(f"1 to {settings.max_tokens} token_ids", len(tokens))
    scores = read_object("logprobs that are an object", choice.get("logprobs"))
    logprobs = [read_logprob("token_logprobs", x) for x in read_list("token_logprobs", scores)]
    tops: list[TopLogprobs] = [[] for _ in tokens]
    if _tops(settings.params):
        name = "top_logprobs"
        tops = [_read_top(settings, name, x, "token_id:") for x in read_list(name, scores)]
    for name, values in (("token_logprobs", logprobs), ("top_logprobs", tops)):
        if len(values) != len(tokens):
            refuse(f"{name} for {len(tokens)} token_ids", len(values))
    pairs = [
        [(token, logprob), *(x for x in top if x[0] != token and x[1] > _LOG_ZERO)]
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
    ]
    routing = None
    if settings.routing is not None:
        places = len(settings.prompt) + len(tokens) - 1
        routing = _read_routing(settings.routing, places, choice.get("routed_experts"))
    return DrawnSequence(tokens, pairs, _read_end(settings, choice, tokens), routing)


def _read_routing(model: Routing, places: int, text: Any) -> HostArray:
    """Read the experts of each token: an array in NumPy's format, as base64."""
    expected = "routed_experts, which it has if it is started with --enable-return-routed-experts"
    if not isinstance(text, str):
        refuse(expected, text)
    shape = (places, model.layers, model.chosen)
    expected = f"routed_experts of the shape {shape}, integers in base64"
    try:
        file = io.BytesIO(base64.b64decode(text, validate=True))
        if np.lib.format.read_magic(file) != (1, 0):
            refuse(expected, text)
        # The header is read first: an array of any size could be declared there.
        got, by_column, dtype = np.lib.format.read_array_header_1_0(file)
        content = file.read()
    except Exception:  # whatever Python's parser raises for a header that is no dictionary
        refuse(expected, text)
    size = math.prod(shape) * dtype.itemsize
    if got != shape or by_column or dtype.kind not in "ui" or len(content) != size:
        refuse(expected, (str(dtype), got, f"{len(content)} bytes"))
    values = np.frombuffer(content, dtype).reshape(shape)
    ordered = np.sort(values[:, model.dense :], axis=-1)
    inside = values.size == 0 or (ordered.min() >= 0 and ordered.max() < model.experts)
    if not inside or np.any(ordered[..., 1:] == ordered[..., :-1]):
        refuse(f"routed_experts that differ and are in [0, {model.experts})", values.tolist())
    values = values.astype(model.dtype)  # a copy
    values[:, : model.dense] = 0
    return values


def _read_end(settings: CompletionSettings, choice: Mapping[str, Any], tokens: list[int]) -> End:
    """Read why a completion ended; its tokens must agree."""
    reason, stop = choice.get("finish_reason"), choice.get("stop_reason")
    if reason == "length" and len(tokens) == settings.max_tokens:
        return "length"
    if reason == "stop" and tokens[-1] in settings.stops.tokens:
        return "token"
    if reason == "stop" and stop in settings.stops.strings:
        return "string"
    expected = (
        f"finish_reason and stop_reason that fit {len(tokens)} tokens of at most "
        f"{settings.max_tokens}, the last {tokens[-1]}"
    )
    if reason == "abort":
        raise _AbortedError(f"{expected}, got {(reason, stop)!r}")
    return refuse(expected, (reason, stop))


def _read_prompt_logprobs(
    settings: CompletionSettings, choice: Mapping[str, Any]
) -> list[TopLogprobs | None]:
    entries = read_list("prompt_logprobs", choice)
    if len(entries) != len(settings.prompt):
        refuse(f"prompt_logprobs for {len(settings.prompt)} tokens", len(entries))
    rows: list[TopLogprobs | None] = [None]
    for token, entry in zip(settings.prompt[1:], entries[1:], strict=True):
        entry = read_object("prompt_logprobs that are objects", entry)
        scores = {key: read_object("prompt_logprobs", x).get("logprob") for key, x in entry.items()}
        pairs = _read_top(settings, "prompt_logprobs", scores, "")
        of_token = [pair for pair in pairs if pair[0] == token]
        if not of_token:
            refuse(f"the prompt_logprobs of token {token}", sorted(scores))
        rows.append(of_token + [pair for pair in pairs if pair[0] != token])
    return rows


def _read_top(settings: CompletionSettings, name: str, scores: Any, prefix: str) -> TopLogprobs:
    """Read a mapping from tokens to log-probabilities."""
    pairs = []
    for key, value in read_object(f"{name} by token", scores).items():
        digits = key.removeprefix(prefix)
        if not (key.startswith(prefix) and digits.isascii() and digits.isdigit()):
            refuse(f"{name} by '{prefix}ID'", key)
        token = _read_token(settings, int(digits[:20]))
        pairs.append((token, read_logprob(name, value)))
    return pairs


def _read_token(settings: CompletionSettings, value: Any) -> int:
    if not 0 <= read_integer("token_ids that are integers", value) < settings.vocab:
        refuse(f"token_ids in [0, {settings.vocab})", value)
    return int(value)
