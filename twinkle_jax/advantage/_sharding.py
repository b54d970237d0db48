"""Run a function of rewards on meshes with explicit axes as on meshes with automatic ones.

On a mesh with explicit axes (what `jax.make_mesh` makes by default) every operation must know how
its result is sharded, and a reshape or a scatter across shards is refused. Groups and segments may
straddle shards, so the core runs under `jax.sharding.auto_axes`, where the compiler decides, and
hands its result back sharded as the caller's rewards are.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Result = TypeVar("Result")
Core = Callable[..., Result]


def one_per_sample(rewards: jax.Array, **static: Any) -> int:
    """Size of a result with an entry for every reward, `[N]`."""
    del static
    return rewards.shape[0]


def auto_sharded(result_size: Callable[..., int]) -> Callable[[Core[Result]], Core[Result]]:
    """Decorate `core(rewards, *arrays, **static)`, whose results all have `result_size` entries."""

    def decorate(core: Core[Result]) -> Core[Result]:
        @functools.wraps(core)
        def wrapped(rewards: jax.Array, *arrays: Any, **static: Any) -> Result:
            mesh, axes = explicit_axes((rewards, *arrays))
            if not axes:
                return core(rewards, *arrays, **static)
            spec = _spec(rewards, mesh, result_size(rewards, **static))
            run: Core[Result] = jax.sharding.auto_axes(
                functools.partial(core, **static),
                axes=axes,
                out_sharding=NamedSharding(mesh, spec),
            )
            return run(rewards, *arrays)

        return wrapped

    return decorate


def explicit_axes(arrays: tuple[Any, ...]) -> tuple[Any, tuple[str, ...]]:
    """Find the mesh with explicit axes that some argument lives on."""
    for array in jax.tree.leaves(arrays):
        mesh = getattr(jax.typeof(array).sharding, "mesh", None)
        if mesh is None or mesh.empty:
            continue
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        axes = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
        if axes:
            return mesh, axes
    return None, ()


def _spec(rewards: jax.Array, mesh: Any, size: int) -> PartitionSpec:
    """Shard results as the samples are, or not at all where they don't divide evenly."""
    axes = tuple(getattr(jax.typeof(rewards).sharding, "spec", ()))[:1]
    names = jax.tree.leaves(axes)
    shards = math.prod(mesh.shape[name] for name in names)
    return PartitionSpec(*axes) if size % shards == 0 else PartitionSpec()
