"""Where parameters and rows live on a mesh with the axes data, fsdp and tensor.

Rows of a batch are spread over data and fsdp, from the embedding to the loss. Parameters, their
gradients and the optimizer's state are spread over fsdp and tensor, as the first matching rule of
one table says. What is spread over fsdp is cast to the compute type and gathered right before it is
used, layer by layer, and its gradient is summed and scattered where it arises. What is split over
tensor stays split. Without these constraints the compiler may as well leave parameters where they
are and move activations.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from twinkle_jax.model.decoder.config import DecoderConfig

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")  # axes that rows of a batch are spread over
RULES: tuple[tuple[str, PartitionSpec], ...] = (
    # The leading axis of a layer's leaf counts stacked layers, and is never split.
    # Experts are split as wholes.
    (r"/experts/gate_up_proj/kernel$", PartitionSpec(None, "tensor", "fsdp", None)),
    (r"/experts/down_proj/kernel$", PartitionSpec(None, "tensor", None, "fsdp")),
    (r"/experts/\w+/bias$", PartitionSpec(None, "tensor", None)),
    (
        r"/(gate|shared_expert_gate|router(/proj)?)/kernel$",
        PartitionSpec(None, "fsdp", None),
    ),  # routers
    (r"/(q_a_proj|kv_a_proj_with_mqa)/kernel$", PartitionSpec(None, "fsdp", None)),
    # Projections that split their outputs into heads or feed-forward columns.
    (
        r"/(q_proj|k_proj|v_proj|q_b_proj|kv_b_proj|gate_proj|up_proj|in_proj_\w+)/kernel$",
        PartitionSpec(None, "fsdp", "tensor"),
    ),
    (r"/((q_proj|k_proj|v_proj)/bias|sinks)$", PartitionSpec(None, "tensor")),
    # Projections back to the residual stream, which sum over what the others have split.
    (r"/(o_proj|down_proj|out_proj)/kernel$", PartitionSpec(None, "tensor", "fsdp")),
    (r"/conv1d/kernel$", PartitionSpec(None, None, "tensor")),
    # Adapters: the narrow side is never split.
    (r"per_layer_model_projection/lora_A$", PartitionSpec("fsdp", None)),
    (r"per_layer_model_projection/lora_B$", PartitionSpec(None, "fsdp")),
    (r"/lora_A$", PartitionSpec(None, "fsdp", None)),
    (r"/lora_B$", PartitionSpec(None, None, "fsdp")),
    (r"/per_layer_input_gate/kernel$", PartitionSpec(None, "fsdp", None)),
    (r"/per_layer_projection/kernel$", PartitionSpec(None, None, "fsdp")),
    (r"per_layer_model_projection/kernel$", PartitionSpec("fsdp", "tensor")),
    (r"embed_tokens(_per_layer)?/embedding$", PartitionSpec("tensor", "fsdp")),
    (r"lm_head/kernel$", PartitionSpec("fsdp", "tensor")),
    # Norms, decay rates, counters: every device has them.
    (r"", PartitionSpec()),
)


def make_mesh(
    *,
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Arrange devices in a mesh that models run on.

    Args:
        data: copies of the parameters, each with its share of the rows.
        fsdp: over how many devices parameters are spread, with the rows.
        tensor: over how many devices heads and feed-forward columns are spread.
        devices: to arrange, the first ones of these; None for all that JAX has.

    Returns:
        A mesh with automatic axes named data, fsdp and tensor.

    Raises:
        ValueError: if a size is not a positive int, or there are too few devices.

    Example:
        >>> make_mesh().shape_tuple
        (('data', 1), ('fsdp', 1), ('tensor', 1))
    """
    shape = (data, fsdp, tensor)
    if not all(isinstance(size, int | np.integer) and size > 0 for size in shape):
        raise ValueError(f"data, fsdp and tensor must be positive ints, got {shape}")
    chosen = (jax.devices() if devices is None else devices)[: data * fsdp * tensor]
    return jax.make_mesh(shape, AXES, (AxisType.Auto,) * 3, devices=chosen)


