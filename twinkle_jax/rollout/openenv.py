"""Environments behind a server of OpenEnv, over its WebSocket: one session for an episode."""

import contextlib
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from twinkle_jax.data import Message
from twinkle_jax.data.missing_extra import require
from twinkle_jax.rollout.environment import Action, Observation

_TEXTS = ("result", "output", "content", "text", "message", "response")
_OF_PROTOCOL = ("metadata", "reward", "done")
_MOST = 1 << 22  # bytes of a message


class OpenEnvEnvironment:
    """A session of an OpenEnv server (0.10).

    An action is the text itself, where the server's actions have one field and that is a string;
    or the arguments of a call of the tool `act`, whose parameters are the server's schema of
    actions. What the server says of wrong actions is told to the policy; lost connections, a server
    without room and errors of the environment itself are failures.

    Args:
        url: of the server, `http://127.0.0.1:8000` for one.
        timeout: seconds for a message.

    Raises:
        ValueError: if it is no URL of HTTP.
        ImportError: without the package `websockets`.
    """

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        require("websockets", "openenv")
        from websockets.sync.client import connect

        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.netloc:
            raise ValueError(f"environment must be openenv:http://HOST:PORT, got {url!r}")
        secure = "s" if parts.scheme in ("https", "wss") else ""
        base = f"{parts.netloc}{parts.path.rstrip('/')}"
        self._timeout = timeout
        with urlopen(f"http{secure}://{base}/schema", timeout=timeout) as answer:  # noqa: S310
            schema = json.loads(answer.read(_MOST))["action"]
        fields = {k: x for k, x in schema["properties"].items() if k not in _OF_PROTOCOL}
        self._field = None
        if len(fields) == 1 and next(iter(fields.values())).get("type") == "string":
            self._field = next(iter(fields))
        required = [name for name in schema.get("required", []) if name in fields]
        parameters = {"type": "object", "properties": fields, "required": required}
        described = {"name": "act", "description": "Act in the environment."}
        self.tools = [{"type": "function", "function": {**described, "parameters": parameters}}]
        self._closing = contextlib.ExitStack()
        self._socket = self._closing.enter_context(
            connect(f"ws{secure}://{base}/ws", open_timeout=timeout, max_size=_MOST)
        )

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Begin an episode with a seed."""
        return _as_text(self._ask("reset", {"seed": seed})["observation"])

    def step(self, action: Action) -> tuple[Observation, Any, bool, Mapping[str, Any]]:
        """Send an action."""
        if action.calls:
            data: Any = action.calls[0]["function"]["arguments"]
        elif self._field is not None:
            data = {self._field: str(action)}
        else:
            return "Error: an action is a call of act", 0.0, False, {"tool_errors": 1}
        try:
            result = self._ask("step", data)
        except _WrongActionError as error:
            return f"Error: {error}", 0.0, False, {"tool_errors": 1}
        text = _as_text(result["observation"])
        message = Message(role="tool" if action.calls else "user", content=text)
        return message, result["reward"], bool(result["done"]), {}

    def close(self) -> None:
        """End the session."""
        try:
            self._socket.send(json.dumps({"type": "close"}))
        finally:
            self._closing.close()

    def _ask(self, kind: str, data: Any) -> Mapping[str, Any]:
        self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self._socket.recv(self._timeout))
        if answer["type"] == "error":
            code, message = answer["data"].get("code"), answer["data"].get("message")
            kind_of_error = _WrongActionError if code == "VALIDATION_ERROR" else RuntimeError
            raise kind_of_error(f"{code}: {message!s:.400}")
        result: Mapping[str, Any] = answer["data"]
        return result


class _WrongActionError(ValueError):
    """The server's schema does not allow an action."""


def _as_text(observation: Mapping[str, Any]) -> str:
    """Give the text of an observation, or all of it as JSON."""
    fields = {k: x for k, x in observation.items() if k not in _OF_PROTOCOL}
    for name in _TEXTS:
        if isinstance(fields.get(name), str):
            return str(fields[name])
    return json.dumps(fields, ensure_ascii=False)
