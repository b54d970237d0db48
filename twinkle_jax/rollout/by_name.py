"""Environments and tools by name: a class of yours, TRL's, gymnasium's, or a server of OpenEnv."""

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import urlopen

from twinkle_jax._package import require
from twinkle_jax.data import Message
from twinkle_jax.reward.by_name import load_attribute, load_module
from twinkle_jax.rollout.environment import Action, EnvironmentFactory, Observation
from twinkle_jax.rollout.processes import (
    ProcessLimits,
    environments_in_processes,
    tools_in_processes,
)
from twinkle_jax.rollout.tools import ToolEnvironment, tool_schema

_LIMITS = ProcessLimits()


def find_environment(
    name: str | None,
    tools: str | None = None,
    *,
    tools_in: Literal["process", "thread"] = "process",
    environment_in: Literal["process", "thread"] = "thread",
    limits: ProcessLimits = _LIMITS,
) -> EnvironmentFactory:
    """Find an environment and tools by name, and return a function that makes the environment.

    Args:
        name: `FILE.py:NAME` or `MODULE:NAME` of a class, or of a function without arguments that
            returns an environment; the prefix `trl:` or `gym:` means that it has the interface of
            TRL's `environment_factory` or of gymnasium; or `openenv:URL` of a server. None: the
            tools alone are the environment.
        tools: `FILE.py` or `MODULE`, whose public functions are tools, or `FILE.py:NAME` of one
            function or a list of them; None for none.
        tools_in: `process` runs each call in a separate process, forked after the file was
            imported, so that changes which a call makes to its module are lost. `thread` runs calls
            in this process.
        environment_in: `process` runs the environment of each episode in a separate process,
            which is killed if it hangs. Ignored for OpenEnv, whose server is a process already.
        limits: time and memory limits of those processes; the time is also that of each answer of
            an OpenEnv server.

    Returns:
        A function that makes an environment for an episode.

    Raises:
        ValueError: if a name is not found, its file cannot be imported, or both names are None.
        TypeError: if a name is not that of an environment or of functions.
    """
    factory = None if name is None else _find_factory(name, limits.seconds)
    demonstrations = getattr(factory, "demonstrations", None)
    if name is not None and environment_in == "process" and not name.startswith("openenv:"):
        factory = environments_in_processes(name, limits)
    if tools is None and factory is None:
        raise ValueError("environment or tools must be given, got neither")
    if tools is not None:
        module_name, by_name = _named_tools(tools)
        functions = [function for function, _ in by_name.values()]
        if tools_in == "process":
            functions = tools_in_processes(by_name, module_name, limits)
        factory = functools.partial(_with_tools, functions, factory)
    assert factory is not None
    if demonstrations is not None and not hasattr(factory, "demonstrations"):
        factory.demonstrations = demonstrations  # type: ignore[attr-defined]
    return factory


def _with_tools(
    functions: Sequence[Callable[..., Any]], factory: EnvironmentFactory | None
) -> ToolEnvironment:
    return ToolEnvironment(functions, None if factory is None else factory())


def _find_factory(name: str, timeout: float) -> EnvironmentFactory:
    kind, colon, rest = name.partition(":")
    if kind == "openenv":
        return functools.partial(OpenEnvEnvironment, rest, timeout)
    adapter = _ADAPTERS.get(kind) if colon else None
    module_name, _, attribute = (rest if adapter else name).rpartition(":")
    if not module_name or not attribute:
        raise ValueError(
            "environment must be FILE.py:NAME or MODULE:NAME, with the prefix trl: or gym: for "
            f"their interfaces, or openenv:URL, got {name!r}"
        )
    factory = load_attribute(module_name, attribute, "environment")
    if not callable(factory):
        raise TypeError(f"environment must be a class or a function, got {factory!r:.80}")
    if adapter is not None:
        return functools.partial(_adapt, adapter, factory)
    if isinstance(factory, type):
        for method in ("reset", "step", "close"):
            if not callable(getattr(factory, method, None)):
                raise TypeError(f"environment must have a method {method}, got {name!r} without it")
    return factory


def _adapt(adapter: Callable[[Any], Any], factory: EnvironmentFactory) -> Any:
    return adapter(factory())


def find_tools(name: str) -> list[Callable[..., Any]]:
    """Find functions that a policy may call.

    Args:
        name: `FILE.py` or `MODULE`, whose public functions are the tools, except imported ones; or
            `FILE.py:NAME` or `MODULE:NAME` of a function or a list of functions.

    Raises:
        ValueError: if there are none.
        TypeError: if one of them is not a function.
    """
    return [function for function, _ in _named_tools(name)[1].values()]


