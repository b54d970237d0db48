"""Rewards as users pass them: checked, with their mask, and with the groups that they fall into."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
    describe,
    refuse,
    refuse_non_finite,
)

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
        num_generations: groups are so many neighbours ...
        num_segments: ... or share an id below this number; if both are None, all are one group.
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
        why: what a user with a smaller K is told.
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
    """Return rewards, mask and weights as arrays whose shapes fit together."""
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
                "reward_weights must stand beside rewards of shape [N, C], one for each of the C "
                f"components, got rewards of shape {shape}"
            )
        weights = as_numbers("reward_weights", reward_weights)
        check_shape("reward_weights", weights, shape[1:], f" for rewards of shape {shape}")
        refuse_non_finite("reward_weights", weights, None)
    refuse_non_finite("rewards", values, mask)
    return values, mask, weights


def check_where(where: Any, shape: tuple[int, ...]) -> HostOrDevice:
    """Return a mask of samples, or of the components of each."""
    mask = as_mask("where", where)
    if mask.shape != shape:
        cells = f" or {shape}" if len(shape) == 2 else ""
        check_shape("where", mask, shape[:1], f"{cells} for rewards of shape {shape}")
    return mask


def check_whole_groups(num_samples: int, num_generations: int) -> None:
    """Raise for a number of rewards that K does not divide."""
    if num_samples % num_generations:
        raise ValueError(
            f"rewards must hold num_generations={num_generations} samples for every prompt, next "
            f"to each other, got {num_samples} rewards, which {num_generations} does not divide; "
            "for groups of different sizes use the segment_* functions or where="
        )


def check_segment_ids(segment_ids: Any, num_samples: int, num_segments: int) -> HostOrDevice:
    """Return ids as signed integers of at least 32 bits, in which -1 is outside."""
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
