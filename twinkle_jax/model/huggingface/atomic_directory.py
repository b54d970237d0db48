"""Replacing a directory in one step: readers see the old one or the new one."""

import ctypes
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # on Windows, where leftovers of killed saves stay
    fcntl = None

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def check_target(target: Path) -> None:
    """Refuse a target that cannot be replaced in one step."""
    if target.exists() and not target.is_dir():
        raise ValueError(f"directory must be one, or not there yet, got the file {target}")
    if target.resolve().is_mount():
        raise ValueError(
            f"directory must not be a mount point, which cannot be replaced, got {target}: "
            "name a directory in it"
        )
    if Path.cwd().is_relative_to(target.resolve()):
        raise ValueError(
            f"directory must not be the current directory or one above it, got {target}: name a "
            "directory in it"
        )


@contextmanager
def replace_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory; when the block ends without an exception, it replaces the target.

    The directory lies beside the target, on the same file system. After an exception, or if the
    process is killed at any moment, the target is unchanged. The next save removes what a killed
    one left behind.
    """
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_remains(target.parent, re.escape(target.name))
    partial, lock = _new_partial(target)
    try:
        yield partial
        for path in partial.rglob("*"):
            _sync(path)
        _sync(partial)
        _swap(partial, target)
        _sync(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def _new_partial(target: Path) -> tuple[Path, int]:
    """Make a directory, and lock it so that no other save takes it for leftovers."""
    while True:
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
        partial.mkdir()
        lock = _lock(partial)
        if lock is not None and partial.exists():
            return partial, lock
        if lock is not None:  # another save removed it before it was locked
            os.close(lock)


def _lock(path: Path) -> int | None:
    """Lock a directory until the descriptor is closed; None if another process has locked it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
    return descriptor


def remove_remains(parent: Path, name: str) -> None:
    """Remove what killed saves left in a directory, which nobody has locked.

    Args:
        parent: the directory.
        name: a regular expression that the names of the targets match.
    """
    if fcntl is None:
        return
    leftover = re.compile(rf"\.({name})\.[0-9a-f]{{8}}\.(?:partial|old)")
    for path in sorted(parent.iterdir()):
        match = leftover.fullmatch(path.name)
        if match is None or path.is_symlink() or not path.is_dir():
            continue
        target = parent / match.group(1)
        if path.suffix == ".old" and not target.exists():
            path.rename(target)  # killed between two renames, see `_swap`: put it back
            continue
        lock = _lock(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _swap(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
    elif not _exchange(partial, target):
        # Without an atomic exchange, the old directory has another name between the two renames.
        old = partial.with_suffix(".old")
        target.rename(old)
        try:
            partial.rename(target)
        except OSError:
            old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two directories in one step; False if the system cannot."""
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
