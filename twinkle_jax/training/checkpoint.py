"""Checkpoints of a run: arrays and facts in files, written atomically and verified when read."""

import asyncio
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from twinkle_jax._package import require
from twinkle_jax.model.huggingface.checkpoint_files import ADAPTER_CONFIG, CONFIG
from twinkle_jax.model.huggingface.saving import check_target, remove_remains, replace_directory
from twinkle_jax.rollout import hosts

MANIFEST = "manifest.json"


def write_manifest(directory: Path) -> None:
    """List all files of a directory, those of its subdirectories too, in its `manifest.json`."""
    names = [p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()]
    with ThreadPoolExecutor() as pool:
        described = pool.map(lambda name: _file_facts(directory / name), names)
        listed = dict(zip(names, described, strict=True))
    (directory / MANIFEST).write_text(_text(listed), encoding="utf-8")


def find_fault(directory: Path) -> str | None:
    """Verify the files of a directory, and its manifest, by their checksums.

    Returns:
        The path of the first file that is missing, truncated or changed, and what is wrong with it;
        None if all are intact. Files that the manifest does not list are ignored.
    """
    path = directory / MANIFEST
    try:
        content = path.read_bytes().decode()
        listed = json.loads(content)["files"]
        if content != _text(listed):
            raise ValueError("wrong checksum")
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    except (ValueError, LookupError, TypeError):
        return f"{path} is corrupt"
    with ThreadPoolExecutor() as pool:
        faults = pool.map(lambda name: _fault(directory / name, listed[name]), sorted(listed))
        return next((fault for fault in faults if fault is not None), None)


def _fault(path: Path, listed: object) -> str | None:
    try:
        facts = _file_facts(path)
    except (OSError, ValueError) as error:
        return f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
    return None if facts == listed else f"{path} is corrupt: it has {facts}, not {listed}"


def _file_facts(path: Path) -> dict[str, object]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _text(listed: dict[str, dict[str, object]]) -> str:
    """Serialize a list of files with its SHA-256; equal lists give equal texts."""
    files = json.dumps(listed, indent=1, sort_keys=True)
    checksum = hashlib.sha256(files.encode()).hexdigest()
    return json.dumps({"files": listed, "sha256": checksum}, indent=1, sort_keys=True) + "\n"


LEAVES = "leaves.json"
_ARRAYS = "arrays"


def _begin_arrays(directory: Path, leaves: Mapping[str, jax.Array]) -> Callable[[], None]:
    """Copy arrays to the host and start writing them; each process writes its devices' shards.

    Orbax's checkpointers have barriers, at which all processes would wait for one that has failed.
    The handler that they are built on has none: our callers synchronize, and share errors.

    Returns:
        A function that waits until this process has written everything; any thread may call it.
    """
    stored = {name: _as_global(_bits(leaf)) for name, leaf in leaves.items() if leaf.size}
    if not stored:
        return lambda: None
    import orbax.checkpoint as ocp
    from etils import epath  # comes with orbax

    save = ocp.StandardCheckpointHandler().async_save(
        epath.Path(directory.resolve() / _ARRAYS), args=ocp.args.StandardSave(stored)
    )
    with ThreadPoolExecutor(1) as thread:  # where no event loop runs, as one does in notebooks
        parts = thread.submit(asyncio.run, save).result() or []

    def write() -> None:
        for part in parts:
            part.result()

    return write


def _finalize_arrays(directory: Path) -> None:
    """Merge what the processes have written: once, after all of them."""
    import orbax.checkpoint as ocp
    from etils import epath

    if (directory / _ARRAYS).exists():
        ocp.StandardCheckpointHandler().finalize(epath.Path(directory.resolve() / _ARRAYS))


def _as_global(leaf: jax.Array) -> jax.Array:
    """Turn an array that every process has for itself into a global, replicated one."""
    if not hosts.several() or not leaf.is_fully_addressable:
        return leaf
    mesh = jax.make_mesh((jax.device_count(),), ("devices",))
    values = np.asarray(leaf)
    sharding = jax.NamedSharding(mesh, jax.P())
    return jax.make_array_from_process_local_data(sharding, values, values.shape)


def _checked_leaves(arrays: PyTree[jax.Array]) -> dict[str, jax.Array]:
    """Name the leaves, and refuse those that could not be restored."""
    leaves = _name(arrays)
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array):
            raise TypeError(f"arrays must have JAX arrays as leaves, got {type(leaf)} at {name}")
        if getattr(leaf, "weak_type", False):  # typed keys do not have it
            raise TypeError(
                f"arrays must have no weakly typed leaves, got one at {name}: "
                "make it with jnp.asarray(value, dtype)"
            )
    return leaves


