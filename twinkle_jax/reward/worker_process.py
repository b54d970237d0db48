"""Worker processes: scripts that read requests and write replies, a line each."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, NamedTuple


class WorkerProcess(NamedTuple):
    """A running script.

    Attributes:
        process: reads lines from its standard input, and writes lines to its standard output.
        errors: what it writes to standard error.
    """

    process: subprocess.Popen[str]
    errors: IO[bytes]


def start(command: Sequence[str]) -> WorkerProcess:
    """Start a script in a session of its own."""
    errors = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the process)
    process = subprocess.Popen(  # noqa: S603  (our own script)
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        encoding="utf-8",
        start_new_session=True,  # Ctrl-C does not reach it
    )
    return WorkerProcess(process, errors)


def end(running: list[WorkerProcess]) -> str:
    """End a process with its workers: idle ones end by themselves, busy ones are killed.

    Args:
        running: the process, which is taken out of the list; or nothing.

    Returns:
        The last lines that it wrote to standard error.
    """
    if not running:
        return ""
    process, errors = running.pop()
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):  # unsent input of a dead process
        process.stdin.close()
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        if sys.platform != "win32":
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
    process.stdout.close()
    with errors:
        errors.seek(0)
        return errors.read().decode(errors="replace").strip()[-500:]
