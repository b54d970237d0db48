"""Environments: their interface, and calls of them that cannot break a run.

An environment is any object with `reset`, `step` and `close`. It is called in a thread, with a
timeout. Errors and invalid return values affect its own episode only.
"""

import asyncio
import copy
import functools
import inspect
import json
import math
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from twinkle_jax.data import Message, ParsedToolCalls, ToolCall, ToolCallError, parse_tool_calls
from twinkle_jax.reward.scoring import error_place, shown

Observation = str | bytes | Message | Sequence[Message] | None
"""What the policy reads: text (as a user's message), messages of a user or a tool, or None."""

ToolFormat = Literal[
    "any", "hermes_qwen", "cline", "react", "llama", "mistral", "deepseek", "harmony", "gemma"
]
"""Format of tool calls in the policy's text; `any` tries the first three."""

_CAUSES = ("raised", "timeout", "connection", "reply", "died")
MOST_MESSAGES = 256  # of an observation; each has its own limit of characters
_ROLES = ("user", "tool")  # an environment must not write as the system or the assistant


class Action(str):
    """A turn of the policy: its text, and the tool calls in it.

    Args:
        text: of the assistant; do not trust it.
        tool_format: of tool calls; several are tried in their order.
        thinking: whether the prompt ends with `<think>`, so that the text begins with thinking.

    Example:
        >>> action = Action('<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>')
        >>> action.calls[0]["function"]["arguments"]
        {'x': 1}
        >>> int(Action(" 7"))
        7
    """

    def __new__(
        cls, text: str, tool_format: ToolFormat | Sequence[str] = "any", thinking: bool = False
    ) -> "Action":
        """Make a string."""
        return super().__new__(cls, text)

    def __init__(
        self, text: str, tool_format: ToolFormat | Sequence[str] = "any", thinking: bool = False
    ) -> None:
        self.tool_format, self.thinking = tool_format, thinking

    @functools.cached_property
    def _parsed(self) -> ParsedToolCalls:
        return parse_tool_calls(str(self), self.tool_format, thinking=self.thinking)

    @property
    def calls(self) -> list[ToolCall]:
        """Tool calls outside of thinking, with dictionaries of arguments."""
        return self._parsed.calls

    @property
    def errors(self) -> list[ToolCallError]:
        """Tool calls that cannot be parsed."""
        return self._parsed.errors

    @property
    def content(self) -> str:
        """The text around the calls."""
        return self._parsed.content


class Environment(Protocol):
    """The interface of an environment. Each episode has one of its own; methods may be `async`.

    Optional: `tools`, a list of tool descriptions in OpenAI's format, which is read after `reset`
    and passed to the chat template; and `final_reward()`, which is called once after the last step,
    and is added to the last turn's reward. If an environment is deterministic given its seed and
    the actions, runs can be repeated and resumed byte for byte.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Start an episode.

        Args:
            row: of the task: `messages`, and the columns of its record as `user_data`.
            seed: for random numbers; the same for all episodes of a group.

        Returns:
            The first observation, which follows the messages of the row; None for none.
        """

    def step(self, action: Action) -> tuple[Observation, float, bool, Mapping[str, Any]]:
        """Take an action.

        Args:
            action: the policy's turn.

        Returns:
            The observation; the reward of this turn, a finite number; whether the episode is over;
            and numbers for the metrics, which may be NaN or infinite. Among these, `tool_errors` is
            the number of tool calls that failed or cannot be parsed; without it, those that cannot
            be parsed are counted.
        """

    def close(self) -> None:
        """Release resources; called once, also after errors."""


EnvironmentFactory = Callable[[], Any]
"""A function or class that makes an environment for an episode."""


class Reply(NamedTuple):
    """A checked reply of an environment: a finite reward; numbers in `info` may be any."""

    messages: list[Message]
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, float] = {}


class BadReplyError(TypeError):
    """An environment returned something invalid."""


class ProcessFailedError(RuntimeError):
    """A tool or an environment in a separate process failed, or the process died.

    Attributes:
        cause: one of those of `failure_cause`.
    """

    def __init__(self, cause: str, text: str) -> None:
        super().__init__(text)
        self.cause = cause


class ToolRaisedError(Exception):
    """A tool in a separate process raised an error, which is shown to the policy."""


def failure_cause(error: BaseException) -> str:
    """Return the cause of a failure: `timeout`, `connection`, `reply`, `died` or `raised`."""
    if isinstance(error, ProcessFailedError):  # do not trust what its process sent
        return error.cause if error.cause in _CAUSES else "raised"
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ConnectionError | EOFError) or "onnection" in type(error).__name__:
        return "connection"
    return "reply" if isinstance(error, BadReplyError) else "raised"


