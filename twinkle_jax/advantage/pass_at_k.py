"""Pass@k training and PKPO: the advantage of a sample as a member of all subsets of k samples."""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage.estimate import check_subset_size, estimate, in_rows
from twinkle_jax.advantage.estimators import FunctionAdvantage
from twinkle_jax.advantage.groups import Samples
from twinkle_jax.advantage.inputs import ArrayLike, Scalar, check_choice, check_size


def pass_at_k_advantage(
    rewards: ArrayLike,
    num_generations: int,
    *,
    k: int | jax.Array,
    threshold: Scalar = 0.5,
    where: ArrayLike | None = None,
    reward_weights: ArrayLike | None = None,
) -> Float[jax.Array, " samples"]:
    r"""Normalise pass@k over all subsets of k samples, and credit their members (closed form).

    A subset passes if one of its samples does. With $n$ samples, $n_+$ of which pass,

    $$\rho = \binom{n_-}{k} \Big/ \binom{n}{k}, \qquad
      A_+ = \sqrt{\frac{\rho}{1 - \rho}}, \qquad A_- = -\frac{n_+}{n_-} A_+$$

    which is the mean, over the subsets that a sample belongs to, of their standard score: the
    advantage of $1 - \rho$, the rate of passing, whose standard deviation is
    $\sqrt{\rho(1-\rho)}$. A prompt that most subsets pass hardly counts any more, and one that all
    subsets pass, or none, is exactly 0.

    Args:
        rewards: `[N]` or `[N, C]`, as in `grpo_advantage`; a sample passes above the threshold.
        num_generations: K, at least 2; static.
        k: from 1 to K; may be traced, to be annealed.
        threshold: what separates rewards of failure from those of success; may be traced.
        where: as in `grpo_advantage`. A group with fewer than k samples left is 0.
        reward_weights: as in `grpo_advantage`.

    Returns:
        Advantages, `[N]`, sharded as the rewards are; every group sums to 0.

    Raises:
        ValueError: as `rloo_advantage`; also for k outside of [1, K].
        TypeError: as `rloo_advantage`.

    References:
        Pass@k Training, https://arxiv.org/abs/2508.10751

    Example:
        >>> from twinkle_jax.advantage import pass_at_k_advantage
        >>> rewards = [1.0, 0.0, 0.0, 0.0]  # 3 of the 6 pairs pass
        >>> pass_at_k_advantage(rewards, num_generations=4, k=2)[0].round(4).tolist()
        1.0
    """
    grouped = in_rows(rewards, num_generations, where, reward_weights, threshold=threshold)
    return estimate(grouped.with_data(k=check_subset_size(k, grouped)), formula=_pass_at_k)


@dataclasses.dataclass(frozen=True)
class PassAtKAdvantage(FunctionAdvantage, name="pass_at_k"):
    """`pass_at_k_advantage` with Twinkle's signature; needs `k=`, takes `threshold=`.

    Example:
        >>> from twinkle_jax.advantage import PassAtKAdvantage
        >>> PassAtKAdvantage()([1.0, 0.0, 0.0, 1.0], num_generations=4, k=1).round(4).tolist()
        [1.0, -1.0, -1.0, 1.0]
    """

    function = staticmethod(pass_at_k_advantage)


def _pass_at_k(samples: Samples, k: Array, threshold: Array) -> Array:
    each, count = samples.each, samples.count.astype(samples.values.dtype)
    passes = samples.masked((samples.values > threshold).astype(count.dtype))
    passed = samples.total(passes)
    log_none = _log_none_of_k(count, passed, k, samples.groups.size)

    # No success, or one in every subset: pass@k is the same for all subsets, so all credits are 0.
    varies = (passed > 0) & jnp.isfinite(log_none) & (k >= 1)
    log_none = jnp.where(varies, log_none, -1)
    success = jnp.exp(log_none / 2) / jnp.sqrt(-jnp.expm1(log_none))
    failure = -success * passed / jnp.maximum(count - passed, 1)
    advantages = jnp.where(passes > 0, each(success), each(failure))
    return samples.zero_without_signal(jnp.where(each(varies), advantages, 0))


