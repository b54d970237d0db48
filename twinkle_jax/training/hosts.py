"""A run in several processes: how they connect, and what must be the same in all of them.

How they share values and errors during a step is in `twinkle_jax.rollout.hosts`.
"""

import dataclasses
import hashlib
import importlib.util
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from twinkle_jax.data import Trajectory
from twinkle_jax.data.prompts import prompts_fingerprint
from twinkle_jax.model.huggingface.checkpoint_files import ADAPTER_CONFIG, locate
from twinkle_jax.model.huggingface.saving import names_path
from twinkle_jax.reward.reward import REWARDS
from twinkle_jax.rollout import hosts
from twinkle_jax.training.config import DistributedConfig, TrainConfig, flat
from twinkle_jax.training.policy import base_of
from twinkle_jax.training.progress import package_versions
from twinkle_jax.training.run_directory import file_in
from twinkle_jax.training.task import is_reward_model

_PROBE = ".shared"
_LOST_AFTER = 25  # seconds without a heartbeat, after which a process counts as dead
_END_WITHIN = 30  # seconds that processes wait for each other at their end
_VISIBLE_WITHIN = 10.0  # seconds in which a new file must be seen: network file systems cache
_CLOCKS_WITHIN = 60  # seconds; more is no delay of a message, but a clock that is wrong
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16  # read of a large file, instead of all its bytes
_JAX_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)


# Connecting.


def connect(settings: DistributedConfig) -> None:
    """Connect to the other processes of a run; call it before JAX initializes its devices.

    Without a coordinator, and without a scheduler that JAX knows, there is one process. Nothing
    happens if `jax.distributed.initialize` was called before.

    Raises:
        ConnectionError: if the port is taken. If not all processes connect in time, this one exits
            with status 1.
        ValueError: if the address is not HOST:PORT, JAX finds no cluster, or only some settings are
            given.
    """
    if jax.distributed.is_initialized():
        return
    address = settings.coordinator_address
    if address is None:
        for name in ("num_processes", "process_id"):
            value = getattr(settings, name)
            if value is not None:
                raise ValueError(
                    "distributed.coordinator_address must be HOST:PORT where "
                    f"distributed.{name} is set, got none"
                )
        if not started_as_one_of_several(os.environ):
            return
    if address not in (None, "auto"):
        port = address.rpartition(":")[2]
        if ":" not in address or not port.isdigit():
            raise ValueError(
                f"distributed.coordinator_address must be HOST:PORT or auto, got {address!r}"
            )
        if settings.process_id == 0:
            _check_port(address, int(port))
    limit = settings.connect_timeout
    # After its own timeout JAX aborts the process, with a stack trace instead of an explanation.
    watch = threading.Timer(limit, _end_waiting, (address or "the coordinator", limit))
    watch.daemon = True
    watch.start()
    try:
        jax.distributed.initialize(
            None if address == "auto" else address,
            settings.num_processes,
            settings.process_id,
            initialization_timeout=limit + _END_WITHIN,
            heartbeat_timeout_seconds=_LOST_AFTER,
            shutdown_timeout_seconds=_END_WITHIN,
        )
    except ValueError as error:
        raise ValueError(
            "distributed.coordinator_address, num_processes and process_id must be set where JAX "
            f"finds no cluster: {error}"
        ) from error
    except RuntimeError as error:
        raise _port_error(address or "what JAX has found", error) from error
    finally:
        watch.cancel()


def _check_port(address: str, port: int) -> None:
    """Raise if the port is taken: JAX's server crashes the process then."""
    try:
        socket.create_server(("", port)).close()
    except (OSError, OverflowError) as error:
        raise _port_error(address, error) from error


def _port_error(address: str, error: BaseException) -> ConnectionError:
    return ConnectionError(
        "distributed.coordinator_address must be a free port of process 0, got "
        f"{address}: {_first_line(error)}"
    )


def _end_waiting(address: str, seconds: float) -> None:
    os.write(
        2,
        "twinkle-jax: all processes must meet at distributed.coordinator_address within "
        f"distributed.connect_timeout={seconds} s, got too few at {address}: start "
        "the same command on every host\n".encode(),
    )
    os._exit(1)


def started_as_one_of_several(environment: Mapping[str, str]) -> bool:
    """Return whether a scheduler that JAX knows has started this process as one of several.

    True for SLURM and Open MPI with more than one task, Google's TPU slices with more than one
    host, indexed jobs of Kubernetes where JAX can ask it (`pip install jax[k8s]`), and where
    `JAX_COORDINATOR_ADDRESS` is set.

    Raises:
        ValueError: if the scheduler's number of tasks is no number.
    """
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        tasks = environment.get(name) or "1"
        if not tasks.isdecimal():
            raise ValueError(f"{name} must be a number of tasks, got {tasks!r}")
        if int(tasks) > 1:
            # A batch script has SLURM's variables too, with the number 0: only srun starts a step.
            return bool({"SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_RANK"} & environment.keys())
    for name in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"):
        if "," in environment.get(name, ""):
            return True
    if "JAX_COORDINATOR_ADDRESS" in environment or "MEGASCALE_COORDINATOR_ADDRESS" in environment:
        return True
    in_kubernetes = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys()
    return in_kubernetes and importlib.util.find_spec("kubernetes") is not None


# What must be the same everywhere.


