"""The state of a run between steps: saved, restored, and saved on signals."""

import dataclasses
import json
import os
import platform
import signal
import socket
import stat
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from types import FrameType
from typing import Any, NamedTuple, Self

import jax

from twinkle_jax.data import PromptLoader
from twinkle_jax.model import Params
from twinkle_jax.rollout.hosts import InterruptedRunError
from twinkle_jax.training.checkpoint import RunCheckpoints
from twinkle_jax.training.config import MEASURED, TrainConfig
from twinkle_jax.training.run_directory import (
    check_resumable,
    is_same,
)
from twinkle_jax.training.state import TrainState


@dataclass(frozen=True)
class Totals:
    """Counters that are carried from step to step."""

    num_tokens: int = 0  # sampled so far, or learned of examples
    skipped: int = 0  # steps in a row, up to now, in which a gradient was not finite
    seconds: float = 0.0  # of all steps
    accuracy_before: float | None = None  # held-out, before the first step; None: not measured
    reward_before: float | None = None
    metrics_offset: int = 0  # bytes of metrics.jsonl, up to the last line of these steps
    unwritten: str | None = None  # metrics of the last step, whose line waits for an evaluation
    held_out: str | None = None  # fingerprint of the problems that were evaluated before
    cross_entropy_before: float | None = None
    preference_loss_before: float | None = None

    @property
    def evaluated(self) -> bool:
        """Whether the policy before the first step has been evaluated."""
        return any(getattr(self, f"{name}_before") is not None for name in MEASURED)


class Progress(NamedTuple):
    """The state of a run after a step: with the reference policy, all that the next step needs."""

    state: TrainState
    key: jax.Array  # the root of all randomness on the device: step s draws with `fold_in(key, s)`
    step: int  # steps done
    totals: Totals
    data: dict[str, Any]  # the loader's state: its position, and a fingerprint of the data
    held_out: dict[str, float] | None = None  # of the evaluation after this step; not saved

    def is_intact(self) -> bool:
        """Whether no array is deleted: a running update deletes those that it was donated."""
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))


def save(
    checkpoints: RunCheckpoints,
    progress: Progress,
    reference: Params | None,
    config: TrainConfig,
    *,
    base: str | None = None,
    started_in: str | None = None,
    code: Mapping[str, str] | None = None,
    wait: bool = True,
) -> None:
    """Save a checkpoint.

    `base` is a fingerprint of the frozen parameters, for `check_base`. Relative paths in `config`
    are of the directory `started_in`. `code` has hashes of imported files, for `changed_code`.
    """
    facts = {
        "totals": dataclasses.asdict(progress.totals),
        "data": progress.data,
        "config": json.loads(json.dumps(dataclasses.asdict(config))),
        "versions": package_versions(),
        "base": base,
        "started_in": started_in,
        "code": code,
    }
    checkpoints.save(progress.step, arrays_of(progress, reference), facts, wait=wait)


def restore(
    checkpoints: RunCheckpoints,
    fresh: Progress,
    reference: Params | None,
    config: TrainConfig,
    loader: PromptLoader,
    base: str | None = None,
    held_out: str | None = None,
) -> tuple[Progress, Params | None]:
    """Restore the newest valid checkpoint, and set the loader to its position.

    `fresh` and `reference` have arrays of the shapes and shardings to restore; `base` and
    `held_out` are fingerprints of the frozen parameters and of the held-out problems.

    Returns:
        The progress of the run, and its reference policy. What was measured before the first step
        is None if the held-out problems, or what judges them, are others than before.

    Raises:
        ValueError: if a setting, the data or the frozen parameters are not those of the run; the
            message names which.
    """

    def check(facts: dict[str, Any]) -> None:
        check_resumable(facts["config"], config, facts.get("started_in"))
        check_base(facts, base)
        try:
            loader.set_state(facts["data"])
        except ValueError as error:
            name, value = (
                ("task", config.task) if config.examples is None else ("examples", config.examples)
            )
            raise ValueError(
                f"{name} must hold what it held in the run to resume, got {value!r}: {error}"
            ) from error

    step, arrays, facts = checkpoints.restore(arrays_of(fresh, reference), check=check)
    totals = Totals(**facts["totals"])
    before, now = facts["config"]["evaluation"], dataclasses.asdict(config.evaluation)
    is_judged_alike = all(
        is_same(before.get(name), now[name], facts.get("started_in"))
        for name in ("problems", "path", "reward")
    )
    if not is_judged_alike or totals.held_out not in (None, held_out):
        unknown: dict[str, Any] = dict.fromkeys(f"{name}_before" for name in MEASURED)
        totals = dataclasses.replace(totals, held_out=None, **unknown)
    progress = Progress(arrays["state"], arrays["key"], step, totals, facts["data"])
    return progress, arrays.get("reference", reference)


