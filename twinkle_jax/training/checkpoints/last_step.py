"""The last finished step, saved once by whoever gets to it: the loop, or who ends it from aside."""

import threading
from collections.abc import Callable

from twinkle_jax.training.checkpoints.progress import Progress


class LastStep:
    """Knows the last finished step, and saves it if it is not saved yet.

    Args:
        write: writes a checkpoint; called by one thread at a time.
    """

    def __init__(self, write: Callable[[Progress], None]) -> None:
        self._write = write
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
            raise ValueError("progress must be told by finished() first, got none")
        return self._progress

    def finished(self, progress: Progress, *, saved: bool = False) -> None:
        """Take note of a step, or of more that belongs to it.

        Args:
            progress: after the step.
            saved: whether a checkpoint of it is there.
        """
        self._progress = progress
        self._saved = progress if saved else self._saved

    def save(self) -> None:
        """Save it, unless that is done.

        Raises:
            OSError: if it cannot be written.
        """
        with self._lock:
            progress = self._progress
            if progress is not None and progress is not self._saved:
                self._write(progress)
                self._saved = progress

    def save_from_aside(self) -> bool:
        """Save it while the loop may be anywhere.

        Returns:
            False where an update is under way, which has taken the memory of the arrays: then a
            step will be finished soon. True where nothing is left to save.

        Raises:
            OSError: if it cannot be written.
        """
        progress = self._progress
        if progress is None or (progress is not self._saved and not progress.is_whole()):
            return progress is None
        try:
            self.save()
        except (RuntimeError, ValueError):
            if progress.is_whole():
                raise
            return False
        return True
