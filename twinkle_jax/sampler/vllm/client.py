"""Requests to a server: retries, one deadline for a call, a limit of the size of answers.

httpx sends them. It limits each wait for bytes, not a request as a whole, reads an answer however
long it is, and retries no request that was sent. What is added here, and tested in
`tests/sampler/vllm/test_misbehaving_servers.py`:

* one deadline for all requests of a call and their retries, also for a server that sends a byte now
  and then: `test_no_call_takes_longer_than_it_may`
* the first error, or Ctrl-C, cancels the other requests:
  `test_the_first_error_ends_the_other_requests`, `test_an_interrupted_call_ends_at_once`
* an answer has at most `Request.max_bytes`, and is never decompressed: `test_what_is_no_answer`
* a request is sent again after a lost connection and after some statuses:
  `test_a_connection_lost_once_is_tried_again`, `test_a_refusal_is_not_repeated`
"""

import json
import reprlib
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from twinkle_jax._package import require

if TYPE_CHECKING:
    import httpx

_PAUSES = (0.1, 0.5, 2.0, 5.0)  # seconds between attempts; the last one again and again
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)  # statuses after which a request is sent again
_CONNECTIONS = 256  # open at a time
_CONNECT_TIMEOUT = 10.0  # seconds


class ServerError(RuntimeError):
    """A server cannot be reached, or answers invalidly."""


class Request(NamedTuple):
    """A request, and how its answer is read.

    Attributes:
        method: GET or POST.
        path: the route.
        body: what to send as JSON; None for nothing.
        read: reads the JSON of an answer; raises a ValueError of the form "EXPECTED, got VALUE".
            None: only the status is checked.
        purpose: what the request is for, in errors.
        max_bytes: the longest answer.
        hint: what to do if the server does not know the route.
        repeat: whether it may be sent again.
    """

    method: str
    path: str
    body: Any = None
    read: Callable[[Any], Any] | None = None
    purpose: str = ""
    max_bytes: int = 2**20
    hint: str = ""
    repeat: bool = True


class Deadline:
    """The time limit of a call, for all of its requests together.

    Args:
        seconds: from now on.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._end - time.monotonic())


class Client:
    """Sends requests to one server.

    Proxies and passwords from the environment are not used.

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
        self._tls = ssl.create_default_context()

    def send_request(self, deadline: Deadline, request: Request) -> Any:
        """Send one request, as `send_requests`."""
        return self.send_requests(deadline, [request])[0]

    def send_requests(self, deadline: Deadline, requests: Sequence[Request]) -> list[Any]:
        """Send requests concurrently, with retries.

        Returns:
            The results of their `read`, in order; None for requests without one.

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
            return answers.result()

    async def _send_all(self, deadline: Deadline, requests: Sequence[Request]) -> list[Any]:
        import anyio
        import httpx

        answers: list[Any] = [None] * len(requests)
        errors: list[Exception] = []
        client = httpx.AsyncClient(
            headers=self._headers,
            verify=self._tls,
            trust_env=False,
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT),
            limits=httpx.Limits(max_connections=_CONNECTIONS, max_keepalive_connections=0),
        )
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
        must = f"{self.url} must answer {request.method} {request.path}"
        must += f" for {request.purpose}" if request.purpose else ""
        failures: list[str] = []
        with anyio.move_on_after(deadline.remaining) as scope:
            for attempt in range(1 + (self._retries if request.repeat else 0)):
                if attempt:
                    await anyio.sleep(_PAUSES[min(attempt, len(_PAUSES)) - 1])
                try:
                    status, content = await self._receive(client, request)
                except _TooLongError:
                    raise ServerError(
                        f"{must} in at most {request.max_bytes} bytes, got more"
                    ) from None
                except connection_errors as error:
                    failures.append(f"{type(error).__name__}: {error}")
                    continue
                if status == 200:
                    return _read_answer(content, request, must)
                failures.append(f"status {status}: {content.decode(errors='replace')[:300]}")
                if status not in _TRANSIENT:
                    hint = request.hint if status == 404 else ""
                    raise ServerError(f"{must}, got {failures[-1]}{hint}")
        within = f" within {deadline.seconds:g} seconds" if scope.cancelled_caught else ""
        raise ServerError(
            f"{must}{within}, got {', then '.join(dict.fromkeys(failures)) or 'no answer'}"
        )

    async def _receive(self, client: "httpx.AsyncClient", request: Request) -> tuple[int, bytes]:
        """Send a request once, and read its status and its body."""
        body = None if request.body is None else json.dumps(request.body).encode()
        url = self.url + request.path
        async with client.stream(request.method, url, content=body) as response:
            content = bytearray()
            async for part in response.aiter_raw():
                content += part
                if len(content) > request.max_bytes:
                    raise _TooLongError
            return response.status_code, bytes(content)


class _TooLongError(Exception):
    """An answer is longer than `Request.max_bytes`."""


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


def _read_answer(content: bytes, request: Request, must: str) -> Any:
    if request.read is None:
        return None
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        raise ServerError(f"{must} with JSON, got {reprlib.repr(content)}") from None
    try:
        return request.read(answer)
    except ValueError as error:
        raise ServerError(f"{must} with {error}") from None


# Values in the JSON of an answer, with checks of their type and range.


def read_logprob(name: str, value: Any) -> float:
    """Read a log-probability: a number, finite and at most 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not -1e30 < value <= 1e-3:  # a little above 0 is rounding
        refuse(f"{name} that are finite and at most 0", value)
    return float(value)


def read_integer(what: str, value: Any) -> int:
    """Read an integer."""
    if not isinstance(value, int) or isinstance(value, bool):
        refuse(what, value)
    return int(value)


def read_list(name: str, holder: Mapping[str, Any]) -> list[Any]:
    """Read the list of that name."""
    value = holder.get(name)
    if not isinstance(value, list):
        refuse(f"a list of {name}", value)
    return list(value)


def read_object(what: str, value: Any) -> dict[str, Any]:
    """Read an object."""
    if not isinstance(value, dict):
        refuse(what, value)
    return dict(value)


def refuse(what: str, got: Any) -> NoReturn:
    """Raise a ValueError: what a part of an answer must be, and what arrived."""
    raise ValueError(f"{what}, got {reprlib.repr(got)}")
