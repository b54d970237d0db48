"""The thin Python layer of GRPO and RLOO: check, convert, call the compiled core."""

from typing import Any

import jax

from twinkle_jax.advantage._coefficients import check_coefficient
from twinkle_jax.advantage._core import Setting, advantages
from twinkle_jax.advantage._rewards import check_rewards, check_segment_ids
from twinkle_jax.advantage._settings import (
    check_axis_name,
    check_groups,
    check_scale,
    check_size,
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
    epsilon = check_coefficient("epsilon", epsilon, values)
    setting = Setting(scale, leave_one_out, check_axis_name(axis_name), size)
    return advantages(values, mask, weights, epsilon, setting=setting)


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
    epsilon = check_coefficient("epsilon", epsilon, values)
    setting = Setting(scale, leave_one_out, check_axis_name(axis_name), num_segments=size)
    return advantages(values, mask, weights, epsilon, ids, setting=setting)
