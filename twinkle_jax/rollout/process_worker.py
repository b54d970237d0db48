"""The process that runs tools and environments for `processes`, which starts it.

It imports the user's file once, and forks a runner for each call of a tool, or for each episode of
an environment. A runner has limits of time and memory. After its last answer, a timeout or its
death it is killed with all processes that it has started. Requests and answers are lines of JSON
with the number of the runner. Answers of a runner are parsed as JSON, and not trusted.
"""

import asyncio
import base64
import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from operator import methodcaller
from types import ModuleType
from typing import Any

_DEATH_SIGNAL, _SUBREAPER = 1, 36  # of prctl
_MAX_ANSWER_BYTES = 1 << 24
_MAX_CHARACTERS = 1 << 20  # of a tool's result or an observation
_FAILURES = (  # not the policy's fault
    (TimeoutError, "timeout"),
    (ConnectionError, "connection"),
    (EOFError, "connection"),
    (MemoryError, "raised"),
)


def main() -> None:
    """Import the user's file, report whether that worked, and serve until the input ends."""
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discard what libraries print
    request = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = request["path"]
    try:
        os.chdir(request["directory"])
        make = _tools(request) if request["kind"] == "tools" else _environments(request)
    except BaseException as error:
        ready: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"}
    else:
        ready = {"ready": True}
    os.write(answers, (json.dumps(ready) + "\n").encode())
    if "ready" in ready:
        _Server(answers, make).serve()


# In a runner.

Handler = Callable[[list[Any]], Any]


def _tools(request: dict[str, Any]) -> Callable[[], Handler]:
    module = _import(request["module"])
    functions = {}
    for name, key in request["functions"].items():
        value = getattr(module, key[0])
        functions[name] = value if len(key) == 1 else value[key[1]]

    def answer(call: list[Any]) -> Any:
        name, arguments = call
        try:
            result = functions[name](**arguments)
            if inspect.isawaitable(result):
                result = asyncio.run(_wait(result))
        except Exception as error:
            cause = next((cause for kind, cause in _FAILURES if isinstance(error, kind)), None)
            if cause is None and type(error).__name__ == "SandboxUnavailableError":
                cause = "raised"  # python_tool's, which the user's file has imported
            if cause is not None:
                return {"failed": [cause, f"{name}: {type(error).__name__}: {error}"]}
            return {"tool_error": f"{type(error).__name__}: {error}"[:_MAX_CHARACTERS]}
        return {"value": _text(result)[:_MAX_CHARACTERS]}

    return lambda: answer


async def _wait(result: Any) -> Any:
    return await result


def _text(result: Any) -> str:
    """Convert a tool's result to text: text as it is, anything else as JSON."""
    if isinstance(result, str | bytes):
        return result if isinstance(result, str) else result.decode("utf-8", "replace")
    try:
        # Arrays and numbers of NumPy have `tolist`.
        return json.dumps(result, ensure_ascii=False, default=methodcaller("tolist"))
    except (AttributeError, TypeError, ValueError):
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
            factory, _MAX_CHARACTERS, lambda awaitable: loop.run_until_complete(_wait(awaitable))
        )

        def run(method: str, *arguments: Any) -> Any:
            if method == "reset":
                pickled, seed = arguments
                row = pickle.loads(base64.b64decode(pickled))  # noqa: S301  (our own trainer's)
                reply = session.reset(row, seed)
                return [reply.messages, session.tools]
            if method == "step":
                return list(session.step(Action(*arguments)))
            return getattr(session, method)()

        def answer(call: list[Any]) -> Any:
            try:
                return {"value": run(*call)}
            except BaseException as error:  # SystemExit must not end the runner
                return {"failed": [failure_cause(error), describe_failure(error)]}

        return answer

    return make


