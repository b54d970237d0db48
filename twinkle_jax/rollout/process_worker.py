"""The process that tools, and environments that are asked to, run in: started by `processes`.

It imports the user's file once, and forks a runner for each call of a tool, or for each episode of
an environment. A runner has limits of time and memory; when it has answered, hangs, or is dead, it
is killed with all processes that it has started. Lines of JSON come in and go out, with the
number of their runner. A runner's answer is read as JSON and never evaluated.
"""

import asyncio
import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

_DEATH_SIGNAL, _SUBREAPER = 1, 36  # of prctl
_LONGEST = 1 << 24  # bytes of an answer
_CHARACTERS = 1 << 20  # of a tool's result
_FAILURES = (  # not the policy's fault
    (TimeoutError, "timeout"),
    (ConnectionError, "connection"),
    (EOFError, "connection"),
    (MemoryError, "raised"),
)


def main() -> None:
    """Import what is asked for, say whether that worked, and serve until the input ends."""
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what libraries print goes nowhere
    request = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = request["path"]
    try:
        make = _tools(request) if request["kind"] == "tools" else _environments(request)
    except BaseException as error:
        ready: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"}
    else:
        ready = {"ready": True}
    os.write(answers, (json.dumps(ready) + "\n").encode())
    if "ready" in ready:
        _Server(answers, make).serve()


# What a runner does.

Handler = Callable[[list[Any]], Any]


def _tools(request: dict[str, Any]) -> Callable[[], Handler]:
    module = _module(request["place"])
    functions = {}
    for name, key in request["functions"].items():
        value = getattr(module, key[0])
        functions[name] = value if len(key) == 1 else value[key[1]]

    def answer(question: list[Any]) -> Any:
        name, arguments = question
        try:
            result = functions[name](**arguments)
            if inspect.isawaitable(result):
                result = asyncio.run(_wait(result))
        except tuple(kind for kind, _ in _FAILURES) as error:
            cause = next(cause for kind, cause in _FAILURES if isinstance(error, kind))
            return {"failed": [cause, f"{name}: {type(error).__name__}: {error}"]}
        except Exception as error:
            return {"told": f"{type(error).__name__}: {error}"[:_CHARACTERS]}
        return {"value": _text(result)[:_CHARACTERS]}

    return lambda: answer


async def _wait(result: Any) -> Any:
    return await result


def _text(result: Any) -> str:
    """Write what a tool returned: text as it is, anything else as JSON."""
    if isinstance(result, str | bytes):
        return result if isinstance(result, str) else result.decode("utf-8", "replace")
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)


def _environments(request: dict[str, Any]) -> Callable[[], Handler]:
    from twinkle_jax.rollout.by_name import find_environment
    from twinkle_jax.rollout.environment import (
        Action,
        Session,
        describe_failure,
        failure_cause,
    )

    factory = find_environment(request["name"])

    def make() -> Handler:
        loop = asyncio.new_event_loop()
        session = Session(
            factory, _CHARACTERS, lambda awaitable: loop.run_until_complete(_wait(awaitable))
        )

        def ask(method: str, *arguments: Any) -> Any:
            if method == "reset":
                row, seed = arguments
                pairs = row.get("user_data") or []  # which JSON made lists
                reply = session.reset(row | {"user_data": [tuple(x) for x in pairs]}, seed)
                return [reply.messages, session.tools]
            if method == "step":
                return list(session.step(Action(*arguments)))
            return getattr(session, method)()

        def answer(question: list[Any]) -> Any:
            try:
                return {"value": ask(*question)}
            except BaseException as error:  # SystemExit must not end the runner
                return {"failed": [failure_cause(error), describe_failure(error)]}

        return answer

    return make


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    name = os.path.basename(place)[:-3]
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module


def _run(channel: socket.socket, make: Callable[[], Handler], megabytes: int) -> None:
    """Be a runner: answer questions until the channel closes."""
    process = os.getpid()
    used = _memory()
    limit = used + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    handler, lines = make(), channel.makefile("rb")
    for line in lines:
        try:
            answer = json.dumps(handler(json.loads(line)), default=str)
        except BaseException as error:
            answer = json.dumps({"failed": ["raised", f"{type(error).__name__}: {error}"[:500]]})
        if os.getpid() != process:  # what a tool has forked came back here
            os._exit(0)
        channel.sendall(answer.encode("utf-8", "replace") + b"\n")


def _memory() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 1 << 32


# The server.


class _Runner:
    def __init__(self, process: int, channel: socket.socket, *, once: bool) -> None:
        self.process, self.channel, self.once = process, channel, once
        self.deadline: float | None = None
        self.unsent, self.unread = b"", b""


