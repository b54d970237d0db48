"""Tools and environments in processes of their own, with limits of time and memory."""

import contextlib
import functools
import itertools
import json
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from twinkle_jax.data import Message, Tool
from twinkle_jax.reward.worker_process import WorkerProcess, end, start
from twinkle_jax.rollout.environment import Action, ProcessFailedError, ToolRaisedError

_SCRIPT = Path(__file__).with_name("process_worker.py")
_START = 120.0  # seconds in which the user's file must be imported
_DEAD = ("died", "its process has ended")
_GRACE = 10.0  # seconds that an answer may take beyond the limit that the process keeps


class ProcessLimits(NamedTuple):
    """What a call of a tool, or of an environment in a process, may take.

    Attributes:
        seconds: until it must answer; then its process is killed, with all that it has started.
        megabytes: of memory, above what importing the file takes.
    """

    seconds: float = 60.0
    megabytes: int = 1024


class _Answers:
    """Answers of a process by the number of their runner, sorted by a thread."""

    def __init__(self, process: WorkerProcess) -> None:
        self._output = process.process.stdout
        self._lock = threading.Lock()
        self._waiting: dict[int, queue.SimpleQueue[Mapping[str, Any]]] = {}
        self.ended = False
        threading.Thread(target=self._sort, name="processes", daemon=True).start()

    def expect(self, runner: int) -> "queue.SimpleQueue[Mapping[str, Any]]":
        """Give the place where the next answer of a runner comes."""
        with self._lock:
            place: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
            self._waiting[runner] = place
            if self.ended:
                place.put({"failed": _DEAD})
            return place

    def _sort(self) -> None:
        assert self._output is not None
        with contextlib.suppress(ValueError):  # closed while it is read
            for line in self._output:
                answer = json.loads(line)
                with self._lock:
                    place = self._waiting.pop(answer["runner"], None)
                if place is not None:
                    place.put(answer)
        with self._lock:
            self.ended = True
            for place in self._waiting.values():
                place.put({"failed": _DEAD})
            self._waiting.clear()


class Processes:
    """Runners of a user's file: forked from a process that has imported it, and killed by it.

    Started when it is first asked, and again if it has ended. Any thread may ask.

    Args:
        description: what the process imports, see `process_worker`.
        limits: of each question.
    """

    def __init__(self, description: Mapping[str, Any], limits: ProcessLimits) -> None:
        self._description, self.limits = dict(description), limits
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._running: list[WorkerProcess] = []  # one at most; a list for the finalizer to share
        self._answers: _Answers | None = None
        weakref.finalize(self, end, self._running)

    def open(self, *, once: bool = False) -> "Runner":
        """Give a runner, which is forked at its first question; `once`: it ends with its answer."""
        return Runner(self, next(self._numbers), once=once)

    def request(
        self, request: Mapping[str, Any], *, begin: bool, seconds: float | None = None
    ) -> Any:
        """Send a request; with a number of seconds, wait so long for the answer.

        Args:
            request: a line, see `process_worker`.
            begin: start the process if it is not running.
            seconds: None for a request that has no answer.

        Raises:
            ProcessFailedError: if there is no answer, or the runner has died or failed.
            ToolRaisedError: if a tool raised what the policy is told.
        """
        with self._lock:
            if self._answers is None or self._answers.ended:
                if not begin:
                    raise ProcessFailedError(*_DEAD)
                end(self._running)
                self._answers = self._start()
            place = None if seconds is None else self._answers.expect(request["runner"])
            stdin = self._running[0].process.stdin
            assert stdin is not None
            with contextlib.suppress(OSError):  # it has ended: the thread that reads says so
                stdin.write(json.dumps(request, default=str) + "\n")
                stdin.flush()
        if place is None:
            return None
        try:
            answer = place.get(timeout=seconds)
        except queue.Empty:
            raise ProcessFailedError("timeout", "its process does not answer") from None
        if "failed" in answer:
            raise ProcessFailedError(*map(str, answer["failed"]))
        if "told" in answer:
            raise ToolRaisedError(str(answer["told"]))
        return answer.get("value")

    def _start(self) -> _Answers:
        self._running.append(start([sys.executable, "-P", str(_SCRIPT)]))
        process = self._running[0].process
        assert process.stdin is not None
        assert process.stdout is not None
        impatient = threading.Timer(_START, process.kill)
        impatient.daemon = True
        impatient.start()
        with contextlib.suppress(OSError):
            process.stdin.write(json.dumps({"path": sys.path, **self._description}) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        impatient.cancel()
        ready = json.loads(line) if line else {"error": ""}
        if "ready" not in ready:
            errors = end(self._running)
            raise RuntimeError(
                "tools and environments in processes must be importable there, got "
                f"{ready['error'] or errors}"
            )
        return _Answers(self._running[0])


class Runner:
    """A forked process that answers questions one after the other."""

    def __init__(self, processes: Processes, number: int, *, once: bool) -> None:
        self._processes, self._number, self._once = processes, number, once
        self._first = True

    def ask(self, *question: Any) -> Any:
        """Ask, and wait for the answer; raises what `Processes.request` does."""
        limits, first = self._processes.limits, self._first
        self._first = False
        request = {
            "runner": self._number,
            "question": question,
            "first": first,
            "once": self._once,
            "seconds": limits.seconds,
            "megabytes": limits.megabytes,
        }
        return self._processes.request(request, begin=first, seconds=limits.seconds + _GRACE)

    def end(self) -> None:
        """Have it killed."""
        with contextlib.suppress(ProcessFailedError):
            self._processes.request({"runner": self._number}, begin=False)


def tools_in_processes(
    functions: Mapping[str, tuple[Callable[..., Any], Sequence[Any]]],
    place: str,
    limits: ProcessLimits,
) -> list[Callable[..., Any]]:
    """Make functions whose calls run in a process each.

    Args:
        functions: by name: the function, and where its file has it: the name of an attribute, and
            an index if that is a list.
        place: `FILE.py` or `MODULE`.
        limits: of a call.
    """
    keys = {name: list(key) for name, (_, key) in functions.items()}
    processes = Processes({"kind": "tools", "place": place, "functions": keys}, limits)

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            return processes.open(once=True).ask(name, arguments)

        functools.update_wrapper(call, function)  # its signature and docstring
        call.__name__ = name
        return call

    return [wrapped(name, function) for name, (function, _) in functions.items()]


class ProcessEnvironment:
    """An environment in a process of its own, from its first observation to its end.

    What hangs is killed with all that it has started, so that no thread is left behind.

    Args:
        processes: runners of environments.
    """

    def __init__(self, processes: Processes) -> None:
        self._runner = processes.open()
        self.tools: list[Tool] = []

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        """Begin an episode."""
        messages, self.tools = self._runner.ask("reset", dict(row), seed)
        return list(messages)

    def step(self, action: Action) -> Any:
        """Answer an action."""
        return self._runner.ask("step", str(action), action.tool_format)

    def final_reward(self) -> Any:
        """Ask for what is added at the end."""
        return self._runner.ask("final_reward")

    def close(self) -> None:
        """Close the environment, and end its process."""
        try:
            self._runner.ask("close")
        finally:
            self._runner.end()


def environments_in_processes(name: str, limits: ProcessLimits) -> Callable[[], Any]:
    """Make what makes environments, each in a process of its own.

    Args:
        name: as `find_environment` takes it.
        limits: of each answer.
    """
    description = {"kind": "environments", "name": name}
    return functools.partial(ProcessEnvironment, Processes(description, limits))
