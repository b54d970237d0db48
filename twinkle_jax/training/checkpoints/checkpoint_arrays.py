"""Arrays of a training state in files and back, exactly: byte for byte, or an error."""

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

LEAVES = "leaves.json"
_ARRAYS = "arrays"


def write_arrays(directory: Path, arrays: PyTree[jax.Array]) -> None:
    """Write the leaves of a tree, and a list of their names, shapes and dtypes.

    Args:
        directory: where `leaves.json` and the directory `arrays` (orbax) are to be.
        arrays: JAX arrays, typed keys among them, in any tree, on any mesh of this process.

    Raises:
        TypeError: if a leaf is no JAX array, or is weakly typed, which could not be restored.
        ValueError: if two leaves have the same name.
        OSError: if the files cannot be written.
    """
    leaves = _name(arrays)
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array):
            raise TypeError(f"arrays must have JAX arrays as leaves, got {type(leaf)} at {name}")
        if getattr(leaf, "weak_type", False):  # keys have no such thing
            raise TypeError(
                f"arrays must have leaves with a dtype of their own, got one at {name} "
                "that is weakly typed: make it with jnp.asarray(value, dtype)"
            )
    described = {name: _describe(leaf) for name, leaf in leaves.items()}
    (directory / LEAVES).write_text(json.dumps(described, indent=1), encoding="utf-8")
    stored = {name: _bits(leaf) for name, leaf in leaves.items() if leaf.size}
    if stored:
        import orbax.checkpoint as ocp

        with _plain_errors(), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
            writer.save(directory.resolve() / _ARRAYS, args=ocp.args.StandardSave(stored))


def read_arrays(directory: Path, like: PyTree[Any]) -> PyTree[jax.Array]:
    """Read what `write_arrays` has written.

    Args:
        directory: the same.
        like: arrays, or `jax.ShapeDtypeStruct`s, with the same tree, shapes and dtypes.

    Returns:
        The arrays, each on the devices on which `like` has it; uncommitted where it is uncommitted.

    Raises:
        ValueError: if names or shapes differ from those written.
        TypeError: if a dtype differs; nothing is cast.
    """
    saved = json.loads((directory / LEAVES).read_text(encoding="utf-8"))
    leaves = _name(like)
    _check(saved, leaves, directory)
    targets = {name: _target(leaf) for name, leaf in leaves.items() if np.prod(leaf.shape)}
    stored: dict[str, Any] = {}
    if targets:
        import orbax.checkpoint as ocp

        with _plain_errors(), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
            restore = ocp.args.StandardRestore(targets)
            stored = reader.restore(directory.resolve() / _ARRAYS, args=restore)
    placed = [_place(stored.get(name), leaf) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(like), placed)


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
            here, there = _describe(leaf)[what], saved[name][what]
            if here != there:
                raise error(f"like must have {name} with the {what} that {directory} has, {there}, "
                            f"got {here}")  # fmt: skip


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """Give where a leaf must be; None if it may be anywhere."""
    return leaf.sharding if getattr(leaf, "committed", True) else None


def _target(leaf: Any) -> Any:
    """Describe for orbax: on the host where the devices are not told, or keys are to be made."""
    if _is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    elif _sharding(leaf) is not None:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return np.empty(leaf.shape, leaf.dtype)


def _place(stored: Any, leaf: Any) -> jax.Array:
    if stored is None:  # orbax does not write arrays without elements
        stored = np.empty(
            jax.eval_shape(_bits, leaf).shape, np.uint32 if _is_key(leaf) else leaf.dtype
        )
    if isinstance(stored, jax.Array):
        return stored
    array = jnp.asarray(stored)
    if _is_key(leaf):
        array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(jnp.empty((), leaf.dtype)))
    sharding = _sharding(leaf)
    return array if sharding is None else jax.device_put(array, sharding)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Turn what tensorstore says of the system into an OSError, without pages of tracebacks."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except ValueError as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        number = int(code.group(1))
        raise OSError(number, os.strerror(number)) from error
    finally:
        logger.setLevel(level)