class _Server:
    """Runs runners, and answers for them.

    Args:
        answers: where answers are written.
        make: makes what answers questions; called in a runner.
    """

    def __init__(self, answers: int, make: Callable[[], Handler]) -> None:
        self._answers, self._make = answers, make
        self._runners: dict[int, _Runner] = {}
        self._selector = selectors.DefaultSelector()
        self._libc = ctypes.CDLL(None)
        self._prctl(_SUBREAPER, 1)
        self._woken, waker = os.pipe()
        for end in (self._woken, waker):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)

    def _prctl(self, option: int, value: int) -> None:
        if sys.platform == "linux":
            self._libc.prctl(option, value, 0, 0, 0)

    def serve(self) -> None:
        """Serve until the input ends; nothing that was started is left then."""
        unread = b""
        while True:
            for key, events in self._selector.select(self._seconds()):
                if key.fd == 0:
                    chunk = os.read(0, 1 << 16)
                    if not chunk:
                        for number in list(self._runners):
                            self._kill(number)
                        return
                    *lines, unread = (unread + chunk).split(b"\n")
                    for line in lines:
                        self._take(json.loads(line))
                elif key.fd == self._woken:
                    os.read(self._woken, 4096)
                    self._bury()
                elif key.data in self._runners:
                    self._exchange(key.data, events)
            now = time.monotonic()
            for number, runner in list(self._runners.items()):
                if runner.deadline is not None and now > runner.deadline:
                    self._fail(number, "timeout", "it did not answer in time and was killed")

    def _seconds(self) -> float | None:
        deadlines = [r.deadline for r in self._runners.values() if r.deadline is not None]
        return max(min(deadlines) - time.monotonic(), 0) + 1e-3 if deadlines else None

    def _take(self, request: dict[str, Any]) -> None:
        """Ask a runner, which is forked if there is none of that number; or end it."""
        number = request["runner"]
        if "question" not in request:
            self._kill(number)
            return
        if number not in self._runners:
            if not request["first"]:  # its runner is dead
                self._answer(number, {"failed": ["died", "its process has ended"]})
                return
            self._fork(number, request)
        runner = self._runners[number]
        runner.deadline = time.monotonic() + request["seconds"]
        runner.unsent += json.dumps(request["question"]).encode() + b"\n"
        self._exchange(number, selectors.EVENT_WRITE)

    def _fork(self, number: int, request: dict[str, Any]) -> None:
        here, there = socket.socketpair()
        server, child = os.getpid(), os.fork()
        if child:
            there.close()
            here.setblocking(False)
            self._runners[number] = _Runner(child, here, once=request["once"])
            self._selector.register(here, selectors.EVENT_READ, number)
            return
        try:
            self._prctl(_DEATH_SIGNAL, signal.SIGKILL)
            # What it starts stays below it: `_kill` finds it there, `_bury` leaves it alone.
            self._prctl(_SUBREAPER, 1)
            if os.getppid() != server:  # which died meanwhile
                os._exit(1)
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nowhere, stream)
            os.close(self._answers)
            here.close()
            for runner in self._runners.values():
                runner.channel.close()
            _run(there, self._make, request["megabytes"])
        finally:
            os._exit(1)

    def _exchange(self, number: int, events: int) -> None:
        """Send what is unsent, and read what can be read."""
        runner = self._runners[number]
        try:
            if events & selectors.EVENT_WRITE and runner.unsent:
                runner.unsent = runner.unsent[runner.channel.send(runner.unsent) :]
            if events & selectors.EVENT_READ:
                chunk = runner.channel.recv(1 << 16)
                runner.unread += chunk
                if not chunk:
                    self._fail(number, "died", "its process has ended")
                    return
        except BlockingIOError:
            pass
        except OSError:
            self._fail(number, "died", "its process has ended")
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if runner.unsent else 0)
        self._selector.modify(runner.channel, wanted, number)
        if len(runner.unread) > _LONGEST:
            self._fail(number, "reply", f"its answer has more than {_LONGEST} bytes")
        elif b"\n" in runner.unread:
            line, runner.unread, runner.deadline = runner.unread.split(b"\n")[0], b"", None
            try:
                answer = json.loads(line)
                assert isinstance(answer, dict)
            except (AssertionError, ValueError, RecursionError):
                answer = {"failed": ["reply", "its answer is no JSON"]}
            self._answer(number, answer)
            if runner.once:
                self._kill(number)

    def _fail(self, number: int, cause: str, text: str) -> None:
        asked = self._runners[number].deadline is not None
        self._kill(number)
        if asked:
            self._answer(number, {"failed": [cause, text]})

    def _answer(self, number: int, answer: dict[str, Any]) -> None:
        line = memoryview((json.dumps({"runner": number, **answer}) + "\n").encode())
        while line:
            line = line[os.write(self._answers, line) :]

    def _kill(self, number: int) -> None:
        """Kill a runner with everything that it has started."""
        runner = self._runners.pop(number, None)
        if runner is None:
            return
        self._selector.unregister(runner.channel)
        runner.channel.close()
        # Its descendants first: while it is stopped it stays their parent, and starts no more. One
        # that they start meanwhile becomes a child of this process, for `_bury` to kill.
        _signal(runner.process, signal.SIGSTOP)
        _kill_below(runner.process)
        with contextlib.suppress(OSError):
            os.killpg(runner.process, signal.SIGKILL)
        _signal(runner.process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(runner.process, 0)
        self._bury()

    def _bury(self) -> None:
        """Wait for runners that have died, and kill what they have left behind."""
        dead = set()
        with contextlib.suppress(ChildProcessError):
            while (process := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                dead.add(process)
        for number, runner in list(self._runners.items()):
            if runner.process in dead:
                with contextlib.suppress(OSError):  # its last answer may lie in the channel
                    self._exchange(number, selectors.EVENT_READ)
                if number in self._runners:
                    self._fail(number, "died", "its process has ended")
        runners = {runner.process for runner in self._runners.values()}
        for process in _children(os.getpid()):
            if process not in runners:
                _kill_below(process)
                _signal(process, signal.SIGKILL)


def _children(process: int) -> list[int]:
    """List the children of a process (Linux)."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{task}/children") as file:
                children += map(int, file.read().split())
    return children


def _below(process: int) -> Iterator[int]:
    for child in _children(process):
        yield child
        yield from _below(child)


def _kill_below(process: int) -> None:
    """Kill what a process has started: again and again, for it may be starting more meanwhile."""
    for _ in range(100):
        living = [child for child in _below(process) if not _is_dead(child)]
        if not living:
            return
        for child in living:
            _signal(child, signal.SIGKILL)


def _is_dead(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _signal(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


if __name__ == "__main__":
    main()
