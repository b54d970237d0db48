"""Run several processes of one JAX program on this machine, connected by gloo.

A test calls `run("tests.some.module", …)`, and that module, in each process, calls `join()`.
"""

import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]


class Ended(NamedTuple):
    """Exit of a process; `result` is the last line that it printed, as JSON."""

    code: int
    result: object
    errors: str


def run(module, *arguments, processes=2, devices=4, seconds=180):
    """Run a module in several processes; those still alive after some seconds are killed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    started, files = [], []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(processes):
            environment = {**os.environ, "JOIN": f"{address} {processes} {index} {devices}"}
            files.append([pathlib.Path(folder, f"{index}.{name}") for name in ("out", "err")])
            with files[-1][0].open("wb") as out, files[-1][1].open("wb") as err:
                command = [sys.executable, "-m", module, *map(str, arguments)]
                started.append(
                    subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=err)
                )
        deadline = time.monotonic() + seconds
        try:
            for process in started:
                process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in started:
                process.kill()
                process.wait()
        return [
            Ended(process.returncode, _last(out.read_text()), err.read_text()[-3000:])
            for process, (out, err) in zip(started, files, strict=True)
        ]


def _last(printed):
    """Return the last line that is JSON; gloo prints lines of its own."""
    for line in reversed(printed.splitlines()):
        try:
            return json.loads(line)
        except ValueError:
            continue
    return None


def join():
    """Become one of the processes that `run` starts."""
    import jax

    address, processes, index, devices = os.environ["JOIN"].split()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, int(processes), int(index))