def _log_none_of_k(count: Array, passed: Array, k: Array, most: int | None) -> Array:
    """Return the log-probability that none of k samples passes, drawn without replacement.

    It is a sum of k logarithms, one a draw: binomial coefficients of hundreds of samples would
    overflow, and the difference of their logarithms would lose every digit.
    """
    assert most is not None
    draw = jnp.arange(most, dtype=count.dtype)[None, :]
    left = count[:, None] - draw
    share = jnp.where((draw < k) & (left > 0), passed[:, None] / jnp.maximum(left, 1), 0)
    certain = jnp.any(share >= 1, axis=1)
    log_none = jnp.sum(jnp.log1p(-jnp.where(share < 1, share, 0)), axis=1)
    return jnp.where(certain, -jnp.inf, log_none)


Baseline = Literal["mean", "leave_one_out", "leave_one_out_minus_one"]
"""What `pkpo_advantage` subtracts."""


def pkpo_advantage(
    rewards: ArrayLike,
    num_generations: int,
    *,
    k: int | jax.Array,
    baseline: Baseline = "mean",
    where: ArrayLike | None = None,
    reward_weights: ArrayLike | None = None,
) -> Float[jax.Array, " samples"]:
    r"""Follow the best of k (max@k; pass@k for rewards of 0 and 1) instead of the mean.

    $$s_i = \binom{n}{k}^{-1} \sum_{|S| = k,\, i \in S} \max_{j \in S} r_j, \qquad A_i = s_i - b_i$$

    with the baseline $b_i$

    - `'mean'`: the mean of $s$ over the group, which then sums to 0 (and is all 0 for $k = n$,
      where every sample is in the only subset);
    - `'leave_one_out'`: $\frac{k}{n}$ times the mean best of the k-subsets of the other samples,
      which leaves $\sum_i A_i \nabla \log \pi_i$ unbiased; needs $n > k$;
    - `'leave_one_out_minus_one'`: $\frac{k}{n}$ times the mean best of the (k-1)-subsets of the
      others, unbiased too, with the least variance: $A_i \ge 0$ is how much sample $i$ raises
      the best; needs $k \ge 2$.

    A group without signal is exactly 0. (The paper weighs the second baseline with $k/(n-1)$,
    under which equal rewards are not 0.) $A$ is of order $k/n$, for the sum over samples.

    Args:
        rewards: `[N]` or `[N, C]`, as in `grpo_advantage`; any real numbers.
        num_generations: K, at least 2; static.
        k: from 1 to K; may be traced, to be annealed.
        baseline: one of the three; static.
        where: as in `grpo_advantage`. A group with too few samples left for k is 0.
        reward_weights: as in `grpo_advantage`.

    Returns:
        Advantages, `[N]`, sharded as the rewards are.

    Raises:
        ValueError: as `rloo_advantage`; also for an unknown baseline, or a k that does not fit.
        TypeError: as `rloo_advantage`.

    References:
        PKPO, https://arxiv.org/abs/2505.15201

    Example:
        >>> from twinkle_jax.advantage import pkpo_advantage
        >>> pkpo_advantage([8.0, 11.0, 2.0, 5.0], num_generations=4, k=2).tolist()
        [0.0, 1.0, -0.5, -0.5]
    """
    check_choice("baseline", baseline, tuple(_BASELINES))
    if not isinstance(k, jax.Array):
        least = 2 if baseline == "leave_one_out_minus_one" else 1
        k = check_size("k", k, least=least, why=f" with baseline={baseline!r}")
    grouped = in_rows(rewards, num_generations, where, reward_weights)
    grouped = grouped.with_data(k=check_subset_size(k, grouped))
    size = grouped.num_generations
    if baseline == "leave_one_out" and isinstance(k, int) and k == size:
        raise ValueError(
            f"k must be below num_generations={size} with baseline='leave_one_out', got {k}: "
            "the baseline is the best of k others"
        )
    return estimate(grouped, formula=_pkpo, settings=(baseline,))


