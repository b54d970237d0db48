"""The thin Python layer of GRPO and RLOO: check, convert, call the compiled core."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from twinkle_jax.advantage._core import Setting, advantages, compute_dtype
from twinkle_jax.advantage._rewards import HostOrDevice, check_rewards, check_segment_ids
from twinkle_jax.advantage._settings import (
    check_axis_name,
    check_groups,
    check_scale,
    check_size,
    describe,
)


def estimate(
    rewards: Any,
    num_generations: Any,
    scale: Any,
    *,
    leave_one_out: bool,
    where: Any,
    reward_weights: Any,
    epsilon: Any,
    axis_name: Any,
) -> jax.Array:
    """Advantages over groups of `num_generations` neighbours."""
    scale = check_scale(scale)
    size = check_size(
        "num_generations",
        num_generations,
        least=2 if leave_one_out else 1,
        why=": leave-one-out compares a sample with the others of its group" * leave_one_out,
    )
    values, mask, weights = check_rewards(rewards, where, reward_weights)
    check_groups(values.shape[0], size)
    setting = Setting(scale, leave_one_out, check_axis_name(axis_name), num_generations=size)
    return advantages(values, mask, weights, as_epsilon(epsilon, values), setting=setting)


def estimate_segments(
    rewards: Any,
    segment_ids: Any,
    num_segments: Any,
    scale: Any,
    *,
    leave_one_out: bool,
    where: Any,
    reward_weights: Any,
    epsilon: Any,
    axis_name: Any,
) -> jax.Array:
    """Advantages over groups that share an id."""
    scale = check_scale(scale)
    size = check_size("num_segments", num_segments)
    values, mask, weights = check_rewards(rewards, where, reward_weights)
    ids = check_segment_ids(segment_ids, values.shape[0], size)
    setting = Setting(scale, leave_one_out, check_axis_name(axis_name), num_segments=size)
    return advantages(values, mask, weights, as_epsilon(epsilon, values), ids, setting=setting)


def as_epsilon(epsilon: Any, rewards: HostOrDevice) -> Any:
    """Check epsilon; beside rewards on a device, a number is put there once, not per call."""
    if type(epsilon) in (float, int):
        if isinstance(rewards, np.ndarray | jax.core.Tracer):
            return float(epsilon)
        return _on_device(float(epsilon), compute_dtype(rewards.dtype))
    if not isinstance(epsilon, jax.Array | np.ndarray | np.number):
        raise TypeError(f"epsilon must be a number, got {describe(epsilon)}")
    if epsilon.shape != ():
        raise ValueError(f"epsilon must be a scalar, got shape {epsilon.shape}")
    if not jnp.issubdtype(epsilon.dtype, np.floating):
        raise TypeError(f"epsilon must be a real number, got {describe(epsilon)}")
    return epsilon


_device_scalars: dict[tuple[float, Any], jax.Array] = {}


def _on_device(value: float, dtype: Any) -> jax.Array:
    """Keep a scalar on the default device, so that eager calls transfer nothing implicitly."""
    scalar = _device_scalars.get((value, dtype))
    if scalar is None or scalar.is_deleted():
        scalar = jax.device_put(np.asarray(value, dtype))
        if isinstance(scalar, jax.core.Tracer):
            return scalar
        if len(_device_scalars) >= 16:
            _device_scalars.clear()
        _device_scalars[(value, dtype)] = scalar
    return scalar
