"""Importance ratios (as logarithms), and the losses per token of a policy that use them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from twinkle_jax.loss.per_token import (
    Advantages,
    Coefficient,
    Mask,
    PerToken,
    masked_advantages,
    masked_inputs,
)

MAX_LOG_RATIO = 20.0  # exp(20) is 4.9e8, finite in float32 after any realistic advantage


def bounded(log_ratio: PerToken) -> PerToken:
    """Clamp a log-ratio to ±20, so that its exponential and the gradient stay finite."""
    return jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip_bounds(
    epsilon: Coefficient, epsilon_high: Coefficient | None, dtype: DTypeLike
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the lowest and the highest ratio that is not clipped."""
    # Widened first: in bfloat16, 1 + 0.0003 is 1.
    low, high = (
        x if isinstance(x, int | float) else jnp.asarray(x, dtype)
        for x in (epsilon, epsilon if epsilon_high is None else epsilon_high)
    )
    return jnp.asarray(1 - low, dtype), jnp.asarray(1 + high, dtype)


def token_log_ratio(logprobs: PerToken, behaviour_logprobs: PerToken, mask: Mask) -> PerToken:
    r"""Log of the importance ratio of each token.

    $$\rho_t = \log \pi(a_t \mid s_t) - \log \mu(a_t \mid s_t), \quad |\rho_t| \le 20$$

    Pass `logprobs` as `behaviour_logprobs` for an on-policy step: the ratio is 1 and its
    gradient is that of the log-probability.

    Args:
        logprobs: $\log \pi$, under the policy being trained, in nats.
        behaviour_logprobs: $\log \mu$, under the policy that drew the tokens; no gradient.
        mask: True where the policy chose the token. Padding may hold anything.

    Returns:
        Log-ratio per token, clamped to ±20, zero where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-probability is not floating point, or the mask not boolean.

    References:
        [Proximal Policy Optimization](https://arxiv.org/abs/1707.06347) (Schulman et al., 2017)

    Example:
        >>> logprobs = jnp.array([-1.0, -2.0, 7.0])
        >>> behaviour_logprobs = jnp.array([-1.5, -500.0, jnp.nan])
        >>> token_log_ratio(logprobs, behaviour_logprobs, jnp.array([True, True, False]))
        Array([ 0.5, 20. ,  0. ], dtype=float32)
    """
    logprobs, behaviour_logprobs = masked_inputs(
        mask, logprobs=logprobs, behaviour_logprobs=behaviour_logprobs
    )
    return bounded(logprobs - jax.lax.stop_gradient(behaviour_logprobs))


def sequence_log_ratio(logprobs: PerToken, behaviour_logprobs: PerToken, mask: Mask) -> PerToken:
    r"""Log of one importance ratio for the whole sequence, length-normalised (GSPO).

    $$s = \frac{1}{T} \sum_{t=1}^{T} \rho_t$$

    with $\rho_t$ from `token_log_ratio` and $T$ the number of tokens kept. The gradient reaches
    every token of the sequence.

    Args:
        logprobs: $\log \pi$, under the policy being trained, in nats.
        behaviour_logprobs: $\log \mu$, under the policy that drew the tokens; no gradient.
        mask: True where the policy chose the token. Padding may hold anything.

    Returns:
        The sequence's log-ratio at each of its tokens, zero where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-probability is not floating point, or the mask not boolean.

    References:
        [Group Sequence Policy Optimization](https://arxiv.org/abs/2507.18071) (Zheng et al., 2025)

    Example:
        >>> logprobs, behaviour_logprobs = jnp.array([-1.0, -2.0]), jnp.array([-1.5, -1.0])
        >>> sequence_log_ratio(logprobs, behaviour_logprobs, jnp.array([True, True]))
        Array([-0.25, -0.25], dtype=float32)
    """
    return _mean_over_sequence(token_log_ratio(logprobs, behaviour_logprobs, mask), mask)


def _mean_over_sequence(log_ratio: PerToken, mask: Mask) -> PerToken:
    """Average over the tokens of each sequence; at each of them, zero where masked out."""
    length = jnp.sum(mask, axis=-1, keepdims=True, dtype=log_ratio.dtype)
    mean = jnp.sum(log_ratio, axis=-1, keepdims=True) / jnp.maximum(length, 1)
    return jnp.where(mask, mean, 0)