def partition_rules(mesh: Mesh) -> Callable[[str, tuple[int, ...]], PartitionSpec]:
    """Return the rule of a mesh: from a parameter's name and shape to its `PartitionSpec`.

    Args:
        mesh: one with the automatic axes data, fsdp and tensor.

    Returns:
        What `load_pretrained(partition=…)` takes. An axis of the mesh that does not divide its
        dimension is left out: the parameter is then replicated along it.

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
    """Check that a mesh has the axes data, fsdp and tensor, all of them automatic."""
    if set(mesh.axis_names) != set(AXES):
        raise ValueError(f"mesh must have the axes {AXES}, got {mesh.axis_names}")
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            "mesh must have automatic axes, as make_mesh of this package gives it, "
            f"got {mesh.axis_types}"
        )


def backend_of(mesh: Mesh | None) -> str:
    """Return the backend of a mesh's devices, which may be descriptions to compile for."""
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return "gpu" if platform in ("cuda", "rocm") else platform


def row_shards(mesh: Mesh | None) -> int:
    """Count the devices that rows are spread over."""
    return 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]


def find_mesh(mesh: Mesh | None, tree: Any) -> Mesh | None:
    """Return `mesh`, or that of the first array sharded over these axes; None if there is none.

    Traced arrays have no sharding: a compiled function must be given the mesh.
    """
    if mesh is not None:
        check_mesh(mesh)
        return mesh
    for leaf in jax.tree.leaves(tree):
        sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            mesh = sharding.mesh
            has_axes = set(mesh.axis_names) == set(AXES)
            if has_axes and all(kind == AxisType.Auto for kind in mesh.axis_types):
                return mesh
    return None


def shard_like_params(tree: Any, mesh: Mesh) -> Any:
    """Return the sharding of each leaf of a tree of parameters, or of arrays named like them.

    Args:
        tree: parameters, gradients, an optimizer's state or a whole `TrainState`, of arrays or of
            shapes: leaves are found by the end of their path.
        mesh: one with the automatic axes data, fsdp and tensor.

    Returns:
        The same tree with a `NamedSharding` for each leaf.

    Raises:
        ValueError: if the axes have other names, or are not automatic.
    """
    rule = partition_rules(mesh)

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, rule(name, leaf.shape))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def place_params(tree: Any, mesh: Mesh) -> Any:
    """Move parameters to their places on a mesh, see `shard_like_params`.

    Arrays that each process has for itself are cut on the host. `jax.device_put` (JAX 0.10) makes
    arrays of them that cannot be saved, where every process has one device and all devices need
    the whole array.
    """
    shardings = shard_like_params(tree, mesh)

    def cut(x: Array, sharding: NamedSharding) -> Array:
        if sharding.is_fully_addressable or not x.is_fully_addressable:
            return x
        values = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: values[index])

    return jax.device_put(jax.tree.map(cut, tree, shardings), shardings)


def constrain(tree: Any, mesh: Mesh | None) -> Any:
    """Constrain a tree to the sharding of `shard_like_params`, inside a compiled function."""
    if mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, shard_like_params(tree, mesh))


def sum_over_leaves(
    of: Callable[[Array], Float[Array, "*sums"]], tree: Any, mesh: Mesh | None
) -> Float[Array, "*sums"]:
    """Sum a reduction over all leaves of parameters, or of arrays that are sharded like them.

    Args:
        of: reduces an array to a sum, or to several.
        tree: laid out by `shard_like_params`.
        mesh: of the arrays; each device first adds up its shares, so that one transfer of a few
            numbers is enough. None for one device.
    """
    leaves = jax.tree.leaves(tree)
    if mesh is None:
        return jnp.sum(jnp.stack([of(x) for x in leaves]), axis=0)
    specs = [sharding.spec for sharding in jax.tree.leaves(shard_like_params(tree, mesh))]
    apart = [a for a in AXES if mesh.shape[a] > 1 and any(a in spec for spec in specs)]

    def add_up(shares: list[Array]) -> Float[Array, "*sums"]:
        sums = []
        for share, spec in zip(shares, specs, strict=True):
            same = [axis for axis in apart if axis not in spec]  # replicated: counted once
            counted = sum(jax.lax.axis_index(axis) for axis in same) == 0
            sums.append(jnp.where(counted, of(share), 0))
        total = jnp.sum(jnp.stack(sums), axis=0)
        return jax.lax.psum(total, apart) if apart else total

    sums: Float[Array, "*sums"] = jax.shard_map(
        add_up, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False
    )(leaves)
    return sums


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Spread rows over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


