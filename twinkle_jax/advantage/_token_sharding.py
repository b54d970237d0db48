"""Run a function of token arrays on meshes with explicit axes as on meshes with automatic ones."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from twinkle_jax.advantage._sharding import Core, Result, explicit_axes


def sharded_like_first(core: Core[Result]) -> Callable[..., Result]:
    """Decorate `core(first, *arrays, **static)`, whose results have the shape of `first`."""

    @functools.wraps(core)
    def wrapped(first: jax.Array, *arrays: Any, **static: Any) -> Result:
        mesh, axes = explicit_axes((first, *arrays))
        if not axes:
            return core(first, *arrays, **static)
        spec = getattr(jax.typeof(first).sharding, "spec", PartitionSpec())
        run: Core[Result] = jax.sharding.auto_axes(
            functools.partial(core, **static),
            axes=axes,
            out_sharding=NamedSharding(mesh, PartitionSpec(*spec)),
        )
        return run(first, *arrays)

    return wrapped
