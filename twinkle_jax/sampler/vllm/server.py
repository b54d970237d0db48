"""A vLLM server as seen from here: requests are sent again, answers looked through."""

import json
import reprlib
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from twinkle_jax.sampler.vllm.budget import Budget
from twinkle_jax.sampler.vllm.exchange import FAULTS, TooLongError, exchange, read_address
from twinkle_jax.sampler.vllm.request import Request, ServerError

_PAUSES = (0.1, 0.5, 2.0, 5.0)  # seconds between attempts; the last one again and again
_FOR_NOW = (408, 425, 429, 500, 502, 503, 504)  # may be another at the next attempt
_CONNECTIONS = 256  # at a time


class Server:
    """Where requests go.

    Args:
        base_url: `http://HOST:PORT` or `https://…`; a `/v1` at its end is left out.
        api_key: what the server was started with, if with any.
        retries: how often a request is sent again after a lost connection or a server's fault.

    Raises:
        ValueError: for an address that is none, and numbers out of range.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, retries: int = 3) -> None:
        self._address = read_address(base_url)
        self.url = self._address.url
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise ValueError(f"retries must be an int of at least 0, got {retries!r}")
        self._retries = retries
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def call(self, budget: Budget, request: Request) -> Any:
        """Send a request until there is an answer, and look through it.

        Returns:
            What the request's `read` returns; None without one.

        Raises:
            ServerError: if there is no answer in time, or not the right one.
        """
        what = f"{self.url} must answer {request.method} {request.path}"
        what += f" for {request.purpose}" if request.purpose else ""
        attempts = 1 + (self._retries if request.repeat else 0)
        heard: list[str] = []
        for attempt in range(attempts):
            if attempt:
                budget.wait(_PAUSES[min(attempt, len(_PAUSES)) - 1])
            if budget.over:
                break
            try:
                status, content = self._once(budget, request)
            except TooLongError:
                raise ServerError(f"{what} in at most {request.most} bytes, got more") from None
            except FAULTS as fault:
                if not budget.over:  # which shuts connections
                    heard.append(f"{type(fault).__name__}: {fault}")
                continue
            if status == 200:
                return _look_through(content, request, what)
            heard.append(f"status {status}: {content.decode(errors='replace')[:300]}")
            if status not in _FOR_NOW:
                raise ServerError(f"{what}, got {heard[-1]}{request.hint if status == 404 else ''}")
        said = ", then ".join(dict.fromkeys(heard)) or "no answer"
        limit = f" within {budget.seconds:g} seconds" if budget.over else ""
        raise ServerError(f"{what}{limit}, got {said}")

    def call_all(self, budget: Budget, requests: Sequence[Request]) -> list[Any]:
        """Send requests side by side; the first error ends all of them.

        Returns:
            What their `read` return, in order.
        """
        with ThreadPoolExecutor(min(len(requests), _CONNECTIONS)) as pool:
            try:
                futures = [pool.submit(self.call, budget, request) for request in requests]
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                return [future.result() for future in futures]
            except BaseException:  # an interruption by the user too
                budget.cut()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _once(self, budget: Budget, request: Request) -> tuple[int, bytes]:
        body = None if request.body is None else json.dumps(request.body).encode()
        return exchange(
            self._address,
            budget,
            request.method,
            request.path,
            body,
            self._headers,
            most=request.most,
        )


def _look_through(content: bytes, request: Request, what: str) -> Any:
    if request.read is None:
        return None
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        raise ServerError(f"{what} with JSON, got {reprlib.repr(content)}") from None
    try:
        return request.read(answer)
    except ValueError as error:
        raise ServerError(f"{what} with {error}") from None