def _named_tools(name: str) -> tuple[str, dict[str, tuple[Callable[..., Any], Sequence[Any]]]]:
    """Find tools: their module or file, and by the name of each its function and its place there.

    The place is the name of an attribute, and an index if that attribute is a list.
    """
    tools: list[tuple[Callable[..., Any], Sequence[Any]]]
    module_name, _, attribute = name.rpartition(":")
    if module_name and not attribute.endswith(".py"):
        value = load_attribute(module_name, attribute, "tools")
        if isinstance(value, list | tuple):
            tools = [(tool, (attribute, i)) for i, tool in enumerate(value)]
        else:
            tools = [(value, (attribute,))]
    else:
        module_name, module = name, load_module(name, "tools")
        tools = [
            (value, (key,))
            for key, value in vars(module).items()
            if inspect.isfunction(value)
            and value.__module__ == module.__name__
            and not key.startswith("_")
        ]
    if not tools:
        raise ValueError(f"tools must name functions, got none in {name!r}")
    for tool, _ in tools:
        if not callable(tool):
            raise TypeError(f"tools must be functions, got {tool!r:.80}")
    ToolEnvironment([tool for tool, _ in tools])  # raises before the run starts
    if module_name.endswith(".py"):
        module_name = str(Path(module_name).expanduser())
    return module_name, {tool_schema(tool)["function"]["name"]: (tool, key) for tool, key in tools}


class TRLEnvironment(ToolEnvironment):
    """Adapter of an environment for TRL's `environment_factory`: its public methods are tools.

    Its `reset` gets the columns of the row as keyword arguments, `prompt` among them; the text that
    it returns is appended to the user's last message. An action without a tool call ends the
    episode. `get_reward()`, if there is one, gives the reward of the episode.

    Args:
        environment: an object with `reset`, and methods with docstrings and type hints.

    Raises:
        TypeError: if it has no `reset`.

    Example:
        >>> class Counter:
        ...     def reset(self, **columns):
        ...         self.count = 0
        ...     def add(self, x: int) -> int:
        ...         '''Add a number.'''
        ...         self.count += x
        ...         return self.count
        ...     def get_reward(self):
        ...         return float(self.count)
        >>> environment = TRLEnvironment(Counter())
        >>> environment.reset({"messages": []}, 0)
        >>> call = '<tool_call>{"name": "add", "arguments": {"x": 3}}</tool_call>'
        >>> environment.step(Action(call))[0][0]["content"], environment.final_reward()
        ('3', 3.0)
    """

    def __init__(self, environment: Any) -> None:
        if not callable(getattr(environment, "reset", None)):
            raise TypeError(f"environment must have a method reset, got {environment!r:.80}")
        not_tools = ("reset", "get_reward", "close")
        methods = [
            method
            for name, method in inspect.getmembers(environment, callable)
            if not name.startswith("_") and name not in not_tools and inspect.ismethod(method)
        ]
        super().__init__(methods)
        self._inner = environment

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        """Start an episode with the columns of the row."""
        columns = dict(row.get("user_data") or [])
        return self._inner.reset(**{"prompt": row["messages"], **columns})

    def final_reward(self) -> Any:
        """Return the reward of the episode."""
        method = getattr(self._inner, "get_reward", None)
        return 0.0 if method is None else method()

    def close(self) -> Any:
        """Close the environment, if it has `close`."""
        method = getattr(self._inner, "close", None)
        return None if method is None else method()