def check_base(facts: Mapping[str, Any], base: str | None) -> None:
    """Raise if adapters of a checkpoint were trained on other parameters than those of `base`."""
    if facts.get("base") not in (None, base):
        raise ValueError(
            "model must have the parameters that the run's adapters were trained on, got others in "
            f"its files: {facts['config']['model'] or 'base'}"
        )


def arrays_of(progress: Progress, reference: Params | None) -> dict[str, Any]:
    """Collect the arrays of a checkpoint."""
    return {"state": progress.state, "key": progress.key} | (
        {"reference": reference} if reference else {}
    )


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a run depends on."""
    names = ("twinkle-jax", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint", "grain")
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in names}


class LastStep:
    """Saves the last finished step once, from the training loop or from a signal handler.

    Args:
        write: saves a progress, with `wait=False` in the background; called by one thread at a
            time.
        settle: waits for the save in the background, or with `wait=False` only checks it; raises
            its error.
    """

    def __init__(
        self,
        write: Callable[..., None],
        settle: Callable[..., None] = lambda *, wait: None,
    ) -> None:
        self._write = write
        self._settle = settle
        self._lock = threading.Lock()
        self._progress: Progress | None = None
        self._saved: Progress | None = None

    @property
    def progress(self) -> Progress:
        """The last finished step.

        Raises:
            ValueError: if there is none.
        """
        if self._progress is None:
            raise ValueError("progress must be set by finished() first, got none")
        return self._progress

    def finished(self, progress: Progress, *, saved: bool = False) -> None:
        """Note that a step is finished; `saved`: it has a checkpoint already."""
        self._progress = progress
        self._saved = progress if saved else self._saved

    def save(self, *, wait: bool = True) -> None:
        """Save the last finished step, unless it is saved already.

        Args:
            wait: False returns once its arrays are on the host, and writes them in the background.

        Raises:
            OSError: if this save, or an earlier one in the background, fails.
        """
        with self._lock:
            progress = self._progress
            if progress is not None and progress is not self._saved:
                self._write(progress, wait=wait)
                self._saved = progress
            elif wait:
                self._settle_saved(wait=True)

    def poll(self, *, wait: bool = False) -> None:
        """Raise the error of a failed save in the background.

        Args:
            wait: True waits until the save is complete.
        """
        with self._lock:
            self._settle_saved(wait=wait)

    def _settle_saved(self, *, wait: bool) -> None:
        try:
            self._settle(wait=wait)
        except BaseException:
            self._saved = None
            raise

    def save_from_signal(self) -> bool:
        """Save the last finished step from another thread, whatever the training loop is doing.

        Returns:
            True if everything is saved. False during an update, to which the arrays were donated:
            try again, it will soon finish a step.

        Raises:
            OSError: if it cannot be written.
        """
        progress = self._progress
        if progress is None or (progress is not self._saved and not progress.is_intact()):
            return progress is None
        try:
            self.save()
        except (RuntimeError, ValueError):
            if progress.is_intact():
                raise
            return False
        return True


# Signals.

_HANGUP = getattr(signal, "SIGHUP", None)  # the terminal is gone; not on Windows
_SIGNALS = (signal.SIGTERM, signal.SIGINT, *([] if _HANGUP is None else [_HANGUP]))


class Interruption:
    """Records SIGTERM, SIGINT and SIGHUP, so that a loop can stop between the parts of a step.

    Inside the `with` block, the first of these signals sets `requested`. The second ends the
    process at once, even during a compilation, with exit status 128 plus the signal's number: 143
    for SIGTERM, 130 for Ctrl-C. The block restores the previous handlers when it ends. SIGHUP, for
    a terminal that was closed, stays ignored where it is, as under `nohup`; several count as one.

    If the block still runs `patience` seconds after the first signal (a compilation, a long
    rollout, a reward that hangs), another thread calls `last_resort` once a second until it returns
    True, and ends the process with exit status 143; if it raises, with status 1 and the error on
    standard error.

    Python handles signals in the main thread only: in any other, the block does nothing and
    `requested` stays False. A process that is forked inside the block, such as a worker of
    `multiprocessing` in a reward, has the previous handlers: signals to it are not the run's.

    Args:
        patience: seconds before `last_resort` is called.
        last_resort: saves a checkpoint; None: wait without limit.

    Example:
        >>> with Interruption() as interruption:
        ...     for step in range(3):
        ...         if interruption.requested:
        ...             break
        >>> interruption.requested
        False
    """

    def __init__(
        self, *, patience: float = 15.0, last_resort: Callable[[], bool] | None = None
    ) -> None:
        self._patience = patience if last_resort is not None else None
        self._last_resort = last_resort or (lambda: False)
        self._received: signal.Signals | None = None
        self._restore: list[tuple[signal.Signals, Any]] = []

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived."""
        return self._received is not None

    def check(self) -> None:
        """Raise if a signal has arrived.

        Raises:
            InterruptedRunError: if one has; it names the signal.
        """
        if self._received is not None:
            raise InterruptedRunError(f"received {self._received.name}")

    def __enter__(self) -> Self:
        self._received = None
        if threading.current_thread() is threading.main_thread():
            # Python runs handlers when the main thread returns from compiled code, but writes the
            # number of a signal to this socket at once: a thread reads it.
            read, self._write = socket.socketpair()
            self._write.setblocking(False)
            self._previous_fd = signal.set_wakeup_fd(self._write.fileno())
            self._thread = threading.Thread(
                target=_watch_signals,
                args=(read, self._patience, self._last_resort),
                name="interruption",
                daemon=True,
            )
            self._thread.start()
            handled = [n for n in _SIGNALS if n != _HANGUP or signal.getsignal(n) != signal.SIG_IGN]
            self._restore = [(number, signal.signal(number, self._record)) for number in handled]
            _installed.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        if self._restore:
            _installed.remove(self)
            self._restore_handlers(self._previous_fd)
            self._restore = []
            self._write.close()  # which ends the thread
            self._thread.join()

    def _restore_handlers(self, wakeup_fd: int) -> None:
        for number, handler in self._restore:
            # None: a handler that was not installed from Python; JAX installs such.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(wakeup_fd)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or signal.Signals(number)