def _name(tree: PyTree[Any]) -> dict[str, Any]:
    named = [(jax.tree_util.keystr(path), x) for path, x in jax.tree.leaves_with_path(tree)]
    leaves = dict(named)
    if len(leaves) < len(named):
        twice = [name for name, _ in named if sum(name == other for other, _ in named) > 1]
        raise ValueError(f"arrays must have one name for each leaf, got {twice[0]} twice")
    return leaves


def _describe(leaf: Any) -> dict[str, Any]:
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _bits(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _check(saved: dict[str, Any], leaves: dict[str, Any], directory: Path) -> None:
    for name in saved.keys() ^ leaves.keys():
        have = "no" if name in saved else "also"
        raise ValueError(f"like must have the leaves saved in {directory}, got {have} {name}")
    for name, leaf in leaves.items():
        for what, error in (("shape", ValueError), ("dtype", TypeError)):
            requested, stored = _describe(leaf)[what], saved[name][what]
            if requested != stored:
                raise error(
                    f"like must have {name} with the {what} saved in {directory}, {stored}, "
                    f"got {requested}"
                )


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """Return the sharding to restore a leaf to; None if it is uncommitted."""
    return leaf.sharding if getattr(leaf, "committed", True) else None


def _target(leaf: Any) -> Any:
    """Describe a leaf, or the bits of a key, for orbax: on the host if it is uncommitted."""
    sharding, bits = _sharding(leaf), jax.eval_shape(_bits, leaf)
    if sharding is not None:
        return jax.ShapeDtypeStruct(bits.shape, bits.dtype, sharding=sharding)
    return np.empty(bits.shape, bits.dtype)


def _place(stored: Any, leaf: Any) -> jax.Array:
    if stored is None:  # orbax does not write arrays without elements
        bits = jax.eval_shape(_bits, leaf)
        stored = np.empty(bits.shape, bits.dtype)
    array, sharding = jnp.asarray(stored), _sharding(leaf)
    if _is_key(leaf):
        array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(jnp.empty((), leaf.dtype)))
    is_placed = sharding is None or isinstance(stored, jax.Array)
    return array if is_placed else jax.device_put(array, sharding)


_OS_ERROR = re.compile(r"os_error_code='(\d+)'")  # in tensorstore's messages


