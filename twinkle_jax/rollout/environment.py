"""Environments: what a policy talks to, and how they are called so that they do no harm to a run.

An environment is any object with `reset`, `step` and `close`. It is called in a thread, with a
limit of time; whatever it raises or returns ends its own episode at most.
"""

import asyncio
import functools
import inspect
import json
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from twinkle_jax.data import Message, ParsedToolCalls, ToolCall, ToolCallError, parse_tool_calls
from twinkle_jax.data.tool_calls import TOOL_CALL_FORMATS
from twinkle_jax.reward.scoring import error_place

Observation = str | bytes | Message | Sequence[Message] | None
"""What an environment says: text of the user, a message of the user or a tool, several, nothing."""

ToolFormat = Literal["any", "hermes_qwen", "cline", "react"]
"""How tool calls are written in the policy's text; `any` tries all."""

_CAUSES = ("raised", "timeout", "connection", "reply", "died")
_SPEAKERS = ("user", "tool")  # an environment has no voice of the system or the assistant


class Action(str):
    """What the policy said in a turn: its text, and the tool calls in it.

    Args:
        text: of the assistant; hostile.
        tool_format: how calls are read.

    Example:
        >>> action = Action('<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>')
        >>> action.calls[0]["function"]["arguments"]
        {'x': 1}
        >>> int(Action(" 7"))
        7
    """

    def __new__(cls, text: str, tool_format: ToolFormat = "any") -> "Action":
        """Make a string."""
        return super().__new__(cls, text)

    def __init__(self, text: str, tool_format: ToolFormat = "any") -> None:
        self.tool_format = tool_format

    @functools.cached_property
    def _parsed(self) -> ParsedToolCalls:
        parse = (
            parse_tool_calls if self.tool_format == "any" else TOOL_CALL_FORMATS[self.tool_format]
        )
        return parse(str(self))

    @property
    def calls(self) -> list[ToolCall]:
        """Calls of tools, with dictionaries of arguments."""
        return self._parsed.calls

    @property
    def errors(self) -> list[ToolCallError]:
        """What is marked as a call and cannot be read."""
        return self._parsed.errors

    @property
    def content(self) -> str:
        """The text around the calls."""
        return self._parsed.content


class Environment(Protocol):
    """What a policy talks to. Each episode has an environment of its own; methods may be `async`.

    Two more things are optional: `tools`, a list of what the policy may call, in OpenAI's shape,
    which is read after `reset` and shown by the chat template; and `final_reward()`, which is
    called once, after the last step, and is added to the last turn's reward. An environment for
    which `seed` and the actions decide everything makes a run that can be repeated and resumed byte
    for byte.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Begin an episode.

        Args:
            row: of the task: `messages`, and the columns of its record.
            seed: of everything that is random; the same for all episodes of a group.

        Returns:
            What follows the messages of the row; None for nothing.
        """

    def step(self, action: Action) -> tuple[Observation, float, bool, Mapping[str, Any]]:
        """Answer the policy.

        Args:
            action: what it said.

        Returns:
            What the policy is told, the reward of this turn, whether the episode is over, and
            numbers for the metrics. `tool_errors` among them counts tools that failed.
        """

    def close(self) -> None:
        """Free what the environment holds; called once, whatever has happened."""


EnvironmentFactory = Callable[[], Any]
"""Makes an environment for an episode."""


class Reply(NamedTuple):
    """What an environment answered, checked.

    Attributes:
        messages: of the user or a tool.
        reward: of the turn; finite.
        done: whether the episode is over.
        info: numbers, by name.
    """

    messages: list[Message]
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, float] = {}


class BadReplyError(TypeError):
    """An environment answered something that is no answer."""


class ProcessFailedError(RuntimeError):
    """A tool or an environment in a process of its own failed, or the process died.

    Attributes:
        cause: as `failure_cause` names it.
    """

    def __init__(self, cause: str, text: str) -> None:
        super().__init__(text)
        self.cause = cause


class ToolRaisedError(Exception):
    """A tool in a process of its own raised what the policy is told."""


