"""Tokens that are spread over devices: each device works on its own."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Results = tuple[jax.Array, ...]


def on_token_shards(run: Callable[..., Results], *arrays: Any) -> Results:
    """Call `run(hidden, head, *per_token)` on each device's tokens, where types tell which.

    They do inside `shard_map`, and on a mesh with explicit axes, where `shard_map` is entered and
    what is not sharded as the rows of `hidden` are, the head above all, is gathered first.
    """
    sharding = jax.typeof(arrays[0]).sharding
    kinds = zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True)
    explicit = {name for name, kind in kinds if kind == AxisType.Explicit}
    if not explicit:
        return run(*_each_its_own(arrays))
    axes = sharding.spec[0]

    def gather(array: jax.Array) -> jax.Array:
        first = axes if array is arrays[0] or array.ndim == 1 else None
        spec = PartitionSpec(*[first, None][: array.ndim])
        return jax.sharding.reshard(array, NamedSharding(sharding.mesh, spec))

    arrays = jax.tree.map(gather, arrays)
    return jax.shard_map(
        lambda *shards: run(*_each_its_own(shards)),
        mesh=sharding.mesh,
        out_specs=PartitionSpec(axes),
        axis_names=explicit,
    )(*arrays)


def _each_its_own(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give each device of a `shard_map` its own of what they share; the gradients are summed."""

    def varying(array: jax.Array) -> frozenset[str]:
        axes: frozenset[str] = jax.typeof(array).manual_axis_type.varying
        return axes

    everywhere = frozenset[str]().union(*map(varying, jax.tree.leaves(arrays)))

    def split(array: jax.Array) -> jax.Array:
        missing = tuple(sorted(everywhere - varying(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    own: tuple[Any, ...] = jax.tree.map(split, arrays)
    return own
