"""Importance ratios of the policy to the one that drew the tokens, as logarithms."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from twinkle_jax.loss.masked_inputs import Coefficient, Mask, PerToken, masked_inputs

MAX_LOG_RATIO = 20.0  # exp(20) is 4.9e8, finite in float32 after any realistic advantage


def bounded(log_ratio: PerToken) -> PerToken:
    """Clamp a log-ratio to ±20, so that its exponential and the gradient stay finite."""
    return jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip_bounds(
    epsilon: Coefficient, epsilon_high: Coefficient | None, dtype: DTypeLike
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the lowest and the highest ratio that is not clipped."""
    high = epsilon if epsilon_high is None else epsilon_high
    return jnp.asarray(1 - epsilon, dtype), jnp.asarray(1 + high, dtype)


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
    log_ratio = token_log_ratio(logprobs, behaviour_logprobs, mask)
    length = jnp.sum(mask, axis=-1, keepdims=True, dtype=log_ratio.dtype)
    mean = jnp.sum(log_ratio, axis=-1, keepdims=True) / jnp.maximum(length, 1)
    return jnp.where(mask, mean, 0)