def failure_cause(error: BaseException) -> str:
    """Name the cause of a failure: `timeout`, `connection`, `reply`, `died` or `raised`."""
    if isinstance(error, ProcessFailedError):  # whose process may be hostile
        return error.cause if error.cause in _CAUSES else "raised"
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ConnectionError | EOFError) or "onnection" in type(error).__name__:
        return "connection"
    return "reply" if isinstance(error, BadReplyError) else "raised"


def describe_failure(error: BaseException) -> str:
    """Say what an environment raised, and where, in at most 500 characters."""
    if isinstance(error, ProcessFailedError):  # which was described where it happened
        return str(error)[:500]
    place = error_place(error)
    try:
        text = str(error)
    except Exception:
        text = "an error that cannot be shown"
    return f"{type(error).__name__}: {text}{f' ({place})' if place else ''}"[:500]


class Session:
    """One environment for one episode; its answers are checked, and it is closed once.

    Args:
        factory: makes the environment, at `reset`.
        max_characters: of an observation; of longer ones the middle is left out.
        run: waits for what an `async` method returns.
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
        """What the policy may call, after `reset`."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Reply:
        """Make the environment, and begin."""
        environment = self._factory()
        with self._lock:
            self._environment, closed = environment, self._closed
        if closed:  # time was up while it was made
            self._call(environment.close)
            raise TimeoutError("the environment was closed before it was made")
        reply = Reply(self._messages(self._call(environment.reset, row, seed)))
        self.tools = _descriptions(getattr(environment, "tools", None))
        return reply

    def step(self, action: Action) -> Reply:
        """Answer an action."""
        reply = self._call(self._environment.step, action)
        if not isinstance(reply, tuple | list) or len(reply) != 4:
            raise BadReplyError(
                f"step must return observation, reward, done and info, got {_shown(reply)}"
            )
        observation, reward, done, info = reply
        if not isinstance(done, bool | int | np.bool_):
            raise BadReplyError(f"done must be True or False, got {_shown(done)}")
        if info is not None and not isinstance(info, Mapping):
            raise BadReplyError(f"info must be a dictionary, got {_shown(info)}")
        return Reply(self._messages(observation), _finite(reward), bool(done), _numbers(info or {}))

    def final_reward(self) -> float:
        """Ask what is added at the end."""
        method = getattr(self._environment, "final_reward", None)
        return 0.0 if method is None else _finite(self._call(method))

    def close(self) -> None:
        """Close the environment, unless that was done."""
        with self._lock:
            environment, self._closed = (None if self._closed else self._environment), True
        if environment is not None:
            self._call(environment.close)

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        result = method(*args)
        return self._run(result) if inspect.isawaitable(result) else result

    def _messages(self, observation: Any) -> list[Message]:
        if observation is None:
            return []
        if isinstance(observation, str | bytes):
            return [Message(role="user", content=self._text(observation))]
        if isinstance(observation, Mapping):
            observation = [observation]
        if not isinstance(observation, list | tuple):
            raise BadReplyError(
                f"an observation must be text or messages, got {_shown(observation)}"
            )
        messages = []
        for message in observation:
            role = message.get("role") if isinstance(message, Mapping) else None
            text = message.get("content") if isinstance(message, Mapping) else None
            if role not in _SPEAKERS or not isinstance(text, str | bytes):
                raise BadReplyError(
                    "a message of an environment must have the role user or tool and content "
                    f"that is text, got {_shown(message)}"
                )
            names = {k: message[k] for k in ("name", "tool_call_id") if message.get(k) is not None}
            if not all(isinstance(name, str) for name in names.values()):
                raise BadReplyError(
                    f"name and tool_call_id of a message must be text, got {_shown(names)}"
                )
            names = {k: self._text(name) for k, name in names.items()}
            messages.append(Message(role=role, content=self._text(text), **names))  # type: ignore[typeddict-item]
        return messages

    def _text(self, text: str | bytes) -> str:
        """Shorten text before anything else reads it, and replace what is not Unicode."""
        limit, length = self._max_characters, len(text)
        if length > limit:
            half = limit // 2
            begin, end = text[: limit - half], text[length - half :]
            return f"{_unicode(begin)}[{length - limit} left out]{_unicode(end)}"
        return _unicode(text)


