"""One run in several processes: which rows each of them holds, and what they exchange.

Every process runs the same program. Device arrays are global; prompts are encoded, completions
decoded and rewards computed by the process that holds the rows. Results that the others need (token
ids, rewards, an error) go through `share`, which all processes call together. With one process,
`share` only calls its function.
"""

import json
import socket
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from twinkle_jax.model.decoder.sharding import ROWS

Made = TypeVar("Made")
RowMask = np.ndarray[Any, np.dtype[np.bool_]]

_ROOM = 2048  # bytes that every message has; longer ones take a second transfer
_MOST_ROOM = 2**16
_room: dict[str, int] = {}  # by call, after a longer message: the same in all processes
_HEADER = 3  # numbers of 4 bytes: process, outcome, bytes of the message
_DONE, _FAILED, _INTERRUPTED = 0, 1, 2


class InterruptedRunError(Exception):
    """Raised between the parts of a step to end the run; the state is that of the last step."""


class SharedError(RuntimeError):
    """An error that every process raises at the same point, so that all of them can still save."""


def several() -> bool:
    """Whether the run has several processes."""
    return jax.process_count() > 1


def is_first() -> bool:
    """Whether this process displays, logs and writes files that exist once."""
    return jax.process_index() == 0


def share(call: str, compute: Callable[[], Any]) -> list[Any]:
    """Compute something in each process, and give every process the results of all.

    All processes must call this at the same point. `compute` may use collectives only before
    anything that can fail in one process alone.

    Args:
        call: name of the operation, for error messages.
        compute: returns a value that can be serialised as JSON; NaN is allowed.

    Returns:
        The results of all processes, in their order.

    Raises:
        SharedError: in all processes, if `compute` raises in one of them; it names that process and
            its error. With one process, the error itself.
        InterruptedRunError: in all processes, if it is raised in one of them; it names that process
            and its message. With one process, the error itself.
    """
    if not several():
        return [compute()]
    outcome, text, cause = _DONE, "", None
    try:
        text = json.dumps(compute())
    except SharedError:
        raise  # all processes raise it here
    except InterruptedRunError as error:
        outcome, text = _INTERRUPTED, f"{name_process()} {error}"
    except BaseException as error:
        outcome, cause = _FAILED, error
        text = f"{name_process()}, {call}: {type(error).__name__}: {error}"
    outcomes, texts = _exchange(call, outcome, text.encode(errors="replace"))
    if _FAILED in outcomes:
        raise SharedError(texts[outcomes.index(_FAILED)].decode(errors="replace")) from cause
    if _INTERRUPTED in outcomes:
        raise InterruptedRunError(texts[outcomes.index(_INTERRUPTED)].decode(errors="replace"))
    return [json.loads(text) for text in texts]


def together(call: str, compute: Callable[[], None]) -> None:
    """Call a function in each process; an error in one is raised in all, as by `share`."""

    def without_result() -> None:
        compute()

    share(call, without_result)


def agreed(call: str, make: Callable[[], Made]) -> Made:
    """Make an object in each process; an error in one is raised in all, as by `share`."""
    made: list[Made] = []
    together(call, lambda: made.append(make()))
    return made[0]


def first_decides(call: str, compute: Callable[[], Any]) -> Any:
    """Compute something in process 0, and give every process the result, as `share` does."""
    return share(call, lambda: compute() if is_first() else None)[0]


def name_process() -> str:
    """Name this process and its host, for messages."""
    index, count = jax.process_index(), jax.process_count()
    return f"process {index} of {count} ({socket.gethostname()})"


def _exchange(call: str, outcome: int, text: bytes) -> tuple[list[int], list[bytes]]:
    """Send outcome and text to all processes; return those of all, ordered by process.

    `call` names the call, which all processes make alike: a message has the room that the longest
    one of the same call needed before.
    """
    header = np.asarray([jax.process_index(), outcome, len(text)], np.int32)
    room = _room.get(call, _ROOM)
    begin = np.frombuffer(text[:room].ljust(room, b"\0"), np.uint8)
    received = multihost_utils.process_allgather(np.concatenate([header.view(np.uint8), begin]))
    headers = np.ascontiguousarray(received[:, : 4 * _HEADER]).view(np.int32)
    texts = received[:, 4 * _HEADER :]
    lengths = headers[:, 2]
    if lengths.max() > room:
        # A power of two, so that few lengths are compiled.
        room = 1 << int(lengths.max() - 1).bit_length()
        _room[call] = min(room, _MOST_ROOM)
        texts = multihost_utils.process_allgather(np.frombuffer(text.ljust(room, b"\0"), np.uint8))
    # The header says which process a line comes from: devices need not be ordered by process.
    order = np.argsort(headers[:, 0])
    return (
        [int(headers[i, 1]) for i in order],
        [texts[i].tobytes()[: lengths[i]] for i in order],
    )