class GymEnvironment:
    """Adapter of a gymnasium environment whose observations and actions are text, such as gem's.

    Its `reset(seed=…)` returns an observation and a dictionary; its `step(text)` returns an
    observation, a reward, whether the episode has terminated, whether it was truncated, and a
    dictionary.

    Args:
        environment: with gymnasium's interface.

    Example:
        >>> class Echo:
        ...     def reset(self, seed=None):
        ...         return f"seed {seed}", {}
        ...     def step(self, action):
        ...         return action, 0.5, False, True, {"length": len(action)}
        >>> environment = GymEnvironment(Echo())
        >>> environment.reset({}, 7)
        'seed 7'
        >>> environment.step(Action("ab"))
        ('ab', 0.5, True, {'length': 2})
    """

    def __init__(self, environment: Any) -> None:
        self._inner = environment

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Start an episode."""
        observation, _ = self._inner.reset(seed=seed)
        return _gym_observation(observation)

    def step(self, action: Action) -> tuple[Observation, Any, bool, Mapping[str, Any]]:
        """Take an action."""
        observation, reward, terminated, truncated, info = self._inner.step(str(action))
        return _gym_observation(observation), reward, bool(terminated or truncated), info

    def close(self) -> None:
        """Close the environment, if it has `close`."""
        if hasattr(self._inner, "close"):
            self._inner.close()


def _gym_observation(observation: Any) -> Observation:
    if observation is None or isinstance(observation, str | bytes):
        return observation
    return [Message(role="user", content=str(observation))]


_ADAPTERS: Mapping[str, Callable[[Any], Any]] = {"trl": TRLEnvironment, "gym": GymEnvironment}


# OpenEnv.

_TEXT_FIELDS = ("result", "output", "content", "text", "message", "response")
_PROTOCOL_FIELDS = ("metadata", "reward", "done")
_MAX_MESSAGE_BYTES = 1 << 22


class OpenEnvEnvironment:
    """A session of an OpenEnv server (0.10), over its WebSocket.

    The policy calls the tool `act`, whose parameters are the server's schema of actions; several
    calls of a turn are several actions. If actions have a single field and it is a string, text
    without such a call is an action as it is.
    The policy reads what the server says about invalid actions. Lost connections, a server that
    is full, and errors of the environment itself are failures. A reward of None, which OpenEnv
    has where there is none, is 0.

    Args:
        url: of the server, such as `http://127.0.0.1:8000`.
        timeout: seconds for a message.

    Raises:
        ValueError: if it is not an HTTP URL.
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
        with urlopen(f"http{secure}://{base}/schema", timeout=timeout) as response:  # noqa: S310
            schema = json.loads(response.read(_MAX_MESSAGE_BYTES))["action"]
        fields = {k: x for k, x in schema["properties"].items() if k not in _PROTOCOL_FIELDS}
        self._text_field = None
        if len(fields) == 1 and next(iter(fields.values())).get("type") == "string":
            self._text_field = next(iter(fields))
        required = [name for name in schema.get("required", []) if name in fields]
        parameters = {"type": "object", "properties": fields, "required": required}
        function = {"name": "act", "description": "Act in the environment."}
        self.tools = [{"type": "function", "function": {**function, "parameters": parameters}}]
        self._closing = contextlib.ExitStack()
        self._socket = self._closing.enter_context(
            connect(f"ws{secure}://{base}/ws", open_timeout=timeout, max_size=_MAX_MESSAGE_BYTES)
        )

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Start an episode with a seed."""
        return openenv_text(
            _without_protocol(self._request("reset", {"seed": seed})["observation"])
        )

    def step(self, action: Action) -> tuple[Observation, Any, bool, Mapping[str, Any]]:
        """Send an action, or one for each call until the episode is over; rewards are summed."""
        calls = [call["function"] for call in action.calls]
        requests, role = [call["arguments"] for call in calls if call["name"] == "act"], "tool"
        if not requests and self._text_field is not None:
            requests, role = [{self._text_field: str(action)}], "user"
        if not requests:
            return "Error: an action is a call of act", 0.0, False, {"tool_errors": 1}
        texts: list[str] = []
        rewards, errors, done = [], 0, False
        for data in requests:
            try:
                result = self._request("step", data)
            except _InvalidActionError as error:
                texts.append(f"Error: {error}")
                errors += 1
                continue
            texts.append(openenv_text(_without_protocol(result["observation"])))
            rewards += [] if result["reward"] is None else [result["reward"]]
            if done := bool(result["done"]):
                break
        if role == "tool":
            names = [call["name"] for call in calls if call["name"] != "act"]
            reasons = [f"there is no tool {name!r:.80}; there is act" for name in names]
            reasons += [error.reason for error in action.errors]
            texts += [f"Error: {reason}" for reason in reasons]
            errors += len(reasons)
        messages: Any = [{"role": role, "content": text} for text in texts]
        return messages, sum(rewards), done, {"tool_errors": errors} if errors else {}

    def close(self) -> None:
        """End the session."""
        try:
            self._socket.send(json.dumps({"type": "close"}))
        finally:
            self._closing.close()

    def _request(self, kind: str, data: Any) -> Mapping[str, Any]:
        self._socket.send(json.dumps({"type": kind, "data": data}))
        response = json.loads(self._socket.recv(self._timeout))
        if response["type"] == "error":
            code, message = response["data"].get("code"), response["data"].get("message")
            error_type = _InvalidActionError if code == "VALIDATION_ERROR" else RuntimeError
            raise error_type(f"{code}: {message!s:.400}")
        return response["data"]


class _InvalidActionError(ValueError):
    """The action does not match the server's schema."""


def _without_protocol(observation: Mapping[str, Any]) -> dict[str, Any]:
    return {k: x for k, x in observation.items() if k not in _PROTOCOL_FIELDS}


def openenv_text(observation: Any, text_fields: Sequence[str] = _TEXT_FIELDS) -> str:
    """Return the text of an observation of OpenEnv: its first text field, or all of it as JSON."""
    if observation is None or isinstance(observation, str):
        return observation or ""
    if hasattr(observation, "model_dump"):
        observation = observation.model_dump()
    if not isinstance(observation, Mapping):
        return str(observation)
    for name in text_fields:
        if observation.get(name) is not None:
            return str(observation[name])
    return json.dumps(observation, ensure_ascii=False, default=str)