def _unicode(text: str | bytes) -> str:
    if isinstance(text, bytes):
        return text.decode("utf-8", "replace")
    return str(text).encode("utf-8", "replace").decode("utf-8")


def _descriptions(tools: Any) -> list[Any]:
    """Check descriptions of tools, which chat templates write as JSON."""
    try:
        json.dumps(tools)
    except (TypeError, ValueError, RecursionError):
        raise BadReplyError(f"tools must be what JSON can hold, got {_shown(tools)}") from None
    if tools is not None and not isinstance(tools, list | tuple):
        raise BadReplyError(f"tools must be a list, got {_shown(tools)}")
    return list(tools or ())


def _finite(reward: Any) -> float:
    try:
        number = 0.0 if reward is None else float(reward)
    except (TypeError, ValueError, OverflowError):
        raise BadReplyError(f"a reward must be a number, got {_shown(reward)}") from None
    if not abs(number) <= 3e38:  # of float32; NaN is not either
        raise BadReplyError(f"a reward must be finite in float32, got {number}")
    return number


def _numbers(info: Mapping[Any, Any]) -> dict[str, float]:
    kinds = (int, float, np.number, np.bool_)
    numbers = {k: x for k, x in info.items() if isinstance(k, str) and isinstance(x, kinds)}
    small = {k: float(x) for k, x in numbers.items() if not isinstance(x, int) or abs(x) < 10**300}
    return {k: x for k, x in small.items() if abs(x) < 1e300}  # NaN is not


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except Exception:
        return f"a value of type {type(value).__name__}"


# Calls with a limit of time.


class Call:
    """A call that a thread makes, or has made.

    Attributes:
        value: what it returned.
        error: what it raised; `TimeoutError` if time was up.
        seconds: that it took.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.value: Any = None
        self.error: BaseException | None = None
        self.started: float | None = None
        self.seconds = 0.0
        self.ended = False


class CallPool:
    """Calls functions in threads; one that does not return in time is left behind.

    A thread cannot be ended from outside. One whose time is up is left alone until its function
    returns, which nobody hears of, and another takes its place; none keeps a process from ending.

    Args:
        threads: calls at a time; others wait, and their time does not run.
        timeout: seconds for a call.
    """

    def __init__(self, threads: int, timeout: float) -> None:
        self.timeout = timeout
        self._jobs: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._limit, self._threads = threads, 0
        self._running: set[Call] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, function: Callable[..., Any], *args: Any) -> Call:
        """Begin a call."""
        call = Call(functools.partial(function, *args))
        with self._changed:
            if self._threads < self._limit:
                self._start_thread()
        self._jobs.put(call)
        return call

    def wait(self, calls: Sequence[Call], count: int) -> None:
        """Wait until so many of some calls have ended, or had to be given up."""
        with self._changed:
            while True:
                now = time.monotonic()
                for call in list(self._running):
                    if call.started is not None and now - call.started > self.timeout:
                        self._give_up(call)
                begun = [call.started for call in self._running if call.started is not None]
                rest = min(begun, default=now) + self.timeout - now
                if sum(call.ended for call in calls) >= count:
                    return
                self._changed.wait(max(rest, 0) + 1e-3)

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Wait, in a thread of the pool, for something `async`; one loop runs it all."""
        with self._changed:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_serve, args=(self._loop,), daemon=True).start()
            loop = self._loop

        async def wait() -> Any:
            return await awaitable

        future = asyncio.run_coroutine_threadsafe(wait(), loop)
        try:
            return future.result(self.timeout)
        except TimeoutError:
            future.cancel()
            raise

    def close(self) -> None:
        """Let the threads end."""
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

    def _give_up(self, call: Call) -> None:
        call.ended, call.seconds = True, self.timeout
        call.error = TimeoutError(f"an environment must answer within {self.timeout} s")
        self._running.discard(call)
        self._start_thread()
        self._threads -= 1  # the one left behind counts no more

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
                    return  # given up: another thread has taken this one's place
                call.value, call.error, call.ended = value, error, True
                call.seconds = time.monotonic() - call.started
                self._running.discard(call)
                self._changed.notify_all()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()
