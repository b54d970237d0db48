"""Tools and environments in separate processes, with limits of time and memory."""

import base64
import contextlib
import functools
import itertools
import json
import os
import pickle
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from twinkle_jax.data import Message, Tool
from twinkle_jax.data.worker_process import WorkerProcess
from twinkle_jax.rollout.environment import Action, ProcessFailedError, ToolRaisedError

_SCRIPT = Path(__file__).with_name("process_worker.py")
_START_SECONDS = 120.0  # for importing the user's file
_DIED = ("died", "its process has ended")
_GRACE = 10.0  # seconds more than the limit, which the process itself enforces


class ProcessLimits(NamedTuple):
    """Limits of a call of a tool, or of an environment, in a process.

    Attributes:
        seconds: for each call; then the process is killed, with all processes it has started.
        megabytes: of memory, in addition to what importing the file takes.
    """

    seconds: float = 60.0
    megabytes: int = 1024


class _Answers:
    """Passes the answers of a process to the callers that wait for them, in a thread."""

    def __init__(self, output: IO[str]) -> None:
        self._output = output
        self._lock = threading.Lock()
        self._waiting: dict[int, queue.SimpleQueue[Mapping[str, Any]]] = {}
        self.ended = False
        threading.Thread(target=self._read_answers, name="processes", daemon=True).start()

    def expect(self, runner: int) -> "queue.SimpleQueue[Mapping[str, Any]]":
        """Return a queue that will receive the next answer of a runner."""
        with self._lock:
            answers: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
            self._waiting[runner] = answers
            if self.ended:
                answers.put({"failed": _DIED})
            return answers

    def _read_answers(self) -> None:
        with contextlib.suppress(ValueError):  # closed while it is read
            for line in self._output:
                answer = json.loads(line)
                with self._lock:
                    answers = self._waiting.pop(answer["runner"], None)
                if answers is not None:
                    answers.put(answer)
        with self._lock:
            self.ended = True
            for answers in self._waiting.values():
                answers.put({"failed": _DIED})
            self._waiting.clear()


class Processes:
    """Runs calls of a user's file in forks of a process that has imported it.

    The process is started by the first request, and again if it has ended. Thread-safe. What it
    imports is described in the form of `process_worker`, as are requests.
    """

    def __init__(self, description: Mapping[str, Any], limits: ProcessLimits) -> None:
        # Rewards and environments may change the working directory before the process starts.
        self._description = {"directory": os.getcwd(), **description}
        self.limits = limits
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self.worker = WorkerProcess(_SCRIPT)
        self._answers: _Answers | None = None

    def open(self, *, once: bool = False) -> "Runner":
        """Return a runner, which is forked by its first call; `once`: it ends after that call."""
        return Runner(self, next(self._numbers), once=once)

    def request(
        self, request: Mapping[str, Any], *, start_process: bool, seconds: float | None = None
    ) -> Any:
        """Send a request, and wait for its answer; without `seconds` there is none.

        Raises:
            ProcessFailedError: if there is no answer, or the runner has died or failed.
            ToolRaisedError: if a tool raised an error, which is shown to the policy.
        """
        with self._lock:
            if self._answers is None or self._answers.ended:
                if not start_process:
                    raise ProcessFailedError(*_DIED)
                self._answers = self._start()
            answers = None if seconds is None else self._answers.expect(request["runner"])
            self.worker.send(json.dumps(request))  # `_Answers` reports its end
        if answers is None:
            return None
        try:
            answer = answers.get(timeout=seconds)
        except queue.Empty:
            raise ProcessFailedError("timeout", "its process does not answer") from None
        if "failed" in answer:
            raise ProcessFailedError(*map(str, answer["failed"]))
        if "tool_error" in answer:
            raise ToolRaisedError(str(answer["tool_error"]))
        return answer.get("value")

    def _start(self) -> _Answers:
        self.worker.start()
        process = self.worker.process
        assert process is not None
        assert process.stdout is not None
        start_timer = threading.Timer(_START_SECONDS, process.kill)
        start_timer.daemon = True
        start_timer.start()
        line = self.worker.ask(json.dumps({"path": sys.path, **self._description}))
        start_timer.cancel()
        ready = json.loads(line) if line else {"error": ""}
        if "ready" not in ready:
            errors = self.worker.end()
            raise RuntimeError(
                "tools and environments in processes must be importable there, got "
                f"{ready['error'] or errors}"
            )
        return _Answers(process.stdout)


class Runner:
    """A forked process that runs one call after the other."""

    def __init__(self, processes: Processes, number: int, *, once: bool) -> None:
        self._processes, self._number, self._once = processes, number, once
        self._first = True

    def call(self, *call: Any) -> Any:
        """Run a call, and return its result; raises the errors of `Processes.request`."""
        limits, first = self._processes.limits, self._first
        self._first = False
        request = {
            "runner": self._number,
            "call": call,
            "first": first,
            "once": self._once,
            "seconds": limits.seconds,
            "megabytes": limits.megabytes,
        }
        return self._processes.request(
            request, start_process=first, seconds=limits.seconds + _GRACE
        )

    def end(self) -> None:
        """Kill the process."""
        with contextlib.suppress(ProcessFailedError):
            self._processes.request({"runner": self._number}, start_process=False)


def tools_in_processes(
    functions: Mapping[str, tuple[Callable[..., Any], Sequence[Any]]],
    module_name: str,
    limits: ProcessLimits,
) -> list[Callable[..., Any]]:
    """Wrap functions so that each call runs in a separate process.

    Each has its place in the module: the name of an attribute, and an index if that is a list.
    """
    keys = {name: list(key) for name, (_, key) in functions.items()}
    processes = Processes({"kind": "tools", "module": module_name, "functions": keys}, limits)

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            return processes.open(once=True).call(name, arguments)

        functools.update_wrapper(call, function)  # copies signature and docstring
        call.__name__ = name
        return call

    return [wrapped(name, function) for name, (function, _) in functions.items()]


class ProcessEnvironment:
    """An environment in a separate process, which lasts as long as the episode.

    If it hangs, it is killed with all processes that it has started, and no thread is left over.
    """

    def __init__(self, processes: Processes) -> None:
        self._runner = processes.open()
        self.tools: list[Tool] = []

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        """Start an episode."""
        # The values of a row may be of any type, such as dates, which JSON does not have.
        pickled = base64.b64encode(pickle.dumps(dict(row))).decode()
        messages, self.tools = self._runner.call("reset", pickled, seed)
        return list(messages)

    def step(self, action: Action) -> Any:
        """Take an action."""
        return self._runner.call("step", str(action), action.tool_format, action.thinking)

    def final_reward(self) -> Any:
        """Return the reward that is added at the end."""
        return self._runner.call("final_reward")

    def close(self) -> None:
        """Close the environment, and end its process."""
        try:
            self._runner.call("close")
        finally:
            self._runner.end()


def environments_in_processes(name: str, limits: ProcessLimits) -> Callable[[], Any]:
    """Return a function that makes environments, each in a separate process."""
    description = {"kind": "environments", "name": name}
    return functools.partial(ProcessEnvironment, Processes(description, limits))