def _import(place: str) -> ModuleType:
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
    """Run calls until the channel closes."""
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
        if os.getpid() != process:  # a fork of the tool has returned
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
    """Starts and ends runners, and writes their answers to a file descriptor.

    `make` is called in a runner, and makes the function that runs calls.
    """

    def __init__(self, answers: int, make: Callable[[], Handler]) -> None:
        self._answers, self._make = answers, make
        # Each runner takes an open file here, and there may be more than a usual limit of 1024.
        self._open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (self._open_files[1],) * 2)
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
        """Serve until the input ends; then kill all runners."""
        unread = b""
        while True:
            for key, events in self._selector.select(self._seconds_left()):
                if key.fd == 0:
                    chunk = os.read(0, 1 << 16)
                    if not chunk:
                        for number in list(self._runners):
                            self._kill(number)
                        return
                    *lines, unread = (unread + chunk).split(b"\n")
                    for line in lines:
                        self._handle(json.loads(line))
                elif key.fd == self._woken:
                    os.read(self._woken, 4096)
                    self._reap()
                elif key.data in self._runners:
                    self._exchange(key.data, events)
            now = time.monotonic()
            for number, runner in list(self._runners.items()):
                if runner.deadline is not None and now > runner.deadline:
                    self._fail(number, "timeout", "it did not answer in time and was killed")

    def _seconds_left(self) -> float | None:
        deadlines = [r.deadline for r in self._runners.values() if r.deadline is not None]
        return max(min(deadlines) - time.monotonic(), 0) + 1e-3 if deadlines else None

    def _handle(self, request: dict[str, Any]) -> None:
        """Pass a call to its runner, which is forked for its first call; or kill the runner."""
        number = request["runner"]
        if "call" not in request:
            self._kill(number)
            return
        if number not in self._runners:
            if not request["first"]:  # its runner has died
                self._answer(number, {"failed": ["died", "its process has ended"]})
                return
            try:
                self._fork(number, request)
            except OSError as error:  # no process, memory or open file is left
                text = f"no process could be started: {error}"
                self._answer(number, {"failed": ["raised", text]})
                return
        runner = self._runners[number]
        runner.deadline = time.monotonic() + request["seconds"]
        runner.unsent += json.dumps(request["call"]).encode() + b"\n"
        self._exchange(number, selectors.EVENT_WRITE)

    def _fork(self, number: int, request: dict[str, Any]) -> None:
        here, there = socket.socketpair()
        try:
            server, child = os.getpid(), os.fork()
        except OSError:
            here.close()
            there.close()
            raise
        if child:
            there.close()
            here.setblocking(False)
            self._runners[number] = _Runner(child, here, once=request["once"])
            self._selector.register(here, selectors.EVENT_READ, number)
            return
        try:
            self._prctl(_DEATH_SIGNAL, signal.SIGKILL)
            # Its descendants stay below it: `_kill` finds them there, `_reap` leaves them alone.
            self._prctl(_SUBREAPER, 1)
            if os.getppid() != server:  # the server has died meanwhile
                os._exit(1)
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(self._answers)
            here.close()
            for runner in self._runners.values():
                runner.channel.close()
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            resource.setrlimit(resource.RLIMIT_NOFILE, self._open_files)
            _run(there, self._make, request["megabytes"])
        finally:
            os._exit(1)

    def _exchange(self, number: int, events: int) -> None:
        """Send and receive as much as possible without blocking."""
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
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if runner.unsent else 0)
        self._selector.modify(runner.channel, events, number)
        if len(runner.unread) > _MAX_ANSWER_BYTES:
            self._fail(number, "reply", f"its answer has more than {_MAX_ANSWER_BYTES} bytes")
        elif b"\n" in runner.unread:
            line, runner.unread, runner.deadline = runner.unread.split(b"\n")[0], b"", None
            try:
                answer = json.loads(line)
                assert isinstance(answer, dict)
            except (AssertionError, ValueError, RecursionError):
                answer = {"failed": ["reply", "its answer is not valid JSON"]}
            self._answer(number, answer)
            if runner.once:
                self._kill(number)

    def _fail(self, number: int, cause: str, text: str) -> None:
        is_running_call = self._runners[number].deadline is not None
        self._kill(number)
        if is_running_call:
            self._answer(number, {"failed": [cause, text]})

    def _answer(self, number: int, answer: dict[str, Any]) -> None:
        line = memoryview((json.dumps({"runner": number, **answer}) + "\n").encode())
        while line:
            line = line[os.write(self._answers, line) :]

    def _kill(self, number: int) -> None:
        """Kill a runner with all processes that it has started."""
        runner = self._runners.pop(number, None)
        if runner is None:
            return
        self._selector.unregister(runner.channel)
        runner.channel.close()
        # Descendants first: the stopped runner stays their parent, and starts no more of them. What
        # they start meanwhile becomes a child of this process, and `_reap` kills it.
        _signal(runner.process, signal.SIGSTOP)
        _kill_descendants(runner.process)
        with contextlib.suppress(OSError):
            os.killpg(runner.process, signal.SIGKILL)
        _signal(runner.process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(runner.process, 0)
        self._reap()

    def _reap(self) -> None:
        """Wait for runners that have died, and kill the processes that they have left behind."""
        dead = set()
        with contextlib.suppress(ChildProcessError):
            while (process := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                dead.add(process)
        for number, runner in list(self._runners.items()):
            if runner.process in dead:
                with contextlib.suppress(OSError):  # its last answer may be in the channel
                    self._exchange(number, selectors.EVENT_READ)
                if number in self._runners:
                    self._fail(number, "died", "its process has ended")
        runners = {runner.process for runner in self._runners.values()}
        for process in _children(os.getpid()):
            if process not in runners:
                _kill_descendants(process)
                _signal(process, signal.SIGKILL)


def _children(process: int) -> list[int]:
    """List the children of a process (Linux)."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{task}/children") as file:
                children += map(int, file.read().split())
    return children


def _descendants(process: int) -> Iterator[int]:
    for child in _children(process):
        yield child
        yield from _descendants(child)


def _kill_descendants(process: int) -> None:
    """Kill all descendants of a process; repeated, since they may start more meanwhile."""
    for _ in range(100):
        living = [child for child in _descendants(process) if not _is_dead(child)]
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