@dataclasses.dataclass(frozen=True)
class PKPOAdvantage(FunctionAdvantage, name="pkpo"):
    """`pkpo_advantage` with Twinkle's signature; needs `k=`, takes `baseline=`.

    Example:
        >>> from twinkle_jax.advantage import PKPOAdvantage
        >>> PKPOAdvantage()([8.0, 11.0, 2.0, 5.0], num_generations=4, k=2).tolist()
        [0.0, 1.0, -0.5, -0.5]
    """

    function = staticmethod(pkpo_advantage)


class _Ranked(NamedTuple):
    """The rewards of each group in falling order, `[P, K]`, masked ones behind them."""

    drops: Array
    """How far a reward lies below the one before it, at least 0; 0 for the first."""
    none_better: Array
    """q_m: none of the m best is in a subset of k that holds a sample behind them."""
    rank: Array
    """m, from 0."""
    samples: Array
    """n, `[P, 1]`."""


def _pkpo(samples: Samples, baseline: str, k: Array) -> Array:
    size = samples.groups.size
    assert size is not None
    # Relative to the best of the group; masked samples sort behind all others.
    below = samples.masked(samples.values - samples.each(samples.maximum), -jnp.inf)
    grid = below.reshape(-1, size)
    order = jnp.argsort(-grid, axis=1)
    count = samples.count.astype(grid.dtype)[:, None]
    ranked = _rank(jnp.take_along_axis(grid, order, axis=1), count, k)
    result = k / jnp.maximum(count, 1) * _BASELINES[baseline](ranked, k)
    result = jnp.where((k >= 1) & (k <= count), result, 0)
    result = jnp.take_along_axis(result, jnp.argsort(order, axis=1), axis=1)
    return samples.zero_without_signal(result.reshape(samples.values.shape))


def _rank(falling: Array, count: Array, k: Array) -> _Ranked:
    rank = jnp.broadcast_to(jnp.arange(falling.shape[1], dtype=k.dtype)[None, :], falling.shape)
    behind = (rank > 0) & (rank < count)
    before = jnp.roll(falling, 1, axis=1)
    drops = jnp.where(behind, before - jnp.where(behind, falling, 0), 0)
    share = (count - k - rank + 1) / jnp.where(behind, count - rank, 1)
    none_better = jnp.cumprod(jnp.where(behind, jnp.maximum(share, 0), 1), axis=1)
    return _Ranked(drops, none_better, rank, count)


def _against_mean(ranked: _Ranked, k: Array) -> Array:
    del k
    best = -jnp.cumsum(ranked.none_better * ranked.drops, axis=1)
    total = jnp.sum(jnp.where(ranked.rank < ranked.samples, best, 0), axis=1, keepdims=True)
    return best - total / jnp.maximum(ranked.samples, 1)


def _against_others(ranked: _Ranked, k: Array) -> Array:
    """Compare with k others, for whose subsets q_m is q_m (n-k-m) / (n-k)."""
    others = ranked.samples - k
    share = 1 / jnp.where(others > 0, others, 1)
    lost = jnp.cumsum(ranked.none_better * ranked.rank * share * ranked.drops, axis=1)
    none_better = ranked.none_better * (others - ranked.rank) * share
    return jnp.where(others > 0, _gained(none_better, ranked.drops) - lost, 0)


def _against_one_less(ranked: _Ranked, k: Array) -> Array:
    return jnp.where(k >= 2, _gained(ranked.none_better, ranked.drops), 0)


def _gained(none_better: Array, drops: Array) -> Array:
    """Sum over the samples behind each one: how far the best of a subset of them lies below it."""
    gains = jnp.roll(none_better, 1, axis=1) * drops
    inclusive = jax.lax.cumsum(gains, axis=1, reverse=True)
    return jnp.roll(inclusive.at[:, 0].set(0), -1, axis=1)


_BASELINES = {
    "mean": _against_mean,
    "leave_one_out": _against_others,
    "leave_one_out_minus_one": _against_one_less,
}
