"""The time that a call may take, all of its connections together."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self


class Budget:
    """A limit on time that holds whatever the other side does.

    Time-outs of sockets begin anew with every byte, so a server that drips never meets them. Here
    the connections that are open are shut when the time is over; whoever reads then sees an end.

    Args:
        seconds: how long.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._timer = threading.Timer(seconds, self.cut)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._timer.cancel()

    @property
    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether the time has passed, or the call was cut."""
        return self._over.is_set() or not self.left

    def cut(self) -> None:
        """Shut everything that is open, now."""
        with self._lock:
            self._over.set()
            for handle in self._open:
                _shut(handle)

    def wait(self, seconds: float) -> None:
        """Wait, but no longer than until the time is over."""
        self._over.wait(min(seconds, self.left))

    @contextmanager
    def watch(self, connection: socket.socket) -> Iterator[None]:
        """Shut this connection too, should the time be over before the block ends."""
        # A second handle stays good when TLS wraps the first, or its reader closes it.
        handle = socket.socket(fileno=os.dup(connection.fileno()))
        try:
            with self._lock:
                self._open.add(handle)
                if self._over.is_set():
                    _shut(handle)
            yield
        finally:
            with self._lock:
                self._open.discard(handle)
                handle.close()


def _shut(handle: socket.socket) -> None:
    try:
        handle.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has ended by itself
        return
