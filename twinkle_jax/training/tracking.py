"""Where a run's metrics are written: `metrics.jsonl`, and the trackers that its settings name.

A new tracker is a class, its row in `_TRACKERS`, and a field of `Trackers`, which is an option of
the command.
"""

import errno
import json
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Protocol, Self, SupportsFloat

from twinkle_jax._package import require
from twinkle_jax.model.huggingface.saving import names_path


@dataclass(frozen=True, kw_only=True)
class Trackers:
    """Where metrics go besides `metrics.jsonl`; part of the settings of a run.

    Attributes:
        tensorboard: write event files for TensorBoard to `tensorboard/` in the run's directory.
        wandb: log to Weights & Biases, whose environment variables apply (`WANDB_MODE=offline`).
    """

    tensorboard: bool = False
    wandb: bool = False


class Tracker(Protocol):
    """Another destination of metrics.

    An error that it raises ends the run, with that step in `metrics.jsonl` and a checkpoint.
    """

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of one step, by their names in `metrics.jsonl`; some may be NaN.

        A resumed run writes the steps after its checkpoint again, and one that raised an error.
        """

    def close(self) -> None:
        """Flush and close, once, at the end of the run."""


class TensorBoard:
    """Event files in `tensorboard/` in a run's directory."""

    def __init__(self, directory: Path) -> None:
        require("tensorboardX", "tensorboard")
        self._directory = directory / "tensorboard"
        self._writer: Any = None

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers, and purge those of an earlier process from this step on."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        start = [] if self._writer else [Event(session_log=SessionLog(status=SessionLog.START))]
        values = [Summary.Value(tag=name, simple_value=x) for name, x in numbers.items()]
        self._writer = self._writer or self._open()
        for event in [*start, Event(summary=Summary(value=values))]:
            event.step, event.wall_time = step, time.time()
            self._writer.write_event(event)
        self._writer.flush()  # a killed run does not repeat the steps before its checkpoint

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            with suppress(OSError):  # `write` has raised it
                self._writer.close()

    def _open(self) -> Any:
        """Open a file of this process.

        tensorboardX's `SummaryWriter` writes in a thread. Once that has failed, as on a full disk,
        later steps would wait for it forever.
        """
        from tensorboardX.event_file_writer import EventsWriter

        self._directory.mkdir(exist_ok=True)
        return EventsWriter(str(self._directory / "events"), f".{os.getpid()}")