# Inside the decoder: rows stay, parameters come to them.


def fits(mesh: Mesh, config: DecoderConfig, rows: int) -> bool:
    """Return whether a mesh divides rows and key-value heads."""
    heads = config.key_value_heads
    return not rows % row_shards(mesh) and not heads % mesh.shape["tensor"]


def check_fit(mesh: Mesh | None, config: DecoderConfig, rows: int) -> None:
    """Raise for rows and heads that a mesh does not divide, and name what would fit."""
    if mesh is None:
        return
    devices, tensor = row_shards(mesh), mesh.shape["tensor"]
    if rows % devices:
        raise ValueError(
            f"batch must have a multiple of {devices} rows, data times fsdp of the mesh, got {rows}"
        )
    heads = config.key_value_heads
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
    """Keep rows, or the tokens of rows, spread over data and fsdp, and replicated along tensor."""
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
        # As in the whole tree: rules tell a name from the end of another one by the slash.
        spread = PartitionSpec(*rule(f"layers/0/{name}", (1, *leaf.shape))[1:])
        return gather_along_fsdp(leaf.astype(dtype), spread, mesh) if "fsdp" in spread else leaf

    gathered: Mapping[str, Any] = jax.tree_util.tree_map_with_path(gather, weights)
    return gathered


def gather_along_fsdp(x: Array, spread: PartitionSpec, mesh: Mesh) -> Array:
    """Gather an array over fsdp; its gradient is summed and scattered."""
    full = _without_fsdp(spread)
    if "fsdp" not in spread:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, full))
    return _gather(x, NamedSharding(mesh, spread), NamedSharding(mesh, full))


def _without_fsdp(spread: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(None if axis == "fsdp" else axis for axis in spread))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: Array, spread: NamedSharding, full: NamedSharding) -> Array:
    """Gather an array, and scatter its gradient, which a plain constraint would gather too."""
    x = jax.lax.with_sharding_constraint(x, spread)
    steps = steps_of(spread.mesh.shape["fsdp"])
    if steps[1] == 1:
        return jax.lax.with_sharding_constraint(x, full)
    gather = jax.shard_map(
        partial(gather_in_steps, axis="fsdp", dimension=spread.spec.index("fsdp"), steps=steps),
        mesh=spread.mesh,
        in_specs=spread.spec,
        out_specs=full.spec,
        check_vma=False,  # gathered arrays count as different along fsdp
    )
    gathered: Array = gather(x)
    return gathered


def _gather_forward(
    x: Array, spread: NamedSharding, full: NamedSharding
) -> tuple[Array, tuple[()]]:
    return _gather(x, spread, full), ()


def _gather_backward(
    spread: NamedSharding, full: NamedSharding, residuals: tuple[()], gradient: Array
) -> tuple[Array]:
    return (jax.lax.with_sharding_constraint(gradient, spread),)


_gather.defvjp(_gather_forward, _gather_backward)


_SMALL = 2**20  # bytes; below, a transfer of its own costs more time than copying