_installed: list[Interruption] = []
_fork = threading.local()  # the mask of the thread that forks


def _before_fork() -> None:
    """Hold back signals: those to the new process must find its handlers."""
    if _installed:
        _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _after_fork() -> None:
    mask = _fork.__dict__.pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    """Give the new process the previous handlers; ours write to the socket of the run."""
    for interruption in reversed(_installed):
        interruption._restore_handlers(-1)
    _installed.clear()
    _after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork,
        after_in_child=_after_fork_in_child,
    )


def _watch_signals(
    read: socket.socket, patience: float | None, last_resort: Callable[[], bool]
) -> None:
    """Exit at the second signal, or `patience` seconds after the first."""
    count, hung_up = 0, False
    with read:
        while True:
            try:
                received = read.recv(1)
            except TimeoutError:
                read.settimeout(1.0)
                _try_last_resort(last_resort)
                continue
            if not received:
                return
            if received[0] == _HANGUP:
                _leave_terminal()
                if hung_up:  # the shell of a closed terminal sends one, and the system another
                    continue
                hung_up = True
            if received[0] in _SIGNALS:
                count += 1
                read.settimeout(patience)
            if count == 2:
                _exit(128 + received[0])


def _leave_terminal(descriptors: tuple[int, ...] = (1, 2)) -> None:
    """Write to nowhere in place of a terminal that is gone, which raises an error."""
    for descriptor in descriptors:
        with suppress(OSError):  # closed
            is_device = stat.S_ISCHR(os.fstat(descriptor).st_mode)
            if is_device and not os.isatty(descriptor):  # a terminal that is there is one
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, descriptor)
                os.close(null)


def _try_last_resort(last_resort: Callable[[], bool]) -> None:
    try:
        if not last_resort():
            return
        text, status = "; the last finished step is saved: continue with --resume auto", 143
    except Exception as error:
        text, status = f", but not saved: {error}", 1
    with suppress(OSError):  # a pipe without a reader, such as a `tee` that has ended
        os.write(2, f"interrupted{text}\n".encode(errors="backslashreplace"))
    _exit(status)


def _exit(status: int) -> None:
    if os.isatty(1):
        os.write(1, b"\x1b[?25h")  # show the cursor, which the progress bar hides
    os._exit(status)
