"""A tool that runs untrusted Python in a sandbox, on Linux."""

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
    """The system does not allow the sandbox; the program was not run."""


def python_tool(
    *, seconds: int = 5, megabytes: int = 256, characters: int = 4096
) -> Callable[[str], str]:
    """Make a tool that runs a Python program in a sandbox, and returns what it prints.

    It prevents: reading and writing files (an empty root directory), network access (an empty
    network namespace), seeing, signalling and starting processes (a PID namespace, no fork), use of
    the trainer's privileges, endless loops, high memory use, floods of output. It does not prevent
    attacks on the Linux kernel. Modules of the standard library that compute, such as `math` and
    `itertools`, can be imported; others cannot, since there are no files.

    Args:
        seconds: of CPU time for a program; one that sleeps is killed a few seconds later.
        megabytes: of memory.
        characters: of output; the rest is cut off.

    Returns:
        The tool, `python(code)`.

    Raises:
        SandboxUnavailableError: by a call of the tool, if the system does not allow namespaces;
            some distributions allow them to root only. The program is not run then.

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
        os.chmod(root, 0o555)  # noqa: S103  (empty and read-only)
        with subprocess.Popen(  # noqa: S603  (our own script)
            [sys.executable, "-I", "-S", str(_WORKER), root, str(seconds), str(megabytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            start_new_session=True,
        ) as process:
            try:
                output, error, ended = _communicate(process, code, seconds + 5.0, 4 * characters)
            finally:
                process.kill()  # its forks die with it
    if not output.startswith(b"\0"):
        last = error.decode("utf-8", "replace").strip().split("\n")[-1]
        raise SandboxUnavailableError(f"the sandbox is not available on this system: {last}")
    text = output[1:].decode("utf-8", "replace")[:characters].rstrip("\n")
    if not ended:
        return f"{text}\nError: it did not end within {seconds} s, or printed too much".lstrip("\n")
    if process.returncode:
        return f"{text}\nError: it took more than {seconds} s or {megabytes} MB".lstrip("\n")
    return text


def _communicate(
    process: "subprocess.Popen[bytes]", code: str, seconds: float, limit: int
) -> tuple[bytes, bytes, bool]:
    """Send the program, and read output and errors until a limit; return whether it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(code.encode("utf-8", "replace"))
    process.stdin.close()
    read = {process.stdout: b"", process.stderr: b""}
    open_pipes, deadline = list(read), time.monotonic() + seconds
    while open_pipes:
        remaining = deadline - time.monotonic()
        ready, _, _ = select.select(open_pipes, [], [], max(remaining, 0))
        if not ready or max(map(len, read.values())) > limit:
            return read[process.stdout], read[process.stderr], False
        for pipe in ready:
            chunk = os.read(pipe.fileno(), 65536)
            read[pipe] += chunk
            if not chunk:
                open_pipes.remove(pipe)
    process.wait(max(deadline - time.monotonic(), 1))
    return read[process.stdout], read[process.stderr], True
