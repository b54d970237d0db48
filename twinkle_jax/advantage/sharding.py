"""Run a function of arrays on meshes with explicit axes as on meshes with automatic ones.

On a mesh with explicit axes (what `jax.make_mesh` makes by default) every operation must know how
its result is sharded, and a reshape or a scatter across shards raises. Groups and segments may
straddle shards, so estimators run under `jax.sharding.auto_axes`, where the compiler decides, and
their result is sharded as the rewards are.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Result = TypeVar("Result")
Core = Callable[..., Result]
Shape = tuple[int, ...]


def like_first(first: jax.Array, **static: Any) -> Shape:
    """Return the shape of a result that has that of the first argument."""
    del static
    return first.shape


def auto_sharded(result_shape: Callable[..., Shape]) -> Callable[[Core[Result]], Core[Result]]:
    """Decorate `core(first, *arrays, **static)`, whose results all have `result_shape`.

    Results are sharded as `first`, or as the first of the arrays that it holds.
    """

    def decorate(core: Core[Result]) -> Core[Result]:
        @functools.wraps(core)
        def wrapped(first: Any, *arrays: Any, **static: Any) -> Result:
            mesh, axes = _explicit_axes((first, *arrays))
            if not axes:
                return core(first, *arrays, **static)
            spec = _spec(jax.tree.leaves(first)[0], mesh, result_shape(first, **static))
            run: Core[Result] = jax.sharding.auto_axes(
                functools.partial(core, **static),
                axes=axes,
                out_sharding=NamedSharding(mesh, spec),
            )
            return run(first, *arrays)

        return wrapped

    return decorate


def _explicit_axes(arrays: tuple[Any, ...]) -> tuple[Any, tuple[str, ...]]:
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


def _spec(first: jax.Array, mesh: Any, shape: Shape) -> PartitionSpec:
    """Shard results as `first` is, or not at all where they don't divide evenly."""
    spec = tuple(getattr(jax.typeof(first).sharding, "spec", ()))[: len(shape)]
    for size, names in zip(shape, spec, strict=False):
        if size % math.prod(mesh.shape[name] for name in jax.tree.leaves(names)):
            return PartitionSpec()
    return PartitionSpec(*spec)
