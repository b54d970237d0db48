"""Scripts in separate processes, which read requests and write replies, a line each."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import IO

_Running = list[tuple["subprocess.Popen[str]", IO[bytes]]]  # a process, and its standard error


class WorkerProcess:
    """A Python script that answers a line of its standard input with a line of its output.

    It is started, not forked, and does not import the caller's script. It ends with this object.
    One thread at a time may use it.
    """

    def __init__(self, script: Path, *arguments: str) -> None:
        self._command = [sys.executable, "-P", str(script), *arguments]
        self._running: _Running = []  # one at most; a list for the finalizer to share
        weakref.finalize(self, _end, self._running, 2.0)

    @property
    def process(self) -> "subprocess.Popen[str] | None":
        """The process, unless it has not been started, or was ended by `end`."""
        return self._running[0][0] if self._running else None

    def start(self) -> None:
        """Start the script; a process that runs or has run is ended first."""
        self.end()
        errors = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the process)
        process = subprocess.Popen(  # noqa: S603  (our own script)
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C does not reach it
        )
        self._running.append((process, errors))

    def ask(self, request: str) -> str:
        """Send a line, and wait for the reply; empty if the process has ended.

        After an exception, such as KeyboardInterrupt, the process is ended: the next request must
        not read this one's reply.
        """
        try:
            self.send(request)
            return self.read_line()
        except BaseException:
            self.end(patience=0)
            raise

    def send(self, request: str) -> None:
        """Send a line; nothing happens if the process has ended."""
        assert self.process is not None
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(request + "\n")
            self.process.stdin.flush()

    def read_line(self) -> str:
        """Wait for a line; empty if the process has ended."""
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self, *, patience: float = 2.0) -> str:
        """End the process, and those that it has started; a busy one is killed after `patience`.

        Returns the end of what it wrote to standard error; empty if none was started.
        """
        return _end(self._running, patience)

    def leave_to_parent(self) -> None:
        """After a fork, in the child: do not use or end the process, it is the parent's."""
        for process, _ in self._running:
            process.returncode = 0  # nothing to wait for
        self._running.clear()


def _end(running: _Running, patience: float) -> str:
    if not running:
        return ""
    process, errors = running.pop()
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):  # unsent input of a dead process
        process.stdin.close()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        if sys.platform != "win32":
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
    process.stdout.close()
    with errors:
        errors.seek(0)
        return errors.read().decode(errors="replace").strip()[-500:]