def gather_tree(params: Any, mesh: Mesh) -> Any:
    """Gather what is spread over fsdp; small arrays of one type go in one transfer.

    Args:
        params: laid out by `shard_like_params`.
        mesh: of the parameters.
    """
    leaves, structure = jax.tree.flatten(params)
    specs = [x.spec for x in jax.tree.leaves(shard_like_params(params, mesh))]
    small = [i for i, x in enumerate(leaves) if "fsdp" in specs[i] and x.nbytes < _SMALL]
    for i in set(range(len(leaves))) - set(small):
        leaves[i] = gather_along_fsdp(leaves[i], specs[i], mesh)
    if small and mesh.shape["fsdp"] > 1:
        spread = [specs[i] for i in small]
        together = jax.shard_map(
            partial(_gather_together, specs=spread, mesh=mesh),
            mesh=mesh,
            in_specs=(spread,),
            out_specs=[_without_fsdp(spec) for spec in spread],
            check_vma=False,  # gathered arrays count as different along fsdp
        )
        for i, gathered in zip(small, together([leaves[i] for i in small]), strict=True):
            leaves[i] = gathered
    return jax.tree.unflatten(structure, leaves)


def copy_to_devices(params: Any, dtype: DTypeLike | None, mesh: Mesh) -> Any:
    """Give each device a copy of all parameters, gathered at once.

    What is spread over fsdp is cast to the compute type and gathered in one transfer; gradients of
    all copies are summed and scattered in one, and those of parameters that every device has in one
    for each type. Nothing may be split over tensor.

    Args:
        params: laid out by `shard_like_params`.
        dtype: the compute type; None casts nothing.
        mesh: of the parameters.

    Returns:
        The same tree with a leading axis that counts devices, and is spread over them.
    """
    leaves, structure = jax.tree.flatten(params)
    specs = tuple(x.spec for x in jax.tree.leaves(shard_like_params(params, mesh)))
    if dtype is not None:
        pairs = zip(leaves, specs, strict=True)
        leaves = [leaf.astype(dtype) if "fsdp" in spec else leaf for leaf, spec in pairs]
    return jax.tree.unflatten(structure, _copy(leaves, specs, mesh))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _copy(leaves: list[Array], specs: tuple[PartitionSpec, ...], mesh: Mesh) -> list[Array]:
    def copy(shares: list[Array]) -> list[Array]:
        return [x[None] for x in _gather_together(shares, specs, mesh)]

    copies: list[Array] = jax.shard_map(
        copy, mesh=mesh, in_specs=(list(specs),), out_specs=PartitionSpec(AXES), check_vma=False
    )(leaves)
    return copies


def _copy_forward(
    leaves: list[Array], specs: tuple[PartitionSpec, ...], mesh: Mesh
) -> tuple[list[Array], tuple[()]]:
    return _copy(leaves, specs, mesh), ()


def _copy_backward(
    specs: tuple[PartitionSpec, ...], mesh: Mesh, residuals: tuple[()], gradients: list[Array]
) -> tuple[list[Array]]:
    devices = mesh.shape["fsdp"]

    def add_up(copies: list[Array]) -> list[Array]:
        sums = [x[0] for x in copies]
        on_all = _groups(sums, specs, mesh, spread=False)
        for dtype, group in _groups(sums, specs, mesh, spread=True).items():
            shares = [jnp.split(sums[i], devices, axis=specs[i].index("fsdp")) for i in group]
            rows = jnp.concatenate([jnp.stack(x).reshape(devices, -1) for x in shares], axis=1)
            # Gradients of replicated parameters are mostly small, and then go with each share.
            few = on_all.get(dtype, [])
            few = few if 8 * sum(sums[i].size for i in few) <= rows.shape[1] else []
            for i in few:
                rows = jnp.concatenate([rows, jnp.tile(sums[i].reshape(1, -1), (devices, 1))], 1)
            on_all[dtype] = [] if few else on_all.get(dtype, [])
            total = jax.lax.psum_scatter(rows, "fsdp", scatter_dimension=0)
            if mesh.shape["data"] > 1:
                total = jax.lax.psum(total, "data")
            shapes = [x[0].shape for x in shares] + [sums[i].shape for i in few]
            parts = _cut(total, [math.prod(shape) for shape in shapes])
            for i, shape, part in zip(group + few, shapes, parts, strict=True):
                sums[i] = part.reshape(shape)
        for group in filter(None, on_all.values()):
            total = jax.lax.psum(jnp.concatenate([sums[i].reshape(-1) for i in group]), ROWS)
            for i, part in zip(group, _cut(total, [sums[i].size for i in group]), strict=True):
                sums[i] = part.reshape(sums[i].shape)
        return sums

    sums: list[Array] = jax.shard_map(
        add_up,
        mesh=mesh,
        in_specs=PartitionSpec(AXES),
        out_specs=list(specs),
        check_vma=False,  # sums are the same on all devices
    )(gradients)
    return (sums,)