def clipped_surrogate(
    log_ratio: PerToken,
    advantages: Advantages,
    mask: Mask,
    *,
    epsilon: Coefficient = 0.2,
    epsilon_high: Coefficient | None = None,
    dual_clip: Coefficient | None = None,
) -> PerToken:
    r"""Loss of PPO and GRPO: no gain from moving beyond the clip range.

    $$\ell_t = -\min\left(r_t A_t,\ \mathrm{clip}(r_t, 1-\epsilon, 1+\epsilon_{high}) A_t\right)$$

    With `dual_clip` the loss of a token with a negative advantage is at most $c\,|A_t|$.
    With `sequence_log_ratio` in place of `token_log_ratio` this is the loss of GSPO.
    Above $1 + \epsilon_{high}$, `dual_clip` is the two-sided clip of INTELLECT-2 ($\delta$; TRL's
    `delta`).

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
    # Selection instead of min and max, whose gradients are halved at ties.
    rising = advantages > 0
    above, below = ratio > jnp.where(rising, high, ceiling), ~rising & (ratio < low)
    ratio = jnp.where(above, jnp.where(rising, high, ceiling), jnp.where(below, low, ratio))
    return jnp.where(mask, -ratio * advantages, 0)


def clipped_importance_surrogate(
    log_ratio: PerToken,
    logprobs: PerToken,
    advantages: Advantages,
    mask: Mask,
    *,
    epsilon: Coefficient | None = None,
    epsilon_high: Coefficient = 0.2,
) -> PerToken:
    r"""Loss of CISPO: every token keeps its gradient, only its weight is clipped.

    $$\ell_t = -\mathrm{sg}\left[\mathrm{clip}(r_t, 1-\epsilon, 1+\epsilon_{high})\right]
    A_t \log \pi(a_t \mid s_t)$$

    with sg a stopped gradient. The cap of the weight, $1 + \epsilon_{high}$, differs from author to
    author: Twinkle's default is 1.2, ScaleRL uses 5 (`epsilon_high=4`), and in TRL `epsilon_high`
    is the cap itself.

    Args:
        log_ratio: $\log r_t$ from `token_log_ratio`; receives no gradient.
        logprobs: $\log \pi$, under the policy being trained, in nats.
        advantages: $A$, one a sequence or one a token; receives no gradient.
        mask: True where the policy chose the token. Padding may hold anything.
        epsilon: how far the weight may fall below 1; None, the usual choice, for no lower bound.
        epsilon_high: how far the weight may rise above 1.

    Returns:
        Loss per token, zero where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if an array is not floating point, or the mask not boolean.

    References:
        [MiniMax-M1](https://arxiv.org/abs/2506.13585) (MiniMax, 2025), CISPO;
        [The Art of Scaling Reinforcement Learning Compute for LLMs](https://arxiv.org/abs/2510.13786)
        (Khatri et al., 2025), ScaleRL

    Example:
        >>> log_ratio, logprobs = jnp.log(jnp.array([2.0, 0.5])), jnp.array([-1.0, -1.0])
        >>> clipped_importance_surrogate(
        ...     log_ratio, logprobs, jnp.array(1.0), jnp.array([True, True]), epsilon_high=0.25
        ... )
        Array([1.25, 0.5 ], dtype=float32)
    """
    log_ratio, logprobs = masked_inputs(mask, log_ratio=log_ratio, logprobs=logprobs)
    advantages = masked_advantages(advantages, mask, logprobs.dtype)
    low, high = clip_bounds(1.0 if epsilon is None else epsilon, epsilon_high, logprobs.dtype)
    weights = jax.lax.stop_gradient(jnp.clip(jnp.exp(bounded(log_ratio)), low, high))
    return jnp.where(mask, -weights * advantages * logprobs, 0)


def soft_gate_surrogate(
    log_ratio: PerToken,
    advantages: Advantages,
    mask: Mask,
    *,
    tau_pos: Coefficient = 1.0,
    tau_neg: Coefficient = 1.0,
) -> PerToken:
    r"""Loss of SAPO: a sigmoid that fades out where PPO would clip.

    $$\ell_t = -\frac{4}{\tau}\,\sigma\left(\tau (r_t - 1)\right) A_t, \qquad
    \tau = \tau_{pos} \text{ if } A_t > 0 \text{ else } \tau_{neg}$$

    At $r_t = 1$ the gradient is that of the plain policy gradient. The paper takes
    $\tau_{neg} > \tau_{pos}$.

    Args:
        log_ratio: $\log r_t$ from `token_log_ratio`.
        advantages: $A$, one a sequence or one a token; receives no gradient.
        mask: True where the policy chose the token. Padding may hold anything.
        tau_pos: steepness of the gate for positive advantages, above 0.
        tau_neg: steepness of the gate for the others, above 0.

    Returns:
        Loss per token, zero where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if `log_ratio` is not floating point, or the mask not boolean.

    References:
        [Soft Adaptive Policy Optimization](https://arxiv.org/abs/2511.20347) (Gao et al., 2025)

    Example:
        >>> soft_gate_surrogate(jnp.zeros(2), jnp.array([1.0, -0.5]), jnp.array([True, True]))
        Array([-2.,  1.], dtype=float32)
    """
    (log_ratio,) = masked_inputs(mask, log_ratio=log_ratio)
    advantages = masked_advantages(advantages, mask, log_ratio.dtype)
    tau = jnp.where(
        advantages > 0, jnp.asarray(tau_pos, log_ratio.dtype), jnp.asarray(tau_neg, log_ratio.dtype)
    )
    gate = 4 / tau * jax.nn.sigmoid(tau * (jnp.exp(bounded(log_ratio)) - 1))
    return jnp.where(mask, -gate * advantages, 0)


def geometric_mean_surrogate(
    log_ratio: PerToken,
    advantages: Advantages,
    mask: Mask,
    *,
    epsilon: Coefficient = 0.4,
    epsilon_high: Coefficient | None = None,
) -> PerToken:
    r"""Loss of GMPO: the geometric mean of a sequence's ratios, each clipped first.

    $$\ell_t = -A_t \exp\left(\frac{1}{T} \sum_{s=1}^{T} \hat\rho_s\right), \qquad
    \hat\rho_s = \min(\rho_s, \epsilon_{high}) \text{ if } A_s > 0, \quad
    \max(\rho_s, -\epsilon) \text{ otherwise}$$

    with the log-ratios $\rho_s$ of the $T$ tokens of the sequence: the bounds are of logarithms,
    and 0.4 stands for ratios from 0.67 to 1.49. A clipped token has no gradient; the others have an
    equal share of the sequence's. Average with `sequence_mean`, as the paper does.

    Args:
        log_ratio: $\rho$ from `token_log_ratio`.
        advantages: $A$, one a sequence or one a token; receives no gradient.
        mask: True where the policy chose the token. Padding may hold anything.
        epsilon: how far a log-ratio may fall below 0, where the advantage is not positive.
        epsilon_high: how far it may rise above 0, where it is; `epsilon` if None.

    Returns:
        Loss per token, zero where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if `log_ratio` is not floating point, or the mask not boolean.

    References:
        [Geometric-Mean Policy Optimization](https://arxiv.org/abs/2507.20673) (Zhao et al., 2025)

    Example:
        >>> log_ratio, mask = jnp.array([[0.5, -0.5, 9.0]]), jnp.array([[True, True, False]])
        >>> losses = geometric_mean_surrogate(log_ratio, jnp.array([2.0]), mask, epsilon=0.25)
        >>> print([round(loss, 4) for loss in losses[0].tolist()])  # -2 exp((0.25 - 0.5) / 2)
        [-1.765, -1.765, 0.0]
    """
    (log_ratio,) = masked_inputs(mask, log_ratio=log_ratio)
    advantages = masked_advantages(advantages, mask, log_ratio.dtype)
    low = jnp.asarray(epsilon, log_ratio.dtype)
    high = low if epsilon_high is None else jnp.asarray(epsilon_high, log_ratio.dtype)
    clipped = jnp.where(advantages > 0, jnp.minimum(log_ratio, high), jnp.maximum(log_ratio, -low))
    mean = _mean_over_sequence(jnp.where(mask, bounded(clipped), 0), mask)
    return jnp.where(mask, -advantages * jnp.exp(mean), 0)


def gamma_weighted_surrogate(
    log_ratio: PerToken,
    logprobs: PerToken,
    advantages: Advantages,
    mask: Mask,
    *,
    k_pos: Coefficient = 2.0,
    lambda_pos: Coefficient = 3.0,
    k_neg: Coefficient = 3.0,
    lambda_neg: Coefficient = 2.0,
) -> PerToken:
    r"""Loss of VESPO: a smooth weight of the ratio of a whole sequence, in place of a clip.

    $$\ell_t = -\text{sg}\big(\varphi(W)\big) A_t \log \pi_t, \qquad
    \varphi(W) = W^k e^{\lambda (1 - W)}, \qquad \log W = \sum_{s=1}^{T} \rho_s$$

    with sg a stopped gradient, the log-ratios $\rho_s$ of the $T$ tokens of the sequence, and
    $k, \lambda$ by the sign of $A_t$. The weight is 1 on policy, largest at $W = k / \lambda$, and
    falls to 0 for sequences that have become much rarer or much more frequent.

    Args:
        log_ratio: $\rho$ from `token_log_ratio`; receives no gradient.
        logprobs: $\log \pi$, under the policy being trained, in nats.
        advantages: $A$, one a sequence or one a token; receives no gradient.
        mask: True where the policy chose the token. Padding may hold anything.
        k_pos: $k$ for positive advantages: how fast the weight falls with a ratio below 1.
        lambda_pos: $\lambda$ for positive advantages: how fast it falls with a ratio above 1.
        k_neg: $k$ for the others.
        lambda_neg: $\lambda$ for the others.

    Returns:
        Loss per token, zero where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if an array is not floating point, or the mask not boolean.

    References:
        [VESPO](https://arxiv.org/abs/2602.10693) (2026), variational sequence-level soft policy
        optimization

    Example:
        >>> log_ratio, logprobs = jnp.log(jnp.array([[2.0, 0.5]])), jnp.array([[-1.0, -3.0]])
        >>> mask = jnp.array([[True, True]])
        >>> gamma_weighted_surrogate(log_ratio, logprobs, jnp.array([2.0]), mask)  # W = 1
        Array([[2., 6.]], dtype=float32)
    """
    log_ratio, logprobs = masked_inputs(mask, log_ratio=log_ratio, logprobs=logprobs)
    advantages = masked_advantages(advantages, mask, logprobs.dtype)
    total = jnp.sum(bounded(log_ratio), axis=-1, keepdims=True)
    dtype, positive = logprobs.dtype, advantages > 0
    k = jnp.where(positive, jnp.asarray(k_pos, dtype), jnp.asarray(k_neg, dtype))
    rate = jnp.where(positive, jnp.asarray(lambda_pos, dtype), jnp.asarray(lambda_neg, dtype))
    weights = jax.lax.stop_gradient(jnp.exp(k * total + rate * (1 - jnp.exp(total))))
    return jnp.where(mask, -weights * advantages * logprobs, 0)


def policy_gradient(logprobs: PerToken, advantages: Advantages, mask: Mask) -> PerToken:
    r"""Loss of REINFORCE and A2C: the advantage times the log-probability.

    $$\ell_t = -A_t \log \pi(a_t \mid s_t)$$

    Its gradient is the policy gradient when the tokens were drawn from the policy being trained.

    Args:
        logprobs: $\log \pi$, under the policy being trained, in nats.
        advantages: $A$, one a sequence or one a token; receives no gradient.
        mask: True where the policy chose the token. Padding may hold anything.

    Returns:
        Loss per token, zero where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if `logprobs` is not floating point, or the mask not boolean.

    References:
        [REINFORCE](https://doi.org/10.1007/BF00992696) (Williams, 1992);
        [A3C](https://arxiv.org/abs/1602.01783) (Mnih et al., 2016)

    Example:
        >>> logprobs, mask = jnp.array([[-1.0, -2.0]]), jnp.array([[True, True]])
        >>> policy_gradient(logprobs, jnp.array([0.5]), mask)
        Array([[0.5, 1. ]], dtype=float32)
    """
    (logprobs,) = masked_inputs(mask, logprobs=logprobs)
    return jnp.where(mask, -masked_advantages(advantages, mask, logprobs.dtype) * logprobs, 0)
