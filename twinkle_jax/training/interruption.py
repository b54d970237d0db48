"""Graceful shutdown: the first SIGTERM or Ctrl-C asks the loop to stop, the second exits."""

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from twinkle_jax.rollout.hosts import InterruptedRunError

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """Notes SIGTERM and SIGINT, so that a loop can stop between the parts of a step.

    While the block runs, the first of these signals only makes `requested` true. The second ends
    the process at once, whatever it is in the middle of, a compilation too; its exit status is 128
    and the signal's number: 143 for SIGTERM, 130 for Ctrl-C. After the block, the handlers are
    those from before.

    The loop may be in the middle of something long: a compilation, a rollout, a reward that hangs.
    If the block has not ended `patience` seconds after the first signal, `last_resort` is
    called on another thread, each second until it returns True, and the process ends with the exit
    status 143; with 1, and the error on standard error, if it raises one.

    Python takes signals in its main thread alone. In any other thread the block changes nothing,
    and `requested` stays false.

    Args:
        patience: seconds.
        last_resort: saves a checkpoint; None: no time limit.

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
        self._signal: signal.Signals | None = None
        self._restore: list[tuple[signal.Signals, Any]] = []

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived."""
        return self._signal is not None

    def check(self) -> None:
        """Raise if a signal has arrived.

        Raises:
            InterruptedRunError: if one has.
        """
        if self.requested:
            raise InterruptedRunError

    @property
    def received(self) -> signal.Signals | None:
        """The first signal that has arrived; None if none has."""
        return self._signal

    def __enter__(self) -> Self:
        self._signal = None
        if threading.current_thread() is threading.main_thread():
            # Python's own handlers wait until the main thread is back from compiled code. The bytes
            # that come here as well do not, so a thread counts those.
            read, self._write = socket.socketpair()
            self._write.setblocking(False)
            self._previous_fd = signal.set_wakeup_fd(self._write.fileno())
            self._thread = threading.Thread(
                target=_wait, args=(read, self._patience, self._last_resort), name="interruption"
            )
            self._thread.daemon = True
            self._thread.start()
            self._restore = [(number, signal.signal(number, self._note)) for number in _SIGNALS]
        return self

    def __exit__(self, *error: object) -> None:
        if self._restore:
            for number, handler in self._restore:
                # None: a handler that Python knows nothing of, as JAX installs one.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            self._restore = []
            signal.set_wakeup_fd(self._previous_fd)
            self._write.close()  # which ends the thread
            self._thread.join()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)


def _wait(read: socket.socket, patience: float | None, last_resort: Callable[[], bool]) -> None:
    """Exit at the second signal, or `patience` seconds after the first."""
    seen = 0
    with read:
        while True:
            try:
                received = read.recv(1)
            except TimeoutError:
                read.settimeout(1.0)
                _try(last_resort)
                continue
            if not received:
                return
            if received[0] in _SIGNALS:
                seen += 1
                read.settimeout(patience)
            if seen == 2:
                _end(128 + received[0])


def _try(last_resort: Callable[[], bool]) -> None:
    try:
        if last_resort():
            os.write(2, b"interrupted; the last finished step is saved: --resume auto goes on\n")
            _end(128 + signal.SIGTERM)
    except Exception as error:
        os.write(2, f"interrupted, but not saved: {error}\n".encode())
        _end(1)


def _end(status: int) -> None:
    if os.isatty(1):
        os.write(1, b"\x1b[?25h")  # the cursor, which a moving bar hides
    os._exit(status)
