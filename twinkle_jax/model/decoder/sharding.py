"""Where parameters live on a mesh with the axes data, fsdp and tensor: one table of names.

Rows of a batch are spread over data and fsdp. Parameters, their gradients and the optimizer's
state are spread over fsdp and tensor as the first matching rule says. Inside a layer the leading
axis counts stacked layers, which is never split.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
RULES: tuple[tuple[str, PartitionSpec], ...] = (
    # Projections that split their outputs into heads or feed-forward columns.
    (
        r"/(q_proj|k_proj|v_proj|gate_proj|up_proj|in_proj_\w+)/kernel$",
        PartitionSpec(None, "fsdp", "tensor"),
    ),
    (r"/(q_proj|k_proj|v_proj)/bias$", PartitionSpec(None, "tensor")),
    # Projections back to the residual stream, which sum over what the others have split.
    (r"/(o_proj|down_proj|out_proj)/kernel$", PartitionSpec(None, "tensor", "fsdp")),
    (r"/conv1d/kernel$", PartitionSpec(None, None, "tensor")),
    # Adapters: the narrow side is never split.
    (r"/lora_A$", PartitionSpec(None, "fsdp", None)),
    (r"/lora_B$", PartitionSpec(None, None, "fsdp")),
    (r"embed_tokens/embedding$", PartitionSpec("tensor", "fsdp")),
    (r"lm_head/kernel$", PartitionSpec("fsdp", "tensor")),
    # Norms, decay rates, counters: every device has them.
    (r"", PartitionSpec()),
)


def make_mesh(*, data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """Arrange the first devices in a mesh that models run on.

    Args:
        data: copies of the parameters, each with its share of the rows.
        fsdp: over how many devices parameters are spread, with the rows.
        tensor: over how many devices heads and feed-forward columns are spread.

    Returns:
        A mesh with automatic axes named data, fsdp and tensor.

    Example:
        >>> make_mesh().shape_tuple
        (('data', 1), ('fsdp', 1), ('tensor', 1))
    """
    shape = (data, fsdp, tensor)
    devices = jax.devices()[: data * fsdp * tensor]
    return jax.make_mesh(shape, AXES, (AxisType.Auto,) * 3, devices=devices)


def partition_rules(mesh: Mesh) -> Callable[[str, tuple[int, ...]], PartitionSpec]:
    """Give the rule for a mesh, from a parameter's name and shape to its `PartitionSpec`.

    Args:
        mesh: one with the automatic axes data, fsdp and tensor.

    Returns:
        What `load_pretrained(partition=…)` takes. An axis of the mesh that does not divide its
        dimension is left out: the parameter is then whole on all devices along it.

    Raises:
        ValueError: if the axes have other names, or are not automatic.

    Example:
        >>> rule = partition_rules(make_mesh())
        >>> tuple(rule("layers/0/mlp/up_proj/kernel", (2, 32, 48)))
        (None, 'fsdp', 'tensor')
    """
    check_mesh(mesh)

    def rule(name: str, shape: tuple[int, ...]) -> PartitionSpec:
        spec = next(spec for pattern, spec in RULES if re.search(pattern, name))
        return PartitionSpec(
            *(
                axis if axis is None or size % mesh.shape[axis] == 0 else None
                for axis, size in zip(spec, shape, strict=False)
            )
        )

    return rule


def check_mesh(mesh: Mesh) -> None:
    """Refuse a mesh that the rules do not know."""
    if set(mesh.axis_names) != set(AXES):
        raise ValueError(f"mesh must have the axes {AXES}, got {mesh.axis_names}")
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            "mesh must have automatic axes, as make_mesh of this package gives it, "
            f"got {mesh.axis_types}"
        )


def find_mesh(mesh: Mesh | None, tree: Any) -> Mesh | None:
    """Take the mesh that was named, or the one that arrays laid out by the rules live on.

    Arrays that are traced do not tell: inside a compiled function the mesh must be named.
    """
    if mesh is not None:
        check_mesh(mesh)
        return mesh
    for leaf in jax.tree.leaves(tree):
        sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            found = sharding.mesh
            ours = set(found.axis_names) == set(AXES)
            if ours and all(kind == AxisType.Auto for kind in found.axis_types):
                return found
    return None


def shard_like_params(tree: Any, mesh: Mesh) -> Any:
    """Give the sharding of each leaf of a tree that holds parameters, or arrays named like them.

    Args:
        tree: parameters, gradients, an optimizer's state or a whole `TrainState`, of arrays or of
            shapes: leaves are found by the end of their path.
        mesh: one with the automatic axes data, fsdp and tensor.

    Returns:
        The same tree with a `NamedSharding` for each leaf.
    """
    rule = partition_rules(mesh)

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, rule(name, leaf.shape))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def constrain(tree: Any, mesh: Mesh | None) -> Any:
    """Keep a tree of parameters where the rules put it, inside a compiled function."""
    if mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, shard_like_params(tree, mesh))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Spread rows over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
