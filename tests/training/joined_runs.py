"""Runs of the command in several processes that find each other on this machine."""

import contextlib
import dataclasses
import json
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.training.runs import ROOT, command, environment
from twinkle_jax.training.config import flat

SHORT_ANSWERS = "tests.training.recorded_reward:short_answers"


def flags_of(config):
    """The options that make this configuration."""
    settings = flat(dataclasses.asdict(config))
    return [
        f"--{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in settings.items()
        if value is not None and value != {} and not name.startswith("distributed.")
    ]


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


class JoinedRun:
    """A run that has been started; use it in a `with`, which leaves no process behind.

    Args:
        folder: of the policy and the compiled programs.
        config: the same for all processes.
        processes: how many.
        devices: of each.
        extra: options of some processes, by their number.
        variables: of the environment of some processes, by their number.
        places: working directories of some processes, by their number.
        before: a command that starts some processes, by their number.
        files: where their outputs are written, beside it; None: beside the run.
    """

    def __init__(
        self,
        folder,
        config,
        *,
        processes=2,
        devices=4,
        extra=None,
        variables=None,
        places=None,
        before=None,
        files=None,
    ):
        self.directory, port = Path(files or config.output_dir), free_port()
        self.processes = []
        for number in range(processes):
            joined = [
                f"--distributed.coordinator_address=localhost:{port}",
                f"--distributed.num_processes={processes}",
                f"--distributed.process_id={number}",
            ]
            options = [*flags_of(config), *joined, *(extra or {}).get(number, ())]
            variables_of_process = {
                "JAX_NUM_CPU_DEVICES": str(devices),
                "RECORD": str(self._file(number, "record")),
            }
            variables_of_process |= compiled() | (variables or {}).get(number, {})
            with (
                self._file(number, "out").open("w") as out,
                self._file(number, "err").open("w") as err,
            ):
                starts = [*(before or {}).get(number, []), *command(options)]
                env = environment(folder, **({"PYTHONPATH": str(ROOT)} | variables_of_process))
                cwd = (places or {}).get(number, ROOT)
                self.processes.append(
                    subprocess.Popen(starts, cwd=cwd, env=env, stdout=out, stderr=err)
                )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()

    def wait(self, seconds=300):
        """The exit statuses; a process that does not end is a failure."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.wait(max(0.1, end - time.monotonic()))
        return [process.returncode for process in self.processes]

    def errors(self, number):
        return self._file(number, "err").read_text()

    def printed(self, number):
        return self._file(number, "out").read_text()

    def complaints(self):
        """What the processes say in their one line for what is wrong, process by process."""
        lines = [self.errors(number).splitlines() for number in range(len(self.processes))]
        return [[line for line in x if line.startswith("twinkle-jax: ")] for x in lines]

    def scored(self):
        """The conversations that each process has scored, call by call."""
        records = [self._file(number, "record") for number in range(len(self.processes))]
        lines = [path.read_text().splitlines() if path.exists() else [] for path in records]
        return [[json.loads(line) for line in x] for x in lines]

    def _file(self, number, name):
        return self.directory.with_name(f"{self.directory.name}.{number}.{name}")


def run_joined(folder, config, *, status=0, seconds=300, **options):
    """Run processes to their end, with this status of each; `options` are those of `JoinedRun`."""
    with JoinedRun(folder, config, **options) as run:
        statuses = run.wait(seconds)
    assert statuses == [status] * len(statuses), run.errors(0) + run.errors(1)
    return run


def compiled():
    """Keep compiled programs where pytest keeps those of its own process."""
    import jax

    kept = jax.config.jax_compilation_cache_dir
    return {} if kept is None else {"JAX_COMPILATION_CACHE_DIR": kept}
