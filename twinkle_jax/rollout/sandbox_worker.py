"""Runs untrusted Python in a sandbox; started by `python_tool`.

Order matters: modules are imported first, then the process gives up its user, its namespaces, its
files, its privileges, and last its time and memory.
"""

import ctypes
import io
import os
import resource
import signal
import sys

_NEW_NAMESPACES = (
    0x00020000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
)  # ns ipc user pid net
_SET_DEATH_SIGNAL, _NO_NEW_PRIVILEGES, _CAPABILITIES = 1, 38, 0x20080522
_NOBODY = 65534
_MODULES = (
    "cmath", "collections", "datetime", "decimal", "fractions", "functools", "heapq", "itertools",
    "json", "math", "operator", "random", "re", "statistics", "string", "traceback",
)  # fmt: skip


def enclose(root: str, seconds: int, megabytes: int) -> None:
    """Enter the sandbox; raises OSError if the system does not allow it."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int, what: str) -> None:
        if result:
            raise OSError(ctypes.get_errno(), what)

    for name in _MODULES:
        __import__(name)
    sys.path.clear()  # chroot removes the files anyway
    if os.getuid() == 0:  # the limit of processes does not apply to root
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    check(libc.unshare(_NEW_NAMESPACES), "unshare")
    check(libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0), "prctl")
    child = os.fork()  # PID 1 of the new namespace: it sees no other process
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(min(os.waitstatus_to_exitcode(status) % 256, 255))
    check(libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0), "prctl")
    os.chroot(root)
    os.chdir("/")
    os.closerange(3, 4096)
    check(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0), (ctypes.c_uint32 * 6)()
    check(libc.capset(header, none), "capset")
    memory = megabytes << 20
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 16),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
    ):
        resource.setrlimit(limit, (value, value))


class _Output(io.TextIOWrapper):
    """The standard output, which knows whether its last line has ended."""

    line_is_open = False

    def write(self, text: str, /) -> int:
        count = super().write(text)
        if text:
            self.line_is_open = not text.endswith("\n")
        return count


def main() -> None:
    """Read a program from the standard input, and run it."""
    code = sys.stdin.buffer.read().decode("utf-8", "replace")
    enclose(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    os.write(1, b"\0")  # marks the start of the program's output
    stdout = os.fdopen(1, "wb", closefd=False)
    output = _Output(stdout, sys.stdout.encoding, sys.stdout.errors)
    sys.stdout = sys.__stdout__ = output  # type: ignore[misc]  # programs restore it from there
    try:
        exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})  # noqa: S102  (the purpose of this file)
    except SystemExit:
        pass
    except BaseException as error:  # reported as one line
        start = "\n" if output.line_is_open else ""
        print(f"{start}{type(error).__name__}: {error}", file=output)
    output.flush()


if __name__ == "__main__":
    main()