def check_same(
    config: TrainConfig, train: Sequence[Trajectory], held_out: Sequence[Trajectory]
) -> None:
    """Raise unless all processes have the same settings, versions, files and time.

    Raises:
        SharedError: in all processes; it names the first difference.
    """
    if not hosts.several():
        return
    everywhere = hosts.share("comparing hosts", lambda: _facts(config, train, held_out))
    first = everywhere[0]
    for process, facts in enumerate(everywhere):
        for name in {**first, **facts}:
            if facts.get(name) != first.get(name):
                message = (
                    f"{name} must be the same in all processes, got {first.get(name)!r} in "
                    f"process 0 and {facts.get(name)!r} in process {process}"
                )
                hosts.fail(ValueError(message))
    # The comparison above took all processes to this line at the same time.
    clocks = hosts.share("comparing clocks", lambda: time.time())
    apart = max(clocks) - min(clocks)
    if apart > _CLOCKS_WITHIN:
        late, early = clocks.index(max(clocks)), clocks.index(min(clocks))
        message = (
            f"clocks of all hosts must agree to within {_CLOCKS_WITHIN} s, got that of process "
            f"{late} {apart:.0f} s ahead of that of process {early}"
        )
        hosts.fail(ValueError(message))


def check_shared(directory: Path) -> None:
    """Raise unless all hosts share a directory: process 0 writes a file that all must read.

    Raises:
        SharedError: in all processes; it names the first that cannot read the file.
    """
    if not hosts.several():
        return
    path = directory / _PROBE

    def write() -> str:
        token = secrets.token_hex(16)
        with names_path(path):
            path.write_text(token)
        return token

    token = hosts.first_decides("writing to output_dir", write)
    seen = hosts.share("looking for output_dir", lambda: _appears(path, token))
    hosts.first_decides("writing to output_dir", lambda: path.unlink(missing_ok=True))
    if not all(seen):
        hosts.fail(
            ValueError(
                f"output_dir must be one directory that all hosts share, got {directory}, in which "
                f"process {seen.index(False)} does not see what process 0 writes"
            )
        )


def _appears(path: Path, token: str) -> bool:
    end = time.monotonic() + _VISIBLE_WITHIN
    while True:
        try:
            if path.read_text() == token:
                return True
        except OSError:
            pass
        if time.monotonic() > end:
            return False
        time.sleep(0.1)


def _facts(
    config: TrainConfig, train: Sequence[Trajectory], held_out: Sequence[Trajectory]
) -> dict[str, Any]:
    """Collect what must be equal in all processes, by the name that errors use."""
    settings = flat(dataclasses.asdict(config))
    facts = {n: x for n, x in settings.items() if not n.startswith("distributed.")}
    facts |= {f"the version of {name}": x for name, x in package_versions().items()}
    facts |= {name: repr(getattr(jax.config, name, None)) for name in _JAX_SETTINGS}
    facts["the data of task"] = prompts_fingerprint(train)
    facts["the data of evaluation.path"] = prompts_fingerprint(held_out)
    facts |= {f"the file of {option}": x for option, x in code_hashes(config).items()}
    for name in filter(is_reward_model, _rewards(config)):
        facts |= _files_of_model(name, f"reward {name}")
    if config.model is not None:
        facts |= _files_of_model(config.model, "model")
    return facts


def _files_of_model(path_or_id: str, argument: str) -> dict[str, str]:
    """Hash the files of a checkpoint, or of an adapter and its base."""
    place = locate(path_or_id, argument=argument)
    places = {argument: place}
    if (place / ADAPTER_CONFIG).is_file():
        base, called = base_of(place)
        places[f"the base of {argument}"] = locate(base, argument=called)
    return {
        f"{path.name} of {name}": fingerprint(path)
        for name, directory in places.items()
        for path in sorted(directory.iterdir())
        if path.is_file()
    }


def _rewards(config: TrainConfig) -> list[str]:
    return [*config.rewards, *filter(None, [config.evaluation.reward])]


def code_hashes(config: TrainConfig) -> dict[str, str]:
    """Hash the files of rewards, environment, tools and teacher, by the options that name them."""
    names = {f"reward {name}": name for name in _rewards(config) if name not in REWARDS}
    names |= {"environment": config.environment or "", "tools": config.tools or ""}
    hashes = {}
    for option, name in names.items():
        file = Path(file_in(name)).expanduser()
        if file.suffix != ".py":
            place = name.removeprefix("trl:").removeprefix("gym:")
            module = sys.modules.get(place.rpartition(":")[0] or place)
            file = Path(getattr(module, "__file__", None) or "")
        if file.is_file():
            hashes[option] = hashlib.sha256(file.read_bytes()).hexdigest()
    if config.teacher.model is not None and config.teacher.url is None:
        files = _files_of_model(config.teacher.model, "teacher.model")
        hashes["teacher.model"] = hashlib.sha256("".join(files.values()).encode()).hexdigest()
    return hashes


def fingerprint(path: Path) -> str:
    """Hash a file's size, and all of it or samples over its whole length."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _SAMPLES * _SAMPLE_BYTES:
            digest.update(file.read())
        else:
            for i in range(_SAMPLES):
                file.seek(i * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


# Errors.


def describe_loss(error: BaseException, step: int) -> str:
    """Describe an error of this process that the others do not know, and how to continue."""
    problem = f"failed alone: {type(error).__name__}"
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
        problem = "can no longer reach the others"
    return (
        f"{hosts.name_process()} {problem}, after step {step}: {_first_line(error)}; "
        "--resume auto continues from the last checkpoint"
    )


def is_reported_by_another(error: BaseException) -> bool:
    """Whether process 0 prints this error for all processes."""
    return isinstance(error, hosts.SharedError) and not hosts.is_first()


def end_without_others(error: BaseException, *, traceback: bool = False) -> None:
    """Exit at once after an error of this process that the others do not know.

    They wait for this one in a collective, which fails as soon as this process is gone. At a usual
    end, JAX would wait for them, and abort all processes after half a minute.
    """
    if jax.distributed.is_initialized() and not isinstance(error, hosts.SharedError):
        if traceback:
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