def describe_failure(error: BaseException) -> str:
    """Describe an error of an environment and where it was raised, in at most 500 characters."""
    if isinstance(error, ProcessFailedError):  # described in its process
        return _valid_unicode(str(error)[:500])
    place = error_place(error)
    try:
        text = str(error)
    except Exception:
        text = "its message cannot be shown"
    return _valid_unicode(f"{type(error).__name__}: {text}{f' ({place})' if place else ''}"[:500])


class Session:
    """The environment of an episode, made at `reset`; its replies are checked, it is closed once.

    Longer observations than `max_characters` lose their middle; `run` waits for `async` methods.
    """

    def __init__(
        self,
        factory: EnvironmentFactory,
        max_characters: int,
        run: Callable[[Awaitable[Any]], Any],
    ) -> None:
        self._factory, self._max_characters, self._run = factory, max_characters, run
        self._environment: Any = None
        self._closed = False
        self._lock = threading.Lock()
        self.tools: list[Any] = []
        """Descriptions of tools, after `reset`."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Reply:
        """Make the environment, and start the episode."""
        environment = self._factory()
        with self._lock:
            self._environment, closed = environment, self._closed
        if closed:  # after a timeout while it was made
            self._call(environment.close)
            raise TimeoutError("the environment was closed before it was made")
        # A copy: other episodes have the same row.
        reply = Reply(self._messages(self._call(environment.reset, copy.deepcopy(row), seed)))
        self.tools = _checked_tools(getattr(environment, "tools", None))
        return reply

    def step(self, action: Action) -> Reply:
        """Take an action."""
        reply = self._call(self._environment.step, action)
        if not isinstance(reply, tuple | list) or len(reply) != 4:
            raise BadReplyError(
                f"step must return observation, reward, done and info, got {shown(reply)}"
            )
        observation, reward, done, info = reply
        if not isinstance(done, bool | int | np.bool_):
            raise BadReplyError(f"done must be True or False, got {shown(done)}")
        if info is not None and not isinstance(info, Mapping):
            raise BadReplyError(f"info must be a dictionary, got {shown(info)}")
        messages, reward = self._messages(observation), self._reward(reward, "step")
        return Reply(messages, reward, bool(done), _numbers(info or {}))

    def final_reward(self) -> float:
        """Return the reward that is added at the end."""
        method = getattr(self._environment, "final_reward", None)
        return 0.0 if method is None else self._reward(self._call(method), "final_reward")

    def close(self) -> None:
        """Close the environment, unless it is closed."""
        with self._lock:
            environment, self._closed = (None if self._closed else self._environment), True
        if environment is not None:
            self._call(environment.close)

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        result = method(*args)
        return self._run(result) if inspect.isawaitable(result) else result

    def _reward(self, reward: Any, method: str) -> float:
        name = f"the reward of {type(self._environment).__name__}.{method}"
        try:
            number = float(reward)
        except (TypeError, ValueError, OverflowError):
            raise BadReplyError(f"{name} must be a number, got {shown(reward)}") from None
        if not abs(number) <= 3e38:  # the range of float32; also rejects NaN
            raise BadReplyError(f"{name} must be finite in float32, got {number}")
        return number

    def _messages(self, observation: Any) -> list[Message]:
        if observation is None:
            return []
        if isinstance(observation, str | bytes):
            return [Message(role="user", content=self._text(observation))]
        if isinstance(observation, Mapping):
            observation = [observation]
        if not isinstance(observation, list | tuple):
            raise BadReplyError(
                f"an observation must be text or messages, got {shown(observation)}"
            )
        if len(observation) > MOST_MESSAGES:
            raise BadReplyError(
                f"an observation must have at most {MOST_MESSAGES} messages, got {len(observation)}"
            )
        messages = []
        for message in observation:
            role = message.get("role") if isinstance(message, Mapping) else None
            text = message.get("content") if isinstance(message, Mapping) else None
            if role not in _ROLES or not isinstance(text, str | bytes):
                raise BadReplyError(
                    "a message of an environment must have the role user or tool and content "
                    f"that is text, got {shown(message)}"
                )
            names = {k: message[k] for k in ("name", "tool_call_id") if message.get(k) is not None}
            if not all(isinstance(name, str) for name in names.values()):
                raise BadReplyError(
                    f"name and tool_call_id of a message must be text, got {shown(names)}"
                )
            names = {k: self._text(name) for k, name in names.items()}
            messages.append(Message(role=role, content=self._text(text), **names))  # type: ignore[typeddict-item]
        return messages

    def _text(self, text: str | bytes) -> str:
        """Shorten text before anything else reads it, and replace invalid Unicode."""
        limit, length = self._max_characters, len(text)
        if length > limit:
            half = limit // 2
            start, end = text[: limit - half], text[length - half :]
            return f"{_valid_unicode(start)}[{length - limit} left out]{_valid_unicode(end)}"
        return _valid_unicode(text)


def _valid_unicode(text: str | bytes) -> str:
    if isinstance(text, bytes):
        return text.decode("utf-8", "replace")
    return str(text).encode("utf-8", "replace").decode("utf-8")


def _checked_tools(tools: Any) -> list[Any]:
    """Copy descriptions of tools, which chat templates write as JSON.

    The environment keeps its own. Lone surrogates, which no tokenizer reads, are replaced.
    """
    try:
        copied = json.loads(_valid_unicode(json.dumps(tools, ensure_ascii=False, allow_nan=False)))
    except (TypeError, ValueError, RecursionError):
        raise BadReplyError(f"tools must be serialisable as JSON, got {shown(tools)}") from None
    if tools is not None and not isinstance(tools, list | tuple):
        raise BadReplyError(f"tools must be a list, got {shown(tools)}")
    return list(copied or ())


def _numbers(info: Mapping[Any, Any]) -> dict[str, float]:
    kinds = (int, float, np.number, np.bool_)
    numbers = {
        name: _as_float(x)
        for name, x in info.items()
        if isinstance(name, str) and isinstance(x, kinds)
    }
    if not math.isfinite(numbers.get("tool_errors", 0)):
        raise BadReplyError(f"tool_errors in info must be finite, got {numbers['tool_errors']}")
    return numbers


def _as_float(number: Any) -> float:
    try:
        return float(number)
    except OverflowError:  # an int above the range of float
        return math.inf if number > 0 else -math.inf


# Calls with a timeout.


class Call:
    """A call in a thread: what it returned or raised, `TimeoutError` after a timeout, and when."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.value: Any = None
        self.error: BaseException | None = None
        self.started: float | None = None
        self.seconds = 0.0
        self.ended = False


