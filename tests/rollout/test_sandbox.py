"""The sandbox: programs that compute, and each thing that it says it stops."""

import os
import pathlib
import resource
import socket
import subprocess
import sys
import threading
import time

import pytest

from twinkle_jax.rollout import SandboxUnavailableError, python_tool, tools

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
ROOT = pathlib.Path(__file__).parents[2]
RUN = python_tool(seconds=1, megabytes=200, characters=200)


@pytest.fixture(scope="module", autouse=True)
def enclosed():
    """Some systems let nobody but root make namespaces."""
    try:
        RUN("1")
    except SandboxUnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", ["seconds", "megabytes", "characters"])
def test_limits_are_at_least_1(name):
    with pytest.raises(ValueError, match=f"^{name} must"):
        python_tool(**{name: 0})


def test_a_program_computes_and_its_errors_are_told():
    assert RUN("import math\nprint(math.comb(6, 3))") == "20"
    assert RUN("1/0") == "ZeroDivisionError: division by zero"
    assert RUN("print(1") == "SyntaxError: '(' was never closed (<program>, line 1)"
    assert RUN("import sys; print(1); sys.exit(3)") == "1"
    assert RUN("print(1, end='')\n1/0") == "1\nZeroDivisionError: division by zero"
    assert RUN("print(1)\n1/0") == "1\nZeroDivisionError: division by zero"
    restored = "import sys; sys.stdout = None; sys.stdout = sys.__stdout__; print(1)\n"
    assert RUN(f"{restored}sys.stdout = None\n1/0") == "1\nZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    "program",
    [
        "print(open('/etc/passwd').read())",
        "print(open('/proc/self/environ').read())",
        "open('/x', 'w').write('y')",
        "import os; os.mkdir('/y')",
        "import os; os.chroot('..')",
        "import os; print(os.fork())",
        "import os; os.execv('/bin/sh', ['sh'])",
        "import os; os.kill({pid}, 9)",
        "import os; os.kill({parent}, 9)",
        "import os; os.setuid(0)",
        "x = bytearray(1 << 30)",
        "import posix; posix.open('/', posix.O_WRONLY)",
    ],
)
def test_a_program_cannot(program):
    output = RUN(program.format(pid=os.getpid(), parent=os.getppid()) + "\nprint('did')")
    assert "did" not in output
    assert "Error" in output


def test_a_program_reaches_no_network():
    """Not even this machine: a server that listens here is not there. `_socket` has no file."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = (
            "import ctypes"
            if "_ctypes" in sys.builtin_module_names
            else "import _socket\n"
            f"s = _socket.socket()\ns.connect(('127.0.0.1', {port}))\nprint('did')"
        )
        assert "did" not in RUN(program)


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "while True: print('x' * 99)",
        pytest.param("import time\ntime.sleep(99)", marks=pytest.mark.exhaustive),
    ],
)
def test_a_program_that_does_not_end_is_ended(program):
    began = time.monotonic()
    output = RUN(program)
    assert time.monotonic() - began < 9
    assert "Error: it" in output
    assert len(output) < 300


def test_it_runs_beside_many_open_files():
    """As in a run with hundreds of connections to environments."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 4096:
        pytest.skip("the system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, limits[1]))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert RUN("print(6 * 7)") == "42"
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_system_without_a_file_to_open_is_not_the_programs_fault():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(5)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 2, limits[1]))
    try:
        with pytest.raises(SandboxUnavailableError, match="Too many open files"):
            RUN("print(1)")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in held:
            os.close(descriptor)


def test_nothing_is_left_behind():
    before = threading.active_count()
    RUN("import time\ntime.sleep(0.1)")
    assert threading.active_count() == before
    children = [p for p in os.listdir("/proc") if p.isdigit() and _parent(p) == os.getpid()]
    assert not any("sandbox_worker" in _command(p) for p in children)


SLEEPING = """
from twinkle_jax.rollout import python_tool
python_tool()("import time; time.sleep(600)")
"""


@pytest.mark.slow
def test_a_program_ends_with_a_trainer_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", SLEEPING], cwd=ROOT) as trainer:
        while len(programs := _descendants(trainer.pid)) < 2:
            assert trainer.poll() is None
            time.sleep(0.1)
        trainer.kill()
    end = time.monotonic() + 10
    while any("sandbox_worker" in _command(p) for p in programs) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any("sandbox_worker" in _command(p) for p in programs)


def test_a_system_without_namespaces_is_named_and_runs_nothing(monkeypatch, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text("raise OSError(1, 'unshare')")
    monkeypatch.setattr(tools, "_SANDBOX_WORKER", worker)
    for program in ("print(1)", "#" * 2**20):  # the second is longer than what a pipe holds
        with pytest.raises(SandboxUnavailableError, match="unshare"):
            RUN(program)


def _descendants(pid):
    children = [p for p in os.listdir("/proc") if p.isdigit() and _parent(p) == pid]
    return [*children, *(p for child in children for p in _descendants(int(child)))]


def _parent(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _command(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except OSError:
        return ""
