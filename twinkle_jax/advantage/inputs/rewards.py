"""Check rewards, their mask and weights, and the ids of their groups, against each other."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from twinkle_jax.advantage.inputs.arrays import (
    HostOrDevice,
    as_array,
    as_mask,
    as_numbers,
    describe,
    refuse_non_finite,
)


def check_rewards(
    rewards: Any, where: Any, reward_weights: Any
) -> tuple[HostOrDevice, HostOrDevice | None, HostOrDevice | None]:
    """Return rewards, mask and weights as arrays that fit together."""
    values = as_numbers("rewards", rewards)
    if values.ndim not in (1, 2):
        raise ValueError(
            "rewards must be [N], or [N, C] for C reward components, with the K samples of a "
            f"prompt next to each other, got shape {values.shape}"
        )
    if values.size == 0:
        raise ValueError(f"rewards must hold at least one reward, got shape {values.shape}")
    mask = None if where is None else check_where(where, values.shape)
    weights = None if reward_weights is None else _weights(reward_weights, values.shape)
    refuse_non_finite("rewards", values, mask)
    return values, mask, weights


def check_where(where: Any, shape: tuple[int, ...]) -> HostOrDevice:
    """Return a mask of samples, or of the components of each."""
    mask = as_mask("where", where)
    if mask.shape not in (shape, shape[:1]):
        raise ValueError(
            f"where must have shape {shape[:1]}"
            + (f" or {shape}" if len(shape) == 2 else "")
            + f" for rewards of shape {shape}, got {mask.shape}"
        )
    return mask


def _weights(reward_weights: Any, shape: tuple[int, ...]) -> HostOrDevice:
    if len(shape) == 1:
        raise ValueError(
            "reward_weights must stand beside rewards of shape [N, C], one for each of the C "
            f"components, got rewards of shape {shape}"
        )
    weights = as_numbers("reward_weights", reward_weights)
    if weights.shape != shape[1:]:
        raise ValueError(
            f"reward_weights must have shape {shape[1:]} for rewards of shape {shape}, "
            f"got {weights.shape}"
        )
    refuse_non_finite("reward_weights", weights, None)
    return weights


def check_segment_ids(segment_ids: Any, num_samples: int, num_segments: int) -> HostOrDevice:
    """Return ids as signed integers of at least 32 bits, in which -1 is outside."""
    ids = as_array("segment_ids", segment_ids)
    if not jnp.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"segment_ids must hold integers, got {describe(ids)}")
    if ids.shape != (num_samples,):
        raise ValueError(
            f"segment_ids must have shape {(num_samples,)}, one id for each reward, got {ids.shape}"
        )
    if isinstance(ids, np.ndarray):  # before 64 bits are cut to 32
        wide = ids.astype(np.int64)
        return np.where((wide >= 0) & (wide < num_segments), wide, -1).astype(np.int32)
    return ids.astype(jnp.int64 if ids.dtype.itemsize == 8 else jnp.int32)