_copy.defvjp(_copy_forward, _copy_backward)


def _gather_together(
    shares: list[Array], specs: Sequence[PartitionSpec], mesh: Mesh
) -> list[Array]:
    """Gather what is spread over fsdp, in one transfer for each type, inside `shard_map`."""
    devices, gathered = mesh.shape["fsdp"], list(shares)
    for group in _groups(shares, specs, mesh, spread=True).values():
        # One row for each device, with its shares of all leaves one after the other.
        row = jnp.concatenate([shares[i].reshape(1, -1) for i in group], axis=1)
        rows = gather_in_steps(row, "fsdp", 0, steps_of(devices))
        for i, part in zip(group, _cut(rows, [shares[i].size for i in group]), strict=True):
            parts = part.reshape(devices, *shares[i].shape)
            gathered[i] = jnp.concatenate(list(parts), axis=specs[i].index("fsdp"))
    return gathered


def _groups(
    leaves: list[Array], specs: Sequence[PartitionSpec], mesh: Mesh, *, spread: bool
) -> dict[Any, list[int]]:
    """Group the indices of leaves by type: of those that are spread over fsdp, or of the others."""
    groups: dict[Any, list[int]] = {}
    for i, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
        if ("fsdp" in spec and mesh.shape["fsdp"] > 1) is spread:
            groups.setdefault(leaf.dtype, []).append(i)
    return groups


def _cut(flat: Array, sizes: list[int]) -> list[Array]:
    """Cut the last axis into parts of these sizes."""
    return jnp.split(flat, list(itertools.accumulate(sizes))[:-1], axis=-1)


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
    embedded = look_up(embedding, _put(tokens, mesh, "data"))
    return keep_rows(_put(embedded, mesh, "data", None, columns), mesh)


def _put(x: Array, mesh: Mesh, *axes: Any) -> Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))


# Gathers over many devices, in two steps: within neighbourhoods, then among them.


_AT_ONCE = 32  # devices; the TPU compiler makes a gather over a larger cube a sum of padded shares


def steps_of(size: int) -> tuple[int, int]:
    """Split the devices on an axis: how many in a neighbourhood, and how many neighbourhoods.

    Up to 32 devices are one neighbourhood; the two factors of more are as equal as possible.
    """
    if size <= _AT_ONCE:
        return size, 1
    near = next(n for n in range(math.isqrt(size), 0, -1) if size % n == 0)
    return near, size // near


def gather_in_steps(x: Array, axis: str, dimension: int, steps: tuple[int, int]) -> Array:
    """Concatenate the shares of all devices on an axis of a mesh, inside `shard_map`.

    Every device sends what one gather would have sent: its share to its neighbourhood, and then
    the neighbourhood's part to the others. The gradient is summed and scattered in the same steps.

    Args:
        x: the share of a device.
        axis: the axis of the mesh.
        dimension: the one to concatenate along.
        steps: devices of a neighbourhood, and neighbourhoods; their product is all devices.

    Returns:
        The whole array, with shares in the order of their devices.
    """
    near, far = steps
    inside = [[start * near + n for n in range(near)] for start in range(far)]
    across = [[start * near + n for start in range(far)] for n in range(near)]
    for size, groups in ((near, inside), (far, across)):
        if size > 1:
            all_devices = size == near * far
            x = jax.lax.all_gather(
                x,
                axis,
                axis=dimension,
                tiled=True,
                axis_index_groups=None if all_devices else groups,
            )
    return x
