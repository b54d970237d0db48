"""One HTTP request and its answer, of bounded size and in bounded time."""

import http.client
import socket
import ssl
from contextlib import closing
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from twinkle_jax.sampler.vllm.budget import Budget

FAULTS = (OSError, http.client.HTTPException)  # what a lost connection raises
_CONNECT, _CHUNK = 10.0, 2**16  # seconds to be let in; bytes to read at a time


class TooLongError(Exception):
    """An answer has no end, or one too far away."""


class Address(NamedTuple):
    """Where a server is.

    Attributes:
        url: how it is written in messages.
        host: its name.
        port: its port.
        prefix: what paths begin with.
        tls: how to talk to it in secret; None for plain HTTP.
    """

    url: str
    host: str
    port: int
    prefix: str
    tls: ssl.SSLContext | None


def read_address(base_url: Any) -> Address:
    """Take `http://HOST:PORT` or `https://…` apart; a `/v1` at its end is left out."""
    try:
        parts = urlsplit(base_url if isinstance(base_url, str) else "")
        host, port = parts.hostname, parts.port
    except ValueError:  # a port that is no number
        host = port = None
    if not host or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
        raise ValueError(f"base_url must be http://HOST:PORT or https://…, got {base_url!r}")
    if parts.username is not None:
        raise ValueError("base_url must be without a name and password, got one: use api_key")
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    secret = parts.scheme == "https"
    return Address(
        f"{parts.scheme}://{parts.netloc}{prefix}",
        host,
        port or (443 if secret else 80),
        prefix,
        ssl.create_default_context() if secret else None,
    )


def exchange(
    address: Address,
    budget: Budget,
    method: str,
    path: str,
    body: bytes | None,
    headers: dict[str, str],
    *,
    most: int,
) -> tuple[int, bytes]:
    """Send a request and read its answer.

    Returns:
        The status, and the body.

    Raises:
        TooLongError: if the body has more than `most` bytes.
        OSError: if the connection is lost, or shut by the budget; or an `HTTPException`.
    """
    raw = socket.create_connection((address.host, address.port), min(_CONNECT, budget.left))
    with raw, budget.watch(raw):
        raw.settimeout(None)  # from here on it is the budget that ends it
        tls = address.tls
        connection = http.client.HTTPConnection(address.host, address.port)
        connection.sock = tls.wrap_socket(raw, server_hostname=address.host) if tls else raw
        try:
            connection.request(method, address.prefix + path, body, headers)
            with closing(connection.getresponse()) as response:
                content = _read_all(response, most)
        finally:
            connection.close()
        if budget.over:  # what was cut may look like an end
            raise TimeoutError("the time is over")
        return response.status, content


def _read_all(response: http.client.HTTPResponse, most: int) -> bytes:
    parts, size = [], 0
    while part := response.read(_CHUNK):
        parts.append(part)
        size += len(part)
        if size > most:
            raise TooLongError
    if response.length:  # promised, and not sent
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(parts)
