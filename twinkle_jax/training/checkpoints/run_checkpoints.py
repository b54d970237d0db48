"""Checkpoints of a run: one directory a step, there as a whole or not at all, checked when read."""

import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from twinkle_jax.data.missing_extra import require
from twinkle_jax.model.huggingface.atomic_directory import remove_remains, replace_directory
from twinkle_jax.training.checkpoints.checkpoint_arrays import read_arrays, write_arrays
from twinkle_jax.training.checkpoints.manifest import find_fault, write_manifest

_STEP = re.compile(r"step_(\d{8,})")
_FACTS = "facts.json"


class Restored(NamedTuple):
    """What a checkpoint holds."""

    step: int
    arrays: PyTree[jax.Array]
    facts: dict[str, Any]


class RunCheckpoints:
    """The checkpoints of one run, the newest few of which are kept.

    Each is a directory, `step_00000040`, with the arrays (orbax), `leaves.json` (their names,
    shapes and dtypes), `facts.json`, and `manifest.json` (size and SHA-256 of every other file). It
    is written beside its place, brought to the disk, and renamed: a process that is killed at any
    moment leaves whole checkpoints, and remains that the next save removes. One process at a time
    may save to a directory.

    Args:
        directory: of the checkpoints; made by the first save.
        keep: how many to keep, at least 1. Older ones go after a newer one is in place.

    Raises:
        ImportError: if orbax-checkpoint is not installed.
        ValueError: if `keep` is less than 1.
        RuntimeError: if JAX runs in several processes, whose arrays are in no one's reach.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3) -> None:
        require("orbax", "training")
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        if jax.process_count() > 1:
            raise RuntimeError(
                f"jax.process_count() must be 1 to save checkpoints, got {jax.process_count()}"
            )
        self.directory = Path(directory).absolute()
        self.keep = keep
        self._current: int | None = None  # the step that this run was last known to be at

    def path(self, step: int) -> Path:
        """The directory of a step, whether it is there or not."""
        return self.directory / f"step_{step:08d}"

    def steps(self) -> list[int]:
        """The steps that are there, oldest first; whether they are whole, `restore` finds out."""
        if not self.directory.is_dir():
            return []
        matches = ((_STEP.fullmatch(path.name), path) for path in self.directory.iterdir())
        return sorted(int(match.group(1)) for match, path in matches if match and path.is_dir())

    def save(self, step: int, arrays: PyTree[jax.Array], facts: Mapping[str, Any]) -> Path:
        """Save a step.

        The same step again replaces what was saved. Where this object has restored an earlier step
        than the newest, saving goes on from there: later steps, which the run has left, are removed
        once the new one is in place. Without that, a step before one that is there is an error.

        Args:
            step: how many updates the arrays have had.
            arrays: JAX arrays, typed keys among them, in any tree.
            facts: anything that JSON gives back as it was.

        Returns:
            The checkpoint's directory.

        Raises:
            ValueError: if `step` is negative or before the run's last one, or `facts` are not JSON.
            TypeError: if a leaf is not a JAX array, or is weakly typed.
            OSError: if it cannot be written, for want of space for one; earlier steps are whole.
        """
        self._check_step(step)
        text = _to_json(facts)
        target = self.path(step)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            remove_remains(self.directory, _STEP.pattern)
            with replace_directory(target) as partial:
                write_arrays(partial, arrays)
                (partial / _FACTS).write_text(text, encoding="utf-8")
                write_manifest(partial)
        except OSError as error:
            reason = f"step {step} was not saved: {error.strerror}"
            raise OSError(error.errno, reason, str(target)) from error
        self._current = step
        self._remove_others(step)
        return target

    def restore(
        self,
        like: PyTree[Any],
        *,
        step: int | None = None,
        check: Callable[[dict[str, Any]], None] = lambda facts: None,
    ) -> Restored:
        """Restore the newest whole checkpoint, or that of one step.

        Each file is compared with the manifest first. A checkpoint that does not agree with it is
        left where it is, and the one before it is taken; a `UserWarning` names the file.

        Args:
            like: arrays, or `jax.ShapeDtypeStruct`s, with the tree, shapes and dtypes of those that
                were saved; they tell the devices too.
            step: None for the newest.
            check: called with the facts before arrays are read; may raise to refuse them.

        Returns:
            The step, the arrays, byte for byte, and the facts.

        Raises:
            FileNotFoundError: if there is no whole checkpoint.
            ValueError: if `step` is not there or not whole, or a name or shape differs.
            TypeError: if a dtype differs.
        """
        there = self.steps()
        if step is not None and step not in there:
            raise ValueError(f"step must be one of those in {self.directory}, {there}, got {step}")
        for candidate in [step] if step is not None else reversed(there):
            directory = self.path(candidate)
            fault = find_fault(directory)
            if fault is None:
                facts = json.loads((directory / _FACTS).read_text(encoding="utf-8"))
                check(facts)
                arrays = read_arrays(directory, like)
                self._current = candidate
                return Restored(candidate, arrays, facts)
            if step is not None:
                raise ValueError(f"step must be one whose files are whole, got {step}: {fault}")
            message = f"the checkpoint of step {candidate} is not used, for {fault}"
            warnings.warn(message, UserWarning, stacklevel=2)
        raise FileNotFoundError(f"directory must hold a whole checkpoint, got {self.directory}")

    def _check_step(self, step: int) -> None:
        newest = max(self.steps(), default=0)
        if self._current is None and self.steps() and step <= newest:
            raise ValueError(
                f"step must be after {newest}, which is in {self.directory}, got {step}: restore "
                "the step to go on from, or name another directory"
            )
        if step < (self._current or 0):
            raise ValueError(f"step must be at least {self._current or 0}, got {step}")

    def _remove_others(self, step: int) -> None:
        """Remove steps that the run has left, and old ones; a rename first, so never in part."""
        others = self.steps()
        kept = [other for other in others if other <= step][-self.keep :]
        for other in set(others) - set(kept):
            path = self.path(other)
            gone = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
            shutil.rmtree(path.rename(gone), ignore_errors=True)


def _to_json(facts: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(facts, indent=1, allow_nan=False)
        same = json.loads(text) == facts
    except (TypeError, ValueError) as error:
        raise ValueError(f"facts must be JSON, got {facts!r}: {error}") from error
    if not same:
        raise ValueError(f"facts must be what JSON gives back as it was, got {facts!r}")
    return text