class WeightsAndBiases:
    """A run of Weights & Biases, continued when this run is resumed.

    Weights & Biases keeps the first values that it gets for a step, so steps that a resumed run
    repeats are not sent again. Its project is `twinkle-jax`, unless `WANDB_PROJECT` names another.
    In the run's directory, `wandb_run.txt` stores the id in Weights & Biases, and `wandb_step.txt`
    the last step that was sent.
    """

    def __init__(self, directory: Path) -> None:
        require("wandb", "wandb")
        self._directory, self._sent = directory, directory / "wandb_step.txt"
        self._run: Any = None

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers, unless an earlier process has sent those of this step."""
        if self._run is None:
            self._run = self._start()
        last = self._sent.read_text() if self._sent.exists() else ""
        if step > int(last or 0):  # empty if the process was killed while it wrote
            self._run.log(dict(numbers), step=step)
            self._sent.write_text(str(step))

    def close(self) -> None:
        """Wait until all is sent."""
        if self._run is not None:
            self._run.finish()

    def _start(self) -> Any:
        import wandb

        identity = self._directory / "wandb_run.txt"
        if not identity.exists():
            identity.write_text(secrets.token_hex(8))
        project = os.environ.get("WANDB_PROJECT", "twinkle-jax")
        return wandb.init(
            project=project,
            name=self._directory.name,
            dir=str(self._directory),
            id=identity.read_text(),
            resume="allow",
        )


_TRACKERS: Mapping[str, Callable[[Path], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}
TRACKER_FILES = ("tensorboard", "wandb", "wandb_run.txt", "wandb_step.txt")
"""What trackers write in the directory of a run."""
_NO_TRACKERS = Trackers()

FILE = "metrics.jsonl"


def check_trackers(trackers: Sequence[Tracker]) -> None:
    """Raise a TypeError for the first that is no tracker."""
    for i, tracker in enumerate(trackers):
        for name in ("write", "close"):
            if isinstance(tracker, type) or not callable(getattr(tracker, name, None)):
                raise TypeError(
                    f"trackers[{i}] must be an object with write(step, numbers) and close(), got "
                    f"{tracker!r:.80}"
                )


class MetricsLog:
    """Appends one JSON object a step to `metrics.jsonl`, which can be cut back when a run resumes.

    A line is `{"step": 3, "reward": 0.5}`. JSON has no NaN and no infinity: such a value is `null`,
    and the line's `not_finite` says which: `{"kl": "nan"}`. An unfinished line of
    a killed process is removed when the file is opened, and a missing directory is made. Metrics go
    to `trackers`, and to `others` of the user's, too.

    Raises:
        ImportError: if the package of a tracker is not installed; it names the extra.
        FileExistsError: if another run writes to the file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory, MetricsLog(directory) as log:
        ...     log.write(1, {"reward": 0.5, "kl": float("nan")})
        ...     print((Path(directory) / "metrics.jsonl").read_text(), end="")
        {"step": 1, "reward": 0.5, "kl": null, "not_finite": {"kl": "nan"}}
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        trackers: Trackers = _NO_TRACKERS,
        others: Sequence[Tracker] = (),
    ) -> None:
        directory = Path(directory).absolute()
        chosen = [make for name, make in _TRACKERS.items() if getattr(trackers, name)]
        self._trackers = [*(make(directory) for make in chosen), *others]
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / FILE
        self._file = open_locked(self.path)
        try:
            content = self.path.read_bytes()
            kept = content[: content.rfind(b"\n") + 1]
            self._last = self._last_step(kept)
        except BaseException:
            self._file.close()
            raise
        self._file.truncate(len(kept))

    @property
    def offset(self) -> int:
        """The file's length in bytes after an fsync, to be stored in a checkpoint."""
        os.fsync(self._file.fileno())
        return self.path.stat().st_size

    def truncate(self, offset: int, source: Path | None = None) -> None:
        """Remove all lines after an offset in bytes: those of steps that a resumed run repeats.

        With `source`, the directory of another run, begin with the lines of that one.

        Raises:
            ValueError: if no line ends there.
        """
        path = self.path if source is None else source / FILE
        content = path.read_bytes()
        kept = content[: max(offset, 0)]
        if len(kept) != offset or not (kept.endswith(b"\n") or not kept):
            raise ValueError(
                f"offset must be one at which a line of {path} ends, got {offset} of "
                f"{len(content)} bytes: a run resumes with the file that it wrote, put it back"
            )
        self._last = self._last_step(kept)
        if path.samefile(self.path):
            self._file.truncate(offset)
            return
        self._file.truncate(0)
        with names_path(self.path):
            if self._file.write(kept) < len(kept):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Write one line; a device array among the metrics costs a transfer.

        Raises:
            ValueError: if `step` is not after the last one, or a name is `step` or `not_finite`.
            TypeError: if a value is not a single number.
            OSError: if the line cannot be written; a partial line is removed.
        """
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        if self._last is not None and step <= self._last:
            raise ValueError(f"step must be after {self._last}, as {self.path} ends, got {step}")
        line = _line(step, numbers)
        begin = self.path.stat().st_size
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._file.truncate(begin)
            reason = f"the metrics of step {step} were not written: {error.strerror}"
            raise OSError(error.errno, reason, str(self.path)) from error
        self._last = step
        for tracker in self._trackers:
            with names_path(self.path.parent):
                tracker.write(step, numbers)

    def close(self) -> None:
        """Close the file and the trackers."""
        self._file.close()
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _last_step(self, lines: bytes) -> int | None:
        last = lines[lines.rfind(b"\n", 0, -1) + 1 :]
        try:
            return json.loads(last)["step"] if last else None
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{self.path} must end with a step's JSON, got {last!r}") from error


class NoLog:
    """A `MetricsLog` that writes nothing, for processes other than the first."""

    offset = 0

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Write nothing."""

    def truncate(self, offset: int, source: Path | None = None) -> None:
        """Remove nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Close nothing."""


def _number(name: str, value: SupportsFloat) -> float:
    if name in ("step", "not_finite"):
        raise ValueError(f"metrics must not be named {name!r}, which is reserved")
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str) or getattr(value, "ndim", False):
        raise TypeError(f"metrics must be single numbers, got {value!r} for {name!r}")
    try:
        return float(value)
    except TypeError as error:
        raise TypeError(f"metrics must be single numbers, got {value!r} for {name!r}") from error


def _line(step: int, numbers: Mapping[str, float]) -> bytes:
    not_finite = {name: str(x) for name, x in numbers.items() if not math.isfinite(x)}
    finite = {name: None if name in not_finite else x for name, x in numbers.items()}
    note = {"not_finite": not_finite} if not_finite else {}
    return json.dumps({"step": int(step)} | finite | note, allow_nan=False).encode() + b"\n"


def open_locked(path: Path) -> FileIO:
    """Open a file to append to it, and lock it until it is closed, where the system has `flock`.

    Raises:
        FileExistsError: if another process, or another run in this one, has locked it.
    """
    while True:
        file = path.open("ab", buffering=0)
        try:
            if not _lock(file):
                raise FileExistsError(f"output_dir must not be in use by a run, got {path.parent}")
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # deleted before it was locked


def file_is_locked(path: Path) -> bool:
    """Whether another process, or another run in this one, has locked a file."""
    try:
        file = path.open("r+b", buffering=0)  # NFS locks what is open for writing
    except FileNotFoundError:
        return False
    with file:
        return not _lock(file)


def _lock(file: FileIO) -> bool:
    with suppress(ImportError):
        import fcntl  # not on Windows

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
