"""What a run goes on with besides its weights: `training_state.safetensors`, `trainer_state.json`.

Optimizer state, accumulated gradients, counters and the key of dropout's noise; no pickles.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from twinkle_jax.model.huggingface.atomic_directory import check_target, replace_directory
from twinkle_jax.model.huggingface.checkpoint_files import import_safetensors, inside, read_json

ARRAYS, COUNTERS = "training_state.safetensors", "trainer_state.json"
_VERSION = 1
_ARRAY_FILES = re.compile(
    r"(model(-\d+-of-\d+)?|adapter_model|training_state)\.safetensors(\.index\.json)?"
)


def write_with_training_state(
    target: Path, write_weights: Callable[[Path], None], state: Any, counters: dict[str, Any]
) -> None:
    """Write weights and what belongs to them as one directory, put in its place in one step.

    Args:
        target: the directory; other files in it stay.
        write_weights: writes the checkpoint or the adapter into a directory.
        state: a pytree of arrays.
        counters: numbers and strings.
    """
    safetensors = import_safetensors()
    check_target(target)
    others = sorted(target.iterdir()) if target.exists() else []
    for path in others:
        if path.is_dir():
            raise ValueError(f"{target} must be without directories, got {path.name!r} in it")
    with replace_directory(target) as fresh:
        weights = fresh / "weights"
        write_weights(weights)
        for path in weights.iterdir():
            path.rename(fresh / path.name)
        weights.rmdir()
        leaves = jax.tree_util.tree_leaves_with_path(state)
        arrays = {_name(path): np.asarray(x, order="C") for path, x in leaves}
        safetensors.numpy.save_file(arrays, fresh / ARRAYS)
        text = json.dumps({"checkpoint_version": _VERSION, **counters}, indent=2, sort_keys=True)
        (fresh / COUNTERS).write_text(text + "\n", encoding="utf-8")
        for path in others:
            if not (fresh / path.name).exists() and not _ARRAY_FILES.fullmatch(path.name):
                shutil.copy2(path, fresh / path.name)


def remove_training_state(target: Path) -> None:
    """Remove what belongs to older weights, before new ones are written without it."""
    for name in (COUNTERS, ARRAYS):
        (target / name).unlink(missing_ok=True)


def read_counters(directory: Path) -> dict[str, Any]:
    """Read the counters of a run, and refuse a version that is not known."""
    if not (directory / COUNTERS).exists():
        raise ValueError(
            f"{directory} must hold {COUNTERS}, got none: save(…, save_optimizer=True) writes it"
        )
    counters = read_json(directory, COUNTERS)
    if counters.get("checkpoint_version") != _VERSION:
        raise ValueError(
            f"checkpoint_version must be {_VERSION}, got {counters.get('checkpoint_version')!r}"
        )
    return counters


def read_training_state(directory: Path, like: Any) -> Any:
    """Read arrays, one at a time, in the form, the types and the places of a state.

    Args:
        directory: of the checkpoint.
        like: a pytree of arrays, or of shapes with shardings.

    Raises:
        ValueError: if names, shapes or types differ: it was saved with another optimizer.
    """
    safetensors = import_safetensors()
    wanted = {_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(like)}
    try:
        with safetensors.safe_open(inside(directory, ARRAYS), framework="np") as file:
            strangers = sorted(set(file.keys()) ^ wanted.keys())
            if strangers:
                raise ValueError(
                    f"{directory} must be of a run with this optimizer, got {strangers[0]!r}, "
                    "which only one of them has"
                )
            leaves = [_placed(name, file.get_tensor(name), x) for name, x in wanted.items()]
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{directory / ARRAYS} must be whole, got: {error}") from None
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _placed(name: str, found: np.ndarray, like: Any) -> jax.Array:
    if found.shape != like.shape or found.dtype != like.dtype:
        raise ValueError(
            f"{name} must be {like.dtype}{list(like.shape)}, got {found.dtype}{list(found.shape)}"
        )
    return jax.device_put(found, like.sharding)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
