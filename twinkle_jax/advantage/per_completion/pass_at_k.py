"""Pass@k training: the advantage of a sample as a member of all subsets of k samples."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from twinkle_jax.advantage.estimate import check_subset_size, estimate, in_rows
from twinkle_jax.advantage.estimators import FunctionAdvantage
from twinkle_jax.advantage.groups import Samples
from twinkle_jax.advantage.inputs import ArrayLike, Scalar


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