# Rows of global arrays.


def _is_spread(array: Any) -> bool:
    """Whether this process lacks parts of an array."""
    return isinstance(array, jax.Array) and not array.is_fully_addressable


def held_rows(array: Array) -> RowMask:
    """Mark the rows of an array that this process reads; exactly one process reads each row."""
    if not _is_spread(array):
        return np.ones(len(array), bool)
    owners = np.full(len(array), jax.process_count())
    held: dict[Any, Any] = dict(array.sharding.devices_indices_map(array.shape))
    for device, index in held.items():
        owners[index[0]] = np.minimum(owners[index[0]], device.process_index)
    return np.asarray(owners == jax.process_index())


def read_held(arrays: Any) -> Any:
    """Copy the rows that this process holds to the host, in one transfer; the others are 0."""
    leaves, structure = jax.tree.flatten(arrays)
    if not any(map(_is_spread, leaves)):
        return jax.device_get(arrays)
    parts = jax.device_get([[shard.data for shard in x.addressable_shards] for x in leaves])
    values = []
    for array, data in zip(leaves, parts, strict=True):
        values.append(np.zeros(array.shape, array.dtype))
        for shard, part in zip(array.addressable_shards, data, strict=True):
            values[-1][shard.index] = part
    return jax.tree.unflatten(structure, values)


def spread_rows(arrays: Any, mesh: Mesh | None) -> Any:
    """Spread the rows of arrays that every host has over the devices of a mesh."""
    if mesh is None:
        return arrays
    rows = NamedSharding(mesh, PartitionSpec(ROWS))

    def spread(x: np.ndarray[Any, Any]) -> jax.Array:
        return jax.make_array_from_callback(x.shape, rows, lambda index: x[index])

    return jax.tree.map(spread, arrays)


def read_if_spread(array: Any) -> Any:
    """Copy an array to every host if a process lacks parts of it; all processes must call this."""
    return multihost_utils.process_allgather(array, tiled=True) if _is_spread(array) else array


def gather_rows(parts: Any, count: int) -> Any:
    """Join the rows of all processes, in their order, on every host; all processes must call this.

    `parts` have the rows that `deal` gives to this process, of `count` in all.
    """
    if not several():
        return parts
    share_size = -(-count // jax.process_count())
    most = 1 << (share_size - 1).bit_length()  # few shapes are compiled

    def fill(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.pad(x, ((0, most - len(x)), *((0, 0),) * (x.ndim - 1)))

    # The first process has the first rows; devices need not be ordered by process.
    gathered = multihost_utils.process_allgather(
        (np.asarray(jax.process_index(), np.int32), jax.tree.map(fill, parts))
    )
    order = np.argsort(gathered[0])
    sizes = [min(share_size, max(0, count - i * share_size)) for i in range(jax.process_count())]

    def join(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.concatenate([x[i, :size] for i, size in zip(order, sizes, strict=True)])

    return jax.tree.map(join, gathered[1])


def merge_rows(
    call: str, held: RowMask, compute: Callable[[], dict[str, np.ndarray[Any, Any]]]
) -> dict[str, np.ndarray[Any, Any]]:
    """Compute numbers for the rows that each process holds, and gather those of all rows.

    `compute` returns arrays by name, with one number a row; rows that this process does not hold
    are not read. Rows that no process has computed are NaN, or 0 among integers.
    """
    if not several():
        return compute()

    def held_numbers() -> dict[str, Any]:
        arrays = compute() if held.any() else {}
        return {
            "rows": np.flatnonzero(held).tolist(),
            "dtypes": {name: array.dtype.name for name, array in arrays.items()},
            "numbers": {name: array[held].tolist() for name, array in arrays.items()},
        }

    merged: dict[str, np.ndarray[Any, Any]] = {}
    for part in share(call, held_numbers):
        for name, numbers in part["numbers"].items():
            if name not in merged:
                dtype = np.dtype(part["dtypes"][name])
                merged[name] = np.full(len(held), np.nan if dtype.kind == "f" else 0, dtype)
            merged[name][part["rows"]] = numbers
    return merged


def deal(count: int) -> slice:
    """Return the part of a list that this process works on: equal parts, in order."""
    share_size = -(-count // jax.process_count())
    start = min(jax.process_index() * share_size, count)
    return slice(start, min(start + share_size, count))


def fail(error: Exception) -> NoReturn:
    """Raise an error that all processes detect alike, from shared data."""
    if not several():
        raise error
    raise SharedError(str(error)) from error
