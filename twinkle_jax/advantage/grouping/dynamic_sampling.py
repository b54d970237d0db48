"""Dynamic sampling: which prompts are worth a gradient."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool

from twinkle_jax.advantage.grouping.explicit_axes import auto_sharded
from twinkle_jax.advantage.grouping.statistics import GroupStatistics
from twinkle_jax.advantage.inputs.arrays import Scalar, describe
from twinkle_jax.advantage.inputs.settings import check_coefficient, check_flag, check_size


def dynamic_sampling_filter(
    statistics: GroupStatistics,
    num_generations: int = 1,
    *,
    keep_solved: bool = False,
    keep_failed: bool = False,
    threshold: Scalar = 0.5,
) -> Bool[jax.Array, " samples"]:
    """Tell the prompts that teach something from those to be replaced (DAPO).

    A prompt whose rewards are all equal has no signal. It is solved if their mean lies above the
    threshold, and failed otherwise; either kind can be kept, for estimators that learn from it
    (`remax_advantage`, for one, whose baseline is not the group). A prompt whose samples are all
    masked is never kept; one with NaN always is, so that it shows.

    Args:
        statistics: of `group_statistics`.
        num_generations: repeat the answer for each of K samples, as a mask for the `where=` of an
            estimator; 1, the default, gives one for each prompt. Static.
        keep_solved: keep prompts that every sample solves; static.
        keep_failed: keep prompts that no sample solves; static.
        threshold: between the rewards of failure and of success; may be traced.

    Returns:
        True = keep, `[P]`, or `[N]` for K samples a prompt.

    Raises:
        ValueError: `num_generations` below 1.
        TypeError: anything but `GroupStatistics`; a type that does not fit.

    References:
        DAPO, https://arxiv.org/abs/2503.14476, section 3.2

    Example:
        >>> from twinkle_jax.advantage import dynamic_sampling_filter, group_statistics
        >>> statistics = group_statistics([0.0, 1.0, 1.0, 1.0, 0.0, 0.0], num_generations=2)
        >>> dynamic_sampling_filter(statistics).tolist()
        [True, False, False]
        >>> dynamic_sampling_filter(statistics, num_generations=2, keep_solved=True).tolist()
        [True, True, True, True, False, False]
    """
    if not isinstance(statistics, GroupStatistics):
        raise TypeError(
            f"statistics must be what group_statistics returns, got {describe(statistics)}"
        )
    return _filter(
        statistics.has_signal,
        statistics.mean,
        statistics.count,
        check_coefficient("threshold", threshold, statistics.mean),
        num_generations=check_size("num_generations", num_generations),
        keep_solved=check_flag("keep_solved", keep_solved),
        keep_failed=check_flag("keep_failed", keep_failed),
    )


def _one_per_sample(has_signal: Array, *, num_generations: int, **static: Any) -> tuple[int]:
    del static
    return (has_signal.shape[0] * num_generations,)


@functools.partial(jax.jit, static_argnames=("num_generations", "keep_solved", "keep_failed"))
@auto_sharded(_one_per_sample)
def _filter(
    has_signal: Array,
    mean: Array,
    count: Array,
    threshold: Array,
    *,
    num_generations: int,
    keep_solved: bool,
    keep_failed: bool,
) -> Array:
    solved = mean > jnp.asarray(threshold).astype(mean.dtype)
    keep = has_signal | (count > 0) & ((solved & keep_solved) | (~solved & keep_failed))
    shape = (*keep.shape, num_generations)
    return jnp.broadcast_to(keep[:, None], shape).reshape(-1)
