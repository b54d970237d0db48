"""Processes that answer line by line, and are killed when they take too long.

They are started anew, never forked from a process in which JAX runs, and they do not import the
caller's main module: so it needs no `if __name__ == "__main__"`, and any thread may call.
"""

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_START = 120.0  # seconds until a worker must be ready


class _Worker:
    """One process, and a thread that reads what it says."""

    def __init__(self, script: Path, timeout: float) -> None:
        command = [sys.executable, "-P", str(script), str(timeout)]
        self.process = subprocess.Popen(  # noqa: S603  (our own script)
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # an interrupt from the keyboard is not for it
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        started = self._next(_START)
        if started is None or "error" in started:
            self.kill()
            said = (started or {}).get("error", "nothing")
            raise RuntimeError(f"{script.name} must start in {_START:.0f} s, it said {said}")

    def ask(self, task: Sequence[str], seconds: float) -> dict[str, Any] | None:
        """Wait for the answer to a task; None if there is none in time, or the process died."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(list(task)) + "\n")
            self.process.stdin.flush()
        except OSError:
            return None
        return self._next(seconds)

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was not sent any more
                pipe.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _next(self, seconds: float) -> dict[str, Any] | None:
        try:
            line = self._lines.get(timeout=max(seconds, 0))
        except queue.Empty:
            return None
        return dict(json.loads(line)) if line else None


class WorkerPool:
    """A few processes that share tasks.

    Args:
        script: what each runs: it says that it is ready, then answers each line with a line.
        count: how many.
        timeout: seconds for a task.
    """

    def __init__(self, script: Path, count: int, timeout: float) -> None:
        self._script, self._count, self._timeout = script, count, timeout
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _kill_all, self._idle)

    def map(self, tasks: Sequence[Sequence[str]], budget: float) -> list[dict[str, Any] | None]:
        """Answer all tasks, several at a time.

        Args:
            tasks: what is sent, strings.
            budget: seconds for all of them together, from when the first process is ready.

        Returns:
            An answer for each; None where time was up, or the process died.
        """
        answers: list[dict[str, Any] | None] = [None] * len(tasks)
        with self._lock:
            shared = iter(enumerate(tasks))
            errors: list[BaseException] = []
            self._start(min(self._count, len(tasks)))
            end = time.monotonic() + budget

            def work(worker: _Worker) -> None:
                try:
                    self._work(worker, shared, answers, end)
                except BaseException as error:
                    errors.append(error)

            workers, self._idle[:] = self._idle[:], []
            threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if errors:
                raise errors[0]
        return answers

    def _start(self, count: int) -> None:
        for worker in [worker for worker in self._idle if worker.process.poll() is not None]:
            worker.kill()
            self._idle.remove(worker)
        while len(self._idle) < count:
            self._idle.append(_Worker(self._script, self._timeout))

    def _work(
        self,
        worker: _Worker,
        shared: Iterator[tuple[int, Sequence[str]]],
        answers: list[dict[str, Any] | None],
        end: float,
    ) -> None:
        for i, task in shared:
            seconds = min(self._timeout, end - time.monotonic())
            if seconds <= 0:
                break
            answers[i] = worker.ask(task, seconds)
            if answers[i] is None:
                worker.kill()
                worker = _Worker(self._script, self._timeout)
        self._idle.append(worker)


def _kill_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.kill()