class CallPool:
    """Calls functions in threads, with a timeout.

    A thread cannot be ended from outside. After a timeout its call is abandoned: the result is
    ignored, and another thread takes its place. Threads do not keep the process from exiting. The
    timeout of a call, in seconds, starts when a thread is free for it.
    """

    def __init__(self, threads: int, timeout: float) -> None:
        self.timeout = timeout
        self._jobs: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._limit, self._threads = threads, 0
        self._running: set[Call] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, function: Callable[..., Any], *args: Any) -> Call:
        """Start a call."""
        call = Call(functools.partial(function, *args))
        with self._changed:
            if self._threads < self._limit:
                self._start_thread()
        self._jobs.put(call)
        return call

    def wait(self, calls: Sequence[Call], count: int) -> None:
        """Wait until `count` of the calls have ended or timed out."""
        with self._changed:
            while True:
                now = time.monotonic()
                for call in list(self._running):
                    if call.started is not None and now - call.started > self.timeout:
                        self._abandon(call)
                started = [call.started for call in self._running if call.started is not None]
                remaining = min(started, default=now) + self.timeout - now
                if sum(call.ended for call in calls) >= count:
                    return
                self._changed.wait(max(remaining, 0) + 1e-3)

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Wait for a coroutine, in a thread of the pool; all of them run in one event loop."""
        with self._changed:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_serve, args=(self._loop,), daemon=True).start()
            loop = self._loop

        async def wait() -> Any:
            try:
                return await awaitable
            except (SystemExit, KeyboardInterrupt) as error:  # would end the loop of all others
                raise RuntimeError(f"an environment raised {type(error).__name__}") from error

        future = asyncio.run_coroutine_threadsafe(wait(), loop)
        try:
            return future.result(self.timeout)
        except TimeoutError:
            if future.cancel():
                raise TimeoutError(_too_slow(self.timeout)) from None
            raise  # of the environment itself

    def close(self) -> None:
        """End the threads that are idle, and the others after their call."""
        with self._changed:
            for _ in range(self._threads):
                self._jobs.put(None)
            self._threads = 0
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None

    def _start_thread(self) -> None:
        self._threads += 1
        threading.Thread(target=self._work, name="environment", daemon=True).start()

    def _abandon(self, call: Call) -> None:
        call.ended, call.seconds = True, self.timeout
        call.error = TimeoutError(_too_slow(self.timeout))
        self._running.discard(call)
        self._start_thread()
        self._threads -= 1  # the abandoned thread is not counted

    def _work(self) -> None:
        while (call := self._jobs.get()) is not None:
            with self._changed:
                call.started = time.monotonic()
                self._running.add(call)
            value, error = None, None
            try:
                value = call.function()
            except BaseException as raised:  # SystemExit must not end the run
                error = raised
            with self._changed:
                if call.ended:
                    return  # abandoned: another thread has taken the place of this one
                call.value, call.error, call.ended = value, error, True
                call.seconds = time.monotonic() - call.started
                self._running.discard(call)
                self._changed.notify_all()


def _too_slow(timeout: float) -> str:
    return f"an environment must answer within {timeout} s"


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()
