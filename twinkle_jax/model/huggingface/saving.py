"""Saving: one of several processes writes, into a directory that is replaced in one step.

Readers see the old directory or the new one, whenever a process is killed. An error in one process
is raised in all of them.
"""

import ctypes
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # on Windows, where leftovers of killed saves stay
    fcntl = None

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2

Gather = Callable[[], np.ndarray]
_MESSAGE_BYTES = 2048
_DONE, _FAILED = -1, -2  # any other order of process 0 is the number of the array to gather


# Directories.


def check_target(target: Path) -> None:
    """Refuse a target that cannot be replaced in one step."""
    if target.exists() and not target.is_dir():
        raise ValueError(f"directory must be a directory, or not exist yet, got the file {target}")
    if target.resolve().is_mount():
        raise ValueError(
            f"directory must not be a mount point, which cannot be replaced, got {target}: "
            "name a directory in it"
        )
    with suppress(FileNotFoundError):  # a reward or a tool may have deleted the current directory
        current = Path.cwd()
        if current.is_relative_to(target.resolve()):
            raise ValueError(
                f"directory must not be the current directory or one above it, got {target}: name "
                "a directory in it"
            )


@contextmanager
def names_path(path: Path) -> Iterator[None]:
    """Name a path in OSErrors that name none, such as that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def replace_directory(target: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield an empty directory; when the block ends without an exception, it replaces the target.

    The directory lies beside the target, on the same file system. After an exception, or if the
    process is killed at any moment, the target is unchanged. The next save removes what a killed
    one left behind.

    Args:
        target: the directory to replace, or to make.
        durable: whether to wait until the disk has the files: otherwise a machine that is lost may
            leave neither the old ones nor the new ones.
    """
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_remains(target.parent, re.escape(target.name))
    partial, lock = _new_partial(target)
    try:
        with names_path(target):
            yield partial
            for path in (*partial.rglob("*"), partial) if durable else ():
                _sync(path)
            _swap(partial, target)
            if durable:
                _sync(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def _new_partial(target: Path) -> tuple[Path, int]:
    """Make a directory, and lock it so that no other save removes it as a leftover."""
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
    """Remove what killed saves left in a directory: leftovers that no process has locked.

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


# Processes.


def is_spread(tree: Any) -> bool:
    """Return whether this process lacks parts of an array."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return not all(array.is_fully_addressable for array in arrays)


def gather(
    array: jax.Array,
    index: tuple[int, ...] = (),
    *,
    dtype: np.dtype[Any] | None = None,
    transposed: bool = False,
) -> np.ndarray:
    """Copy an array, or one entry of its first axes, to the host.

    If the array is spread over several processes, all of them must call this.

    Args:
        array: on devices.
        index: of the entry.
        dtype: type to convert to, on the device; None: the array's own.
        transposed: whether to exchange the last two axes, on the device.
    """
    if index or transposed or dtype not in (None, array.dtype):
        numbers = tuple(map(np.int32, index))
        array = _entry(array, numbers, dtype=dtype or array.dtype, transposed=transposed)
    if is_spread(array):
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


@partial(jax.jit, static_argnames=("dtype", "transposed"))
def _entry(
    array: jax.Array, index: tuple[Any, ...], *, dtype: np.dtype[Any], transposed: bool
) -> jax.Array:
    for number in index:
        array = jax.lax.dynamic_index_in_dim(array, number, keepdims=False)
    array = array.astype(dtype)
    return array.swapaxes(-1, -2) if transposed else array


@contextmanager
def one_outcome(call: str, *, together: bool) -> Iterator[None]:
    """Raise in all processes if the block raises in one of them.

    Args:
        call: what the user called, for the message.
        together: whether all processes run the block. It must not use collectives then: after an
            error in one process, the others would wait for it.

    Raises:
        RuntimeError: if another process failed; names it and its error.
    """
    if not together:
        yield
        return
    try:
        yield
    except BaseException as error:
        multihost_utils.process_allgather(_encode(error))
        raise
    for process, message in enumerate(multihost_utils.process_allgather(_encode(None))):
        _raise_for(call, process, message)


def write_once(
    call: str, tree: Any, gathers: Sequence[Gather], write: Callable[[Sequence[Gather]], None]
) -> None:
    """Write files from arrays, on process 0 if the arrays are spread over several processes.

    Before process 0 gathers an array, it tells the others which one, and they take part. So only
    the writer decides about order and memory, and its errors reach all processes. All return when
    the files are complete.

    Args:
        call: what the user called; the same in all processes.
        tree: the arrays.
        gathers: one function for each array, in the same order in all processes.
        write: writes the files; it is passed the functions to call for the arrays.

    Raises:
        RuntimeError: on the other processes, if process 0 failed; names its error.
    """
    if not is_spread(tree):
        return write(gathers)
    multihost_utils.sync_global_devices(call)  # raises if another process calls something else
    if jax.process_index():
        while (order := int(_from_first(np.int32(0)))) >= 0:
            gathers[order]()
        if order == _FAILED:
            _raise_for(call, 0, _from_first(_encode(None)))
        return None

    def announce_and_gather(number: int) -> np.ndarray:
        _from_first(np.int32(number))
        return gathers[number]()

    try:
        write([partial(announce_and_gather, number) for number in range(len(gathers))])
    except BaseException as error:
        _from_first(np.int32(_FAILED))
        _from_first(_encode(error))
        raise
    _from_first(np.int32(_DONE))
    return None


def _from_first(value: Any) -> np.ndarray:
    return multihost_utils.broadcast_one_to_all(value)


def _encode(error: BaseException | None) -> np.ndarray:
    """Encode an error as an array of fixed length; all zeros for none."""
    text = "" if error is None else f"{type(error).__name__}: {error}"
    # An error here would leave the other processes waiting.
    message = np.frombuffer(text.encode(errors="replace")[:_MESSAGE_BYTES], np.uint8)
    return np.pad(message, (0, _MESSAGE_BYTES - len(message)))


def _raise_for(call: str, process: int, message: np.ndarray) -> None:
    text = message.tobytes().rstrip(b"\0").decode(errors="ignore")
    if text:
        raise RuntimeError(f"{call} failed on process {process}: {text}")
