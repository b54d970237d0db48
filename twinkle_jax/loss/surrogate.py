"""The clipped surrogate of PPO and GRPO, with dual clip and two-sided clip."""

import jax.numpy as jnp

from twinkle_jax.loss.masked_inputs import (
    Advantages,
    Mask,
    PerToken,
    Scalar,
    masked_advantages,
    masked_inputs,
)
from twinkle_jax.loss.ratio import bounded, clip_bounds


def clipped_surrogate(
    log_ratio: PerToken,
    advantages: Advantages,
    mask: Mask,
    *,
    epsilon: Scalar = 0.2,
    epsilon_high: Scalar | None = None,
    dual_clip: Scalar | None = None,
) -> PerToken:
    r"""Loss of PPO and GRPO: no reward for moving further than the clip range.

    $$\ell_t = -\min\left(r_t A_t,\ \mathrm{clip}(r_t, 1-\epsilon, 1+\epsilon_{high}) A_t\right)$$

    With `dual_clip` the loss of a token with a negative advantage is at most $c\,|A_t|$.
    With `sequence_log_ratio` in place of `token_log_ratio` this is the loss of GSPO.
    `dual_clip` is also the two-sided clip of INTELLECT-2 ($\delta$; TRL's `delta`): above
    $1 + \epsilon_{high}$ both say the same.

    Args:
        log_ratio: $\log r_t$ from `token_log_ratio` or `sequence_log_ratio`.
        advantages: $A$, one a sequence or one a token; receives no gradient.
        mask: True where the policy chose the token. Padding may hold anything.
        epsilon: how far the ratio may fall below 1, in [0, 1].
        epsilon_high: how far it may rise above 1; `epsilon` if None.
        dual_clip: $c$, above $1 + \epsilon_{high}$; 3 is the usual choice, None leaves it out.

    Returns:
        Loss per token, zero where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if `log_ratio` is not floating point, or the mask not boolean.

    References:
        [Proximal Policy Optimization](https://arxiv.org/abs/1707.06347) (Schulman et al., 2017);
        [DeepSeekMath](https://arxiv.org/abs/2402.03300) (Shao et al., 2024), GRPO;
        [DAPO](https://arxiv.org/abs/2503.14476) (Yu et al., 2025), for $\epsilon_{high}$;
        [Mastering Complex Control in MOBA Games](https://arxiv.org/abs/1912.09729) (Ye et al.,
        2019), dual clip;
        [INTELLECT-2](https://arxiv.org/abs/2505.07291) (Prime Intellect, 2025), two-sided clip

    Example:
        >>> log_ratio, mask = jnp.log(jnp.array([2.0, 0.5])), jnp.array([True, True])
        >>> clipped_surrogate(log_ratio, jnp.array(1.0), mask, epsilon=0.25)
        Array([-1.25, -0.5 ], dtype=float32)
    """
    (log_ratio,) = masked_inputs(mask, log_ratio=log_ratio)
    advantages = masked_advantages(advantages, mask, log_ratio.dtype)
    ratio = jnp.exp(bounded(log_ratio))
    low, high = clip_bounds(epsilon, epsilon_high, ratio.dtype)
    ceiling = jnp.asarray(jnp.inf if dual_clip is None else dual_clip, ratio.dtype)
    # Bounds by selection, not by min and max, whose gradient is halved where both are equal.
    rising = advantages > 0
    above, below = ratio > jnp.where(rising, high, ceiling), ~rising & (ratio < low)
    ratio = jnp.where(above, jnp.where(rising, high, ceiling), jnp.where(below, low, ratio))
    return jnp.where(mask, -ratio * advantages, 0)
