"""Where everything is while a decoder runs on a mesh: rows stay, parameters come to them.

Rows are spread over data and fsdp from the embedding to the loss. What `sharding.py` has spread
over fsdp is cast to the compute type and gathered right before it is used, layer by layer, and its
gradient is summed and scattered where it arises. What is split over tensor stays split. Without
these words the compiler may as well leave parameters where they are and move activations.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.gather_steps import gather_in_steps, steps_of
from twinkle_jax.model.decoder.sharding import partition_rules

ROWS = ("data", "fsdp")


def fits(mesh: Mesh, config: DecoderConfig, rows: int) -> bool:
    """Say whether a mesh divides rows and key-value heads."""
    devices, tensor = mesh.shape["data"] * mesh.shape["fsdp"], mesh.shape["tensor"]
    return not rows % devices and not config.attention.key_value_heads % tensor


def check_fit(mesh: Mesh | None, config: DecoderConfig, rows: int) -> None:
    """Refuse rows and heads that a mesh does not divide, and say what would fit."""
    if mesh is None:
        return
    devices, tensor = mesh.shape["data"] * mesh.shape["fsdp"], mesh.shape["tensor"]
    if rows % devices:
        raise ValueError(
            f"batch must have a multiple of {devices} rows, data times fsdp of the mesh, got {rows}"
        )
    heads = config.attention.key_value_heads
    if heads % tensor:
        fit = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(
            f"mesh must have a tensor axis that divides the {heads} key-value heads, one of {fit}, "
            f"got {tensor}"
        )


def spread_batch(batch: Any, config: DecoderConfig, mesh: Mesh | None) -> Any:
    """Spread the rows of all arrays of a batch over data and fsdp."""
    if mesh is None:
        return batch
    rows, time = batch.tokens.shape
    check_fit(mesh, config, rows)
    if time % mesh.shape["tensor"]:
        raise ValueError(
            f"batch must have rows whose length is a multiple of {mesh.shape['tensor']}, the "
            f"tensor axis of the mesh, got {time}"
        )
    return jax.tree.map(lambda x: keep_rows(x, mesh), batch)


def keep_rows(x: Array, mesh: Mesh | None) -> Array:
    """Keep rows, or the tokens of rows, spread over data and fsdp, and whole along tensor."""
    return x if mesh is None else _put(x, mesh, ROWS)


def gather_weights(
    weights: Mapping[str, Any], dtype: DTypeLike, mesh: Mesh | None
) -> Mapping[str, Any]:
    """Cast the parameters of a layer that are spread over fsdp, and gather them."""
    if mesh is None:
        return weights
    rule = partition_rules(mesh)

    def gather(path: Any, leaf: Array) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spread = PartitionSpec(*rule(name, (1, *leaf.shape))[1:])
        if "fsdp" not in spread:
            return leaf
        whole = PartitionSpec(*(None if axis == "fsdp" else axis for axis in spread))
        shardings = NamedSharding(mesh, spread), NamedSharding(mesh, whole)
        return _gather(leaf.astype(dtype), *shardings)

    gathered: Mapping[str, Any] = jax.tree_util.tree_map_with_path(gather, weights)
    return gathered


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: Array, spread: NamedSharding, whole: NamedSharding) -> Array:
    """Gather what is spread; its gradient is spread again. A plain constraint would gather both."""
    x = jax.lax.with_sharding_constraint(x, spread)
    steps = steps_of(spread.mesh.shape["fsdp"])
    if steps[1] == 1:
        return jax.lax.with_sharding_constraint(x, whole)
    gather = jax.shard_map(
        partial(gather_in_steps, axis="fsdp", dimension=spread.spec.index("fsdp"), steps=steps),
        mesh=spread.mesh,
        in_specs=spread.spec,
        out_specs=whole.spec,
        check_vma=False,  # what is gathered counts as different along fsdp
    )
    gathered: Array = gather(x)
    return gathered


def _gather_forward(
    x: Array, spread: NamedSharding, whole: NamedSharding
) -> tuple[Array, tuple[()]]:
    return _gather(x, spread, whole), ()


def _gather_backward(
    spread: NamedSharding, whole: NamedSharding, residuals: tuple[()], gradient: Array
) -> tuple[Array]:
    return (jax.lax.with_sharding_constraint(gradient, spread),)


_gather.defvjp(_gather_forward, _gather_backward)


def spread_lookup(
    embedding: Float[Array, "vocab width"],
    tokens: Int[Array, "batch time"],
    mesh: Mesh,
    look_up: Callable[[Array, Array], Array],
) -> Float[Array, "batch time width"]:
    """Look tokens up in an embedding whose columns are spread over fsdp, without gathering it.

    Each device looks up the tokens of all rows of its fsdp group in the columns that it has, and
    sends each row's to where the row is: activations of one layer, instead of the whole table.
    """
    columns = partition_rules(mesh)("embed_tokens/embedding", embedding.shape)[1]
    found = look_up(embedding, _put(tokens, mesh, "data"))
    return keep_rows(_put(found, mesh, "data", None, columns), mesh)


def _put(x: Array, mesh: Mesh, *axes: Any) -> Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))