def _is_no_system_error(record: logging.LogRecord) -> bool:
    message = f"{record.getMessage()} {record.exc_info and record.exc_info[1]}"
    return _OS_ERROR.search(message) is None


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise system errors of tensorstore as OSErrors, and keep its tracebacks out of the log.

    Orbax closes its event loop at the first array that cannot be written. The other arrays then
    fail, perhaps later: with "Event loop is closed", which a hook hides that stays after an error,
    or with the same system error, which is kept out of the log from the first call on.
    """
    hook, level = sys.unraisablehook, logging.getLogger("absl").level
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_no_system_error)

    def ignore_closed_loop(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    logging.getLogger("absl").setLevel(logging.CRITICAL)
    sys.unraisablehook = ignore_closed_loop
    try:
        yield
        sys.unraisablehook = hook
    except ValueError as error:
        code = _OS_ERROR.search(str(error))
        if code is None:
            raise
        number = int(code.group(1))
        raise OSError(number, os.strerror(number)) from error
    finally:
        logging.getLogger("absl").setLevel(level)


_STEP = re.compile(r"step_(\d{8,})")
_FACTS = "facts.json"


def write_checkpoint(directory: Path, arrays: PyTree[jax.Array], facts: Mapping[str, Any]) -> None:
    """Write arrays, facts, and the manifest of both to an empty directory.

    Args:
        directory: gets `facts.json`, `leaves.json` (names, shapes and dtypes) and `arrays` (orbax).
        arrays: JAX arrays, typed keys among them, in any tree, on any mesh of this process.
        facts: a dictionary that survives a round trip through JSON.

    Raises:
        ValueError: if `facts` are not JSON, or two leaves have the same name.
        TypeError: if a leaf is not a JAX array, or is weakly typed, which could not be restored.
        OSError: if the files cannot be written.
    """
    leaves = _checked_leaves(arrays)
    _write_texts(directory, leaves, facts)
    with _plain_errors():
        write = _begin_arrays(directory, leaves)
        write()
        _finalize_arrays(directory)
    write_manifest(directory)


def _write_texts(
    directory: Path, leaves: Mapping[str, jax.Array], facts: Mapping[str, Any]
) -> None:
    """Write the facts and what describes the leaves, and make the directory of their arrays."""
    (directory / _FACTS).write_text(_to_json(facts), encoding="utf-8")
    described = {name: _describe(leaf) for name, leaf in leaves.items()}
    (directory / LEAVES).write_text(json.dumps(described, indent=1), encoding="utf-8")
    if any(leaf.size for leaf in leaves.values()):
        (directory / _ARRAYS).mkdir()


@contextmanager
def _names_step(step: int, target: Path) -> Iterator[None]:
    """Name the step in OSErrors."""
    try:
        yield
    except OSError as error:
        reason = f"step {step} was not saved: {error.strerror}"
        raise OSError(error.errno, reason, str(target)) from error


def read_checkpoint(
    directory: Path,
    like: PyTree[Any],
    *,
    check: Callable[[dict[str, Any]], None] = lambda facts: None,
) -> tuple[PyTree[jax.Array], dict[str, Any]]:
    """Read what `write_checkpoint` wrote; verify its files with `find_fault` first.

    The arrays are placed as those in `like`, arrays or `jax.ShapeDtypeStruct`s, and uncommitted
    where those are. `check` is called with the facts before, and may raise to refuse them.

    Raises:
        ValueError: if names or shapes differ from those written.
        TypeError: if a dtype differs; nothing is cast.
    """
    facts = read_facts(directory)
    check(facts)
    saved = json.loads((directory / LEAVES).read_text(encoding="utf-8"))
    leaves = _name(like)
    _check(saved, leaves, directory)
    targets = {name: _target(leaf) for name, leaf in leaves.items() if np.prod(leaf.shape)}
    stored: dict[str, Any] = {}
    if targets:
        import orbax.checkpoint as ocp
        from etils import epath  # comes with orbax

        with _plain_errors():
            stored = ocp.StandardCheckpointHandler().restore(
                epath.Path(directory.resolve() / _ARRAYS), args=ocp.args.StandardRestore(targets)
            )
    placed = [_place(stored.get(name), leaf) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(like), placed), facts


def read_facts(directory: Path) -> dict[str, Any]:
    """Read the facts that `write_checkpoint` wrote."""
    return json.loads((directory / _FACTS).read_text(encoding="utf-8"))


# The state of training beside the weights that it belongs to, in a folder of their directory.

_STATE = "training_state"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def write_with_state(
    directory: Path,
    write_weights: Callable[[Path], None],
    arrays: PyTree[jax.Array] | None,
    facts: Mapping[str, Any],
) -> None:
    """Write weights and the state of their training, and replace the directory at once.

    If the writing fails or is interrupted, the older weights and their state are unchanged. Other
    files in the directory stay. `write_weights` makes the directory that it is passed. Without
    `arrays` there is no state, and that of the older weights is deleted.

    Raises:
        ValueError: if the directory cannot be replaced, or holds an adapter where a checkpoint is
            written or the reverse; or as `write_checkpoint`.
        OSError: if the files cannot be written; the directory is then unchanged.
    """
    check_target(directory)
    with replace_directory(directory) as fresh:
        if directory.exists():
            older = shutil.ignore_patterns(*_WEIGHTS, _STATE)
            shutil.copytree(directory, fresh, dirs_exist_ok=True, ignore=older)
        weights = fresh / ".weights"
        write_weights(weights)
        for written, other in ((CONFIG, ADAPTER_CONFIG), (ADAPTER_CONFIG, CONFIG)):
            if (weights / written).exists() and (directory / other).exists():
                raise ValueError(
                    f"directory must not hold both a checkpoint and an adapter, which transformers "
                    f"would load together, got {other} in {directory}"
                )
        for path in weights.iterdir():
            path.replace(fresh / path.name)
        weights.rmdir()
        if arrays is not None:
            (fresh / _STATE).mkdir()
            write_checkpoint(fresh / _STATE, arrays, facts)


def find_state(directory: Path, written_by: str) -> Path:
    """Return the folder of `write_with_state`, for `read_checkpoint`, once its files are verified.

    Raises:
        ValueError: if there is none, with `written_by` as what writes one, or a file is damaged.
    """
    state = directory / _STATE
    if not has_state(directory):
        raise ValueError(f"{directory} must hold {_STATE}, got none: {written_by} writes it")
    fault = find_fault(state)
    if fault is not None:
        raise ValueError(f"{state} must be complete: {fault}")
    return state


def has_state(directory: Path) -> bool:
    """Whether a directory of weights has a folder of `write_with_state`."""
    return (directory / _STATE).is_dir()


class Restored(NamedTuple):
    """What a checkpoint holds."""

    step: int
    arrays: PyTree[jax.Array]
    facts: dict[str, Any]


class _Pending:
    """A save in the background.

    With several processes each writes its shards; when all have, process 0 does the rest.
    """

    def __init__(
        self,
        step: int,
        target: Path,
        partial_directory: Path,
        write: Callable[[], None],
        replace: ExitStack,
    ) -> None:
        self.label, self.step = f"saving step {step}", step
        self._target, self._partial = target, partial_directory
        self._write, self._replace = write, replace
        self._next: Callable[[], None] | None = self._finalize if hosts.several() else None
        self._running = self._start(self._write_shards)

    def is_done(self) -> bool:
        """Whether this process has finished its current part."""
        return self._running.done()

    def advance(self) -> bool:
        """Wait until all processes have finished a part; start the next, or return False."""
        try:
            hosts.together(self.label, self._running.result)
        except BaseException:
            with self._replace:  # removes what was written
                raise
        if self._next is None:
            return False
        self._running, self._next = self._start(self._next), None
        return True

    def _start(self, work: Callable[[], None]) -> "Future[None]":
        def named() -> None:
            with _names_step(self.step, self._target), _plain_errors():
                work()

        thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        try:
            return thread.submit(named)
        finally:
            thread.shutdown(wait=False)

    def _write_shards(self) -> None:
        self._write()
        if not hosts.several():
            self._finalize()

    def _finalize(self) -> None:
        if hosts.is_first():
            _finalize_arrays(self._partial)
            write_manifest(self._partial)
            self._replace.close()


class RunCheckpoints:
    """The checkpoints of one run, of which the newest are kept.

    Each is a directory, `step_00000040`, with the arrays (orbax), `leaves.json` (their names,
    shapes and dtypes), `facts.json`, and `manifest.json` (size and SHA-256 of every other file). It
    is written to a temporary directory, flushed to disk, and renamed: a process that is killed at
    any time leaves complete checkpoints, and a temporary directory that the next save removes. One
    run at a time may save to a directory. If it has several processes, all of them call `save` and
    `restore`: each writes and reads the shards of its devices, and process 0 does the rest.

    Args:
        directory: of the checkpoints; created by the first save.
        keep: how many to keep, at least 1. Older ones are deleted once a newer one is complete.

    Raises:
        ImportError: if orbax-checkpoint is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3) -> None:
        require("orbax", "training")
        self.directory = Path(directory).absolute()
        self.keep = keep
        self._current: int | None = None  # the step that this run last saved or restored
        self._pending: _Pending | None = None  # the save in the background

    def path(self, step: int) -> Path:
        """The directory of a step; it may not exist."""
        return self.directory / f"step_{step:08d}"

    def steps(self) -> list[int]:
        """The saved steps, oldest first; `restore` verifies their files."""
        if not self.directory.is_dir():
            return []
        matches = ((_STEP.fullmatch(path.name), path) for path in self.directory.iterdir())
        return sorted(int(match.group(1)) for match, path in matches if match and path.is_dir())

    def save(
        self,
        step: int,
        arrays: PyTree[jax.Array],
        facts: Mapping[str, Any],
        *,
        wait: bool = True,
    ) -> Path:
        """Save a step.

        Saving a step again replaces it. After `restore` of an earlier step, saving continues from
        there, and later steps are deleted once the new one is complete. Without `restore`, the
        first step to save must be after the newest in the directory.

        Args:
            step: how many steps of the run are done.
            arrays: JAX arrays, typed keys among them, in any tree.
            facts: a dictionary that survives a round trip through JSON.
            wait: False returns as soon as the arrays are copied to the host, and may be donated.
                `steps` lists the step when it is written. Call `poll` now and then, and `finish` at
                the end: like the next `save`, they raise the error of a save that has failed. With
                several processes, a save is completed only by these calls.

        Returns:
            The checkpoint's directory.

        Raises:
            ValueError: if `step` is negative or before the run's last one, or `facts` are not JSON.
            TypeError: if a leaf is not a JAX array, or is weakly typed.
            OSError: if it cannot be written (disk full, say); earlier steps stay intact.
        """
        self.finish()
        call, target = f"saving step {step}", self.path(step)
        hosts.together(call, lambda: self._check_save(step, facts))
        with ExitStack() as stack:

            def begin() -> str:
                with _names_step(step, target):
                    self.directory.mkdir(parents=True, exist_ok=True)
                    remove_remains(self.directory, _STEP.pattern)
                    fresh = stack.enter_context(replace_directory(target))
                    _write_texts(fresh, leaves, facts)
                    return str(fresh)

            leaves = _checked_leaves(arrays)
            fresh = Path(hosts.first_decides(call, begin))
            with _names_step(step, target), _plain_errors():
                write = hosts.agreed(call, partial(_begin_arrays, fresh, leaves))
            self._pending = _Pending(step, target, fresh, write, stack.pop_all())
        if wait:
            self.finish()
        return target

    def poll(self) -> None:
        """Advance a save in the background without waiting for it; raise its error.

        All processes must call this at the same point.
        """
        while self._pending and all(hosts.share(self._pending.label, self._pending.is_done)):
            self._advance()

    def finish(self) -> None:
        """Wait until the last save is complete; all processes must call this at the same point.

        Raises:
            OSError: if it could not be written; earlier steps stay intact.
        """
        while self._pending:
            self._advance()

    def _advance(self) -> None:
        pending, self._pending = self._pending, None
        assert pending is not None
        if pending.advance():
            self._pending = pending
            return
        self._current = pending.step
        if hosts.is_first():
            self._remove_others(pending.step)

    def restore(
        self,
        like: PyTree[Any],
        *,
        step: int | None = None,
        check: Callable[[dict[str, Any]], None] = lambda facts: None,
    ) -> Restored:
        """Restore the newest intact checkpoint, or that of one step.

        All files are verified against the manifest first. A corrupt checkpoint is left in place and
        the one before it is restored; a `UserWarning` names the file. Arrays are byte for byte
        those that were saved; `like` and `check` are those of `read_checkpoint`.

        Raises:
            FileNotFoundError: if there is no intact checkpoint.
            ValueError: if `step` was not saved or is corrupt, or a name or shape differs.
            TypeError: if a dtype differs.
        """
        saved = hosts.first_decides("looking for checkpoints", self.steps)
        if step is not None and step not in saved:
            raise ValueError(f"step must be one of those in {self.directory}, {saved}, got {step}")
        for candidate in [step] if step is not None else reversed(saved):
            directory = self.path(candidate)
            fault = hosts.first_decides("reading a checkpoint", partial(find_fault, directory))
            if fault is None:
                arrays, facts = hosts.agreed(
                    "reading a checkpoint",
                    partial(read_checkpoint, directory, like, check=check),
                )
                self._current = candidate
                return Restored(candidate, arrays, facts)
            if step is not None:
                raise ValueError(f"step must have an intact checkpoint, got {step}: {fault}")
            message = f"the checkpoint of step {candidate} is skipped: {fault}"
            if hosts.is_first():
                warnings.warn(message, UserWarning, stacklevel=2)
        raise FileNotFoundError(f"directory must hold an intact checkpoint, got {self.directory}")

    def _check_save(self, step: int, facts: Mapping[str, Any]) -> None:
        """Fail before anything is written."""
        steps = self.steps() if hosts.is_first() else []
        if self._current is None and steps and step <= steps[-1]:
            raise ValueError(
                f"step must be after {steps[-1]}, the newest in {self.directory}, got {step}: "
                "restore the step to continue from, or use another directory"
            )
        if step < (self._current or 0):
            raise ValueError(f"step must be at least {self._current or 0}, got {step}")
        _to_json(facts)

    def _remove_others(self, step: int) -> None:
        """Delete later and old steps; renamed first, so that no step is ever incomplete."""
        others = self.steps()
        kept = [other for other in others if other <= step][-self.keep :]
        for other in set(others) - set(kept):
            path = self.path(other)
            renamed = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
            shutil.rmtree(path.rename(renamed), ignore_errors=True)


def _to_json(facts: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(facts, indent=1, allow_nan=False)
        is_same = json.loads(text) == facts
    except (TypeError, ValueError) as error:
        raise ValueError(f"facts must be JSON, got {facts!r}: {error}") from error
    if not is_same:
        raise ValueError(f"facts must survive a round trip through JSON, got {facts!r}")
    return text
