"""Replacing a directory as a whole: whoever looks finds the old one or the new one."""

import ctypes
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def replace_directory(target: Path) -> Iterator[Path]:
    """Give an empty directory to fill; when the block ends well, it takes the target's place.

    The directory lies beside the target, on the same file system. An exception, or an end of the
    process at any moment, leaves what was at the target whole.
    """
    target = target.resolve()
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in partial.iterdir():
            _sync(path)
        _sync(partial)
        _swap(partial, target)
        _sync(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _swap(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
    elif not _exchange(partial, target):
        # Without an atomic exchange there is a moment between the two renames in which the old
        # directory stands under another name.
        old = partial.with_suffix(".old")
        target.rename(old)
        try:
            partial.rename(target)
        except OSError:
            old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two directories in one step, where the system can."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    arguments = (_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE)
    return bool(rename(*arguments) == 0)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
