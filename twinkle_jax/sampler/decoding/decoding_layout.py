"""Where parameters and rows are while tokens are drawn."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

from twinkle_jax.model.decoder.cache import Cache, DeltaState, KeyValues, map_states
from twinkle_jax.model.decoder.parameters import Params
from twinkle_jax.model.decoder.sharding import partition_rules
from twinkle_jax.sampler.decoding.rows import Rows

_CAST = ("kernel", "bias", "embedding", "lora_A", "lora_B", "lora_scale")  # used in no other type
_ROWS = ("data", "fsdp")


def decoding_layout(params: Params, compute_dtype: DTypeLike | None, mesh: Mesh | None) -> Params:
    """Lay parameters out for many steps: in the compute type, whole along fsdp.

    A training step gathers each parameter when it needs it. Decoding needs all of them for every
    token, so they are gathered once.
    """
    rule = None if mesh is None else partition_rules(mesh)

    def lay_out(path: Any, leaf: Array) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if compute_dtype is not None and name.rpartition("/")[2] in _CAST:
            leaf = leaf.astype(compute_dtype)
        if mesh is None or rule is None:
            return leaf
        spec = PartitionSpec(*(None if axis == "fsdp" else axis for axis in rule(name, leaf.shape)))
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    laid_out: Params = jax.tree_util.tree_map_with_path(lay_out, params)
    return laid_out


def spread_rows(rows: Rows, mesh: Mesh | None) -> Rows:
    """Spread rows over data and fsdp, and the heads of their caches over tensor."""
    if mesh is None:
        return rows

    def spread(x: Array, axis: int = 0, heads: int | None = None) -> Array:
        spec: list[Any] = [None] * x.ndim
        spec[axis] = _ROWS
        if heads is not None and x.shape[heads] % mesh.shape["tensor"] == 0:
            spec[heads] = "tensor"
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))

    def layer(state: KeyValues | DeltaState) -> KeyValues | DeltaState:
        if isinstance(state, KeyValues):
            return KeyValues(*(spread(x, 1, 2) for x in state))
        return DeltaState(spread(state.window, 1), spread(state.memory, 1, 2))

    layers = map_states(layer, rows.cache.layers)
    others = rows._replace(cache=Cache({}, rows.cache.length))
    others = jax.tree.map(spread, others)
    return others._replace(cache=Cache(layers, others.cache.length))
