"""A tool that runs Python which nobody trusts, on Linux."""

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

_WORKER = Path(__file__).with_name("sandbox_worker.py")


class SandboxUnavailableError(OSError):
    """This system cannot enclose a process, so that nothing is run."""


def python_tool(
    *, seconds: int = 5, megabytes: int = 256, characters: int = 4096
) -> Callable[[str], str]:
    """Make a tool that runs a Python program in an enclosed process, and returns what it prints.

    What it stops: reading and writing files (an empty root directory), the network (an empty
    network namespace), seeing, signalling and starting processes (a process table of its own, no
    fork), rights of the trainer's user, endless loops, memory, floods of output. What it does not
    stop: errors of the Linux kernel. Modules of the standard library that compute, `math` and
    `itertools` for two, can be imported; others cannot, for there are no files.

    Args:
        seconds: that a program may take; one that sleeps is ended too.
        megabytes: of memory.
        characters: of output; the rest is cut off.

    Returns:
        The tool, `python(code)`.

    Raises:
        SandboxUnavailableError: when the tool is called, where the system encloses no process; some
            distributions let only root do it. Nothing is run then.

    Example:
        >>> tool = python_tool(seconds=2)  # tool("print(6 * 7)") gives "42"
        >>> tool.__name__
        'python'
    """

    def python(code: str) -> str:
        """Run a Python program, and return what it prints.

        Args:
            code: the program; only what it prints comes back.
        """
        return _run(code, seconds, megabytes, characters)

    return python


def _run(code: str, seconds: int, megabytes: int, characters: int) -> str:
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o555)  # noqa: S103  (empty, and nobody writes into it)
        with subprocess.Popen(  # noqa: S603  (our own script)
            [sys.executable, "-I", "-S", str(_WORKER), root, str(seconds), str(megabytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            start_new_session=True,
        ) as process:
            try:
                output, error, ended = _talk(process, code, seconds + 5.0, 4 * characters)
            finally:
                process.kill()  # what it has forked dies with it
    if not output.startswith(b"\0"):
        last = error.decode("utf-8", "replace").strip().split("\n")[-1]
        raise SandboxUnavailableError(f"a process must be enclosed, which fails here: {last}")
    text = output[1:].decode("utf-8", "replace")[:characters].rstrip("\n")
    if not ended:
        return f"{text}\nError: it did not end within {seconds} s, or printed too much".lstrip("\n")
    if process.returncode:
        return f"{text}\nError: it took more than {seconds} s or {megabytes} MB".lstrip("\n")
    return text


def _talk(
    process: "subprocess.Popen[bytes]", code: str, seconds: float, limit: int
) -> tuple[bytes, bytes, bool]:
    """Give a program to the process, and read what it prints: in time, and not too much."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(code.encode("utf-8", "replace"))
    process.stdin.close()
    read = {process.stdout: b"", process.stderr: b""}
    open_pipes, deadline = list(read), time.monotonic() + seconds
    while open_pipes:
        rest = deadline - time.monotonic()
        ready, _, _ = select.select(open_pipes, [], [], max(rest, 0))
        if not ready or max(map(len, read.values())) > limit:
            return read[process.stdout], read[process.stderr], False
        for pipe in ready:
            chunk = os.read(pipe.fileno(), 65536)
            read[pipe] += chunk
            if not chunk:
                open_pipes.remove(pipe)
    process.wait(max(deadline - time.monotonic(), 1))
    return read[process.stdout], read[process.stderr], True
