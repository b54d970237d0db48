"""Run an estimator per completion: check rewards, form groups, apply its formula.

A public function is two lines: `in_rows` or `in_segments` checks its arguments, and `estimate`
runs its formula, `formula(samples, *settings, **data)`, in one compiled program. `settings` are
fixed at compile time; `data` are arrays and coefficients. Estimators over time share
`auto_sharded`, which makes meshes with explicit axes work.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from twinkle_jax.advantage.groups import Grid, Groups, Neighbours, Samples, Segments, WholeBatch
from twinkle_jax.advantage.inputs import (
    AxisName,
    HostOrDevice,
    as_array,
    as_mask,
    as_numbers,
    check_axis_name,
    check_coefficient,
    check_shape,
    check_size,
    compute_dtype,
    describe,
    refuse,
    refuse_non_finite,
)

Result = TypeVar("Result")
Core = Callable[..., Result]
Shape = tuple[int, ...]

_STATIC = {"static": True}  # fixed at compile time


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grouped:
    """Rewards that passed the checks, and which of them form groups.

    Attributes:
        rewards: NumPy or JAX array, or tracer; so are all others.
        where: which samples count.
        reward_weights: one for each component.
        segment_ids: for groups by id.
        data: arrays and coefficients that the formula takes by name.
        num_generations: size of each group of neighbours, or None.
        num_segments: number of groups by id, or None; if both are None, the batch is one group.
        axis_name: of shards, for statistics of the batch and of segments.
    """

    rewards: Any
    where: Any
    reward_weights: Any
    segment_ids: Any
    data: dict[str, Any]
    num_generations: int | None = dataclasses.field(default=None, metadata=_STATIC)
    num_segments: int | None = dataclasses.field(default=None, metadata=_STATIC)
    axis_name: AxisName | None = dataclasses.field(default=None, metadata=_STATIC)

    def with_data(self, **data: Any) -> "Grouped":
        """Add arrays, already checked, that the formula takes by name."""
        return dataclasses.replace(self, data=self.data | data)

    def as_one_group(self) -> "Grouped":
        """Compare every sample with the whole batch."""
        return dataclasses.replace(self, num_generations=None, num_segments=None)


def in_rows(
    rewards: Any,
    num_generations: Any,
    where: Any,
    reward_weights: Any,
    axis_name: Any = None,
    *,
    least: int = 2,
    why: str = ": a sample is compared with its group",
    **coefficients: Any,
) -> Grouped:
    """Check rewards and form groups of `num_generations` neighbours.

    Args:
        rewards: as the user passed them, and so all that follows.
        num_generations: K.
        where: which samples count.
        reward_weights: one for each component.
        axis_name: of shards.
        least: the smallest K that makes sense.
        why: the reason, appended to the error for a smaller K.
        **coefficients: scalars that the formula takes by name.
    """
    size = check_size("num_generations", num_generations, least=least, why=why)
    values, mask, weights = check_rewards(rewards, where, reward_weights)
    check_whole_groups(values.shape[0], size)
    return Grouped(
        values,
        mask,
        weights,
        None,
        {name: check_coefficient(name, value, values) for name, value in coefficients.items()},
        num_generations=size,
        axis_name=check_axis_name(axis_name),
    )


def in_segments(
    rewards: Any,
    segment_ids: Any,
    num_segments: Any,
    where: Any,
    reward_weights: Any,
    axis_name: Any = None,
    **coefficients: Any,
) -> Grouped:
    """Check rewards and form groups of the samples that share an id; arguments as `in_rows`."""
    size = check_size("num_segments", num_segments)
    values, mask, weights = check_rewards(rewards, where, reward_weights)
    return Grouped(
        values,
        mask,
        weights,
        check_segment_ids(segment_ids, values.shape[0], size),
        {name: check_coefficient(name, value, values) for name, value in coefficients.items()},
        num_segments=size,
        axis_name=check_axis_name(axis_name),
    )


def check_rewards(
    rewards: Any, where: Any, reward_weights: Any
) -> tuple[HostOrDevice, HostOrDevice | None, HostOrDevice | None]:
    """Return rewards, mask and weights as arrays of matching shapes."""
    values = as_numbers("rewards", rewards)
    shape = values.shape
    if values.ndim not in (1, 2):
        raise ValueError(
            "rewards must be [N], or [N, C] for C reward components, with the K samples of a "
            f"prompt next to each other, got shape {shape}"
        )
    if values.size == 0:
        raise ValueError(f"rewards must hold at least one reward, got shape {shape}")
    mask = None if where is None else check_where(where, shape)
    weights = None
    if reward_weights is not None:
        if len(shape) == 1:
            raise ValueError(
                "reward_weights must come with rewards of shape [N, C], one for each of the C "
                f"components, got rewards of shape {shape}"
            )
        weights = as_numbers("reward_weights", reward_weights)
        check_shape("reward_weights", weights, shape[1:], f" for rewards of shape {shape}")
        refuse_non_finite("reward_weights", weights, None)
    refuse_non_finite("rewards", values, mask)
    return values, mask, weights


def check_where(where: Any, shape: tuple[int, ...]) -> HostOrDevice:
    """Return a mask of samples, or of their components."""
    mask = as_mask("where", where)
    if mask.shape != shape:
        cells = f" or {shape}" if len(shape) == 2 else ""
        check_shape("where", mask, shape[:1], f"{cells} for rewards of shape {shape}")
    return mask


def check_whole_groups(num_samples: int, num_generations: int) -> None:
    """Raise unless K divides the number of rewards."""
    if num_samples % num_generations:
        raise ValueError(
            f"rewards must hold num_generations={num_generations} samples for every prompt, next "
            f"to each other, got {num_samples} rewards, which {num_generations} does not divide; "
            "for groups of different sizes use the segment_* functions or where="
        )


def check_segment_ids(segment_ids: Any, num_samples: int, num_segments: int) -> HostOrDevice:
    """Return ids as signed integers of at least 32 bits, -1 for host ids out of range."""
    ids = as_array("segment_ids", segment_ids)
    if not jnp.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"segment_ids must hold integers, got {describe(ids)}")
    check_shape("segment_ids", ids, (num_samples,), ", one id for each reward")
    if isinstance(ids, np.ndarray):  # before 64 bits are cut to 32
        wide = ids.astype(np.int64)
        return np.where((wide >= 0) & (wide < num_segments), wide, -1).astype(np.int32)
    return ids.astype(jnp.int64 if ids.dtype.itemsize == 8 else jnp.int32)


def check_lengths(lengths: Any, grouped: Grouped) -> HostOrDevice:
    """Return tokens per sample, `[N]`; kept ones on the host must be finite and at least 0."""
    tokens = as_numbers("lengths", lengths)
    check_shape("lengths", tokens, grouped.rewards.shape[:1], ", the tokens of each sample")
    if isinstance(tokens, np.ndarray):
        bad = ~(np.isfinite(tokens) & (tokens >= 0))
        refuse("lengths must be finite and not negative", tokens, bad, grouped.where)
    return tokens


def check_subset_size(k: Any, grouped: Grouped) -> Any:
    """Return k of pass@k: an int from 1 to K, or a traced integer, whose value is unknown."""
    if isinstance(k, jax.Array):
        if k.shape != ():
            raise ValueError(f"k must be a scalar, got shape {k.shape}")
        if not jnp.issubdtype(k.dtype, np.integer):
            raise TypeError(f"k must be an integer, got {describe(k)}")
        return k
    size, most = check_size("k", k), grouped.num_generations
    assert most is not None
    if size > most:
        raise ValueError(
            f"k must be at most num_generations={most}, got {size}: a subset of k samples is drawn "
            "from those of one prompt"
        )
    return check_coefficient("k", size, grouped.rewards)


# --- meshes with explicit axes --------------------------------------------------------------------

# On these (what `jax.make_mesh` makes by default) every operation must know how its result is
# sharded, and a reshape or a scatter across shards raises. Groups and segments may straddle shards,
# so estimators run under `jax.sharding.auto_axes`: the compiler decides, and results are sharded as
# the rewards are.


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
            mesh, axes = _explicit_axes(first, *arrays)
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


def _explicit_axes(*arrays: Any) -> tuple[Any, tuple[str, ...]]:
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


# --- the compiled core ----------------------------------------------------------------------------


def _one_per_sample(grouped: Grouped, **static: Any) -> tuple[int, ...]:
    del static
    return grouped.rewards.shape[:1]


@functools.partial(jax.jit, static_argnames=("formula", "settings", "components_apart"))
@auto_sharded(_one_per_sample)
def estimate(
    grouped: Grouped,
    *,
    formula: Callable[..., Array],
    settings: tuple[Any, ...] = (),
    components_apart: bool = False,
) -> Array:
    """Run a formula over groups.

    Args:
        grouped: rewards that passed the checks, and their groups.
        formula: takes `Samples`, the settings, and the data of `grouped` by name.
        settings: hashable, fixed at compile time.
        components_apart: whether the formula takes rewards `[N, C]`, and `reward_weights` by name,
            instead of their sum.
    """
    data = grouped.data
    if components_apart and grouped.reward_weights is not None:
        data = data | {"reward_weights": grouped.reward_weights}
    samples = _form_groups(grouped, components_apart=components_apart)
    data = {name: _like_rewards(value, grouped, samples) for name, value in data.items()}
    advantages = formula(samples, *settings, **data)
    if samples.where is not None:
        keep = jnp.any(samples.where, axis=1) if components_apart else samples.where
        advantages = jnp.where(keep, advantages, 0)
    return advantages.reshape(-1)


def _form_groups(grouped: Grouped, *, components_apart: bool) -> Samples:
    """Arrange rewards by group, 0 where they are masked."""
    read = keep_components if components_apart else sum_components
    values, keep = read(grouped.rewards, grouped.where, grouped.reward_weights)
    batch = WholeBatch(values.shape[0], grouped.axis_name)
    groups: Groups = batch
    if grouped.num_generations is not None:
        groups = Neighbours(grouped.num_generations)
        if groups.size > 1 and values.ndim == 1:
            groups = Grid(groups.size)
            values, keep = jax.tree.map(lambda x: x.reshape(-1, groups.size), (values, keep))
    elif grouped.num_segments is not None:
        ids = grouped.segment_ids
        inside = (ids >= 0) & (ids < grouped.num_segments)
        groups = Segments(jnp.where(inside, ids, 0), grouped.num_segments, grouped.axis_name)
        if values.ndim == 2:
            inside = jnp.broadcast_to(inside[:, None], values.shape)
        keep = inside if keep is None else keep & inside
    samples = Samples(values, keep, groups, batch)
    return dataclasses.replace(samples, values=samples.masked(values))


def _like_rewards(value: Any, grouped: Grouped, samples: Samples) -> Array:
    """Convert data to the dtype and layout of the rewards, with components summed."""
    value = jnp.asarray(value)
    if value.ndim == 2:
        value, _ = sum_components(value, None, grouped.reward_weights)
    if isinstance(samples.groups, Grid) and value.shape == grouped.rewards.shape[:1]:
        value = value.reshape(samples.values.shape)
    return jax.lax.stop_gradient(value).astype(samples.values.dtype)


def sum_components(
    rewards: Array, where: Array | None, reward_weights: Array | None
) -> tuple[Array, Array | None]:
    """Turn `[N]` or `[N, C]` rewards into one reward a sample, 0 where masked, and its mask."""
    rewards = jax.lax.stop_gradient(rewards).astype(compute_dtype(rewards.dtype))
    if rewards.ndim == 1:
        return (rewards if where is None else jnp.where(where, rewards, 0)), where
    if reward_weights is not None:
        weights = jax.lax.stop_gradient(reward_weights).astype(rewards.dtype)
        rewards = rewards * jnp.broadcast_to(weights, rewards.shape)
    if where is None:
        return jnp.sum(rewards, axis=1), None
    cells = jnp.broadcast_to(where.reshape(where.shape[0], -1), rewards.shape)
    return jnp.sum(jnp.where(cells, rewards, 0), axis=1), jnp.any(cells, axis=1)


def keep_components(
    rewards: Array, where: Array | None, reward_weights: Array | None
) -> tuple[Array, Array]:
    """Turn rewards into `[N, C]`, 0 where masked, and their mask; weights are for the formula."""
    del reward_weights
    rewards = jax.lax.stop_gradient(rewards).astype(compute_dtype(rewards.dtype))
    rewards = rewards.reshape(rewards.shape[0], -1)
    if where is None:
        return rewards, jnp.ones(rewards.shape, bool)
    cells = jnp.broadcast_to(where.reshape(where.shape[0], -1), rewards.shape)
    return jnp.where(cells, rewards, 0), cells
