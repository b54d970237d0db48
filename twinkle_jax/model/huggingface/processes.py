"""Several processes that run one program: errors that reach all, files that one of them writes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

Gather = Callable[[], np.ndarray]
_MESSAGE_BYTES = 2048
_DONE, _FAILED = -1, -2  # any other order of process 0 is the number of the array to gather


def is_spread(tree: Any) -> bool:
    """Return whether this process lacks parts of an array."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return not all(array.is_fully_addressable for array in arrays)


def gather(array: jax.Array, index: int | None = None) -> np.ndarray:
    """Copy an array, or one entry of its first axis, to the host.

    If the array is spread over several processes, all of them must call this.
    """
    if index is not None:
        array = jax.lax.dynamic_index_in_dim(array, index, 0, keepdims=False)
    if is_spread(array):
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


@contextmanager
def one_outcome(call: str, *, together: bool) -> Iterator[None]:
    """Raise in all processes if the block raises in one of them.

    Args:
        call: what the user called, for the message.
        together: whether all processes run the block. It must not hold collectives then: after an
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

    Before process 0 gathers an array it tells the others which one, and they take part. So the
    writer alone decides about order and memory, and its errors reach all processes at once. All
    return when the files are complete.

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
    """Put an error into an array whose length does not depend on it; all zeros for none."""
    text = "" if error is None else f"{type(error).__name__}: {error}"
    message = np.frombuffer(text.encode()[:_MESSAGE_BYTES], np.uint8)
    return np.pad(message, (0, _MESSAGE_BYTES - len(message)))


def _raise_for(call: str, process: int, message: np.ndarray) -> None:
    text = message.tobytes().rstrip(b"\0").decode(errors="ignore")
    if text:
        raise RuntimeError(f"{call} failed on process {process}: {text}")
