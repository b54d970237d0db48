"""Weights that correct for a sampler whose probabilities are not quite the trainer's."""

import jax
import jax.numpy as jnp

from twinkle_jax.loss.masked_inputs import Mask, PerToken, Scalar, masked_inputs
from twinkle_jax.loss.ratio import bounded


def truncated_importance_weights(
    behaviour_logprobs: PerToken, sampler_logprobs: PerToken, mask: Mask, *, maximum: Scalar = 2.0
) -> PerToken:
    r"""Weights that correct for a sampler whose probabilities differ from the trainer's.

    $$w_t = \min\left(\frac{\mu_{trainer}(a_t)}{\mu_{sampler}(a_t)},\ C\right)$$

    Multiply the losses per token by them. Both log-probabilities are of the same weights: one
    computed by the trainer, one reported by the sampler (another kernel, another precision).

    Args:
        behaviour_logprobs: $\log \mu_{trainer}$, in nats; receives no gradient.
        sampler_logprobs: $\log \mu_{sampler}$, in nats; receives no gradient.
        mask: True where the policy chose the token. Padding may hold anything.
        maximum: $C$, above 0; 2 is the usual choice.

    Returns:
        Weight per token, zero where masked out. No gradient flows through it.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-probability is not floating point, or the mask not boolean.

    References:
        [Your Efficient RL Framework Secretly Brings You Off-Policy RL
        Training](https://fengyao.notion.site/off-policy-rl) (Yao et al., 2025)

    Example:
        >>> trainer, sampler = jnp.array([-1.0, -1.0]), jnp.array([-1.0, -9.0])
        >>> truncated_importance_weights(trainer, sampler, jnp.array([True, True]))
        Array([1., 2.], dtype=float32)
    """
    log_ratio = _sampler_log_ratio(behaviour_logprobs, sampler_logprobs, mask)
    weights = jnp.minimum(jnp.exp(log_ratio), jnp.asarray(maximum, log_ratio.dtype))
    return jnp.where(mask, weights, 0)


def masked_importance_weights(
    behaviour_logprobs: PerToken,
    sampler_logprobs: PerToken,
    mask: Mask,
    *,
    minimum: Scalar = 0.5,
    maximum: Scalar = 5.0,
) -> PerToken:
    r"""Weights that correct for the sampler, token by token, and drop tokens that are far off.

    $$w_t = \rho_t\,[\alpha \le \rho_t \le \beta], \qquad
    \rho_t = \frac{\mu_{trainer}(a_t)}{\mu_{sampler}(a_t)}$$

    Multiply the losses per token by them, and reduce with the whole `mask`: a dropped token adds 0
    and still counts. TRL's `token_mask` is this with $\alpha = 0$ and $\beta = 3$.

    Args:
        behaviour_logprobs: $\log \mu_{trainer}$, in nats; receives no gradient.
        sampler_logprobs: $\log \mu_{sampler}$, in nats; receives no gradient.
        mask: True where the policy chose the token. Padding may hold anything.
        minimum: $\alpha$, the smallest ratio that is kept.
        maximum: $\beta$, the largest ratio that is kept.

    Returns:
        Weight per token, zero where masked out. No gradient flows through it.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-probability is not floating point, or the mask not boolean.

    References:
        [Every Step Evolves](https://arxiv.org/abs/2510.18855) (Ling Team, 2025), IcePop

    Example:
        >>> trainer, sampler = jnp.array([-1.0, -1.0, -9.0]), jnp.array([-1.0, -9.0, -1.0])
        >>> masked_importance_weights(trainer, sampler, jnp.array([True, True, True]))
        Array([1., 0., 0.], dtype=float32)
    """
    log_ratio = _sampler_log_ratio(behaviour_logprobs, sampler_logprobs, mask)
    return jnp.where(mask, _within(jnp.exp(log_ratio), minimum, maximum), 0)


def masked_sequence_importance_weights(
    behaviour_logprobs: PerToken,
    sampler_logprobs: PerToken,
    mask: Mask,
    *,
    minimum: Scalar = 0.0,
    maximum: Scalar = 3.0,
) -> PerToken:
    r"""Weights that correct for the sampler, one a sequence, and drop sequences that are far off.

    $$w = \rho\,[\alpha \le \rho \le \beta], \qquad
    \rho = \prod_t \frac{\mu_{trainer}(a_t)}{\mu_{sampler}(a_t)}$$

    Multiply the losses per token by them, and reduce with the whole `mask`. The defaults are those
    of TRL, whose `sequence_mask` this is. The product of many ratios leaves every range as
    sequences grow: watch the share of weights that are 0.

    Args:
        behaviour_logprobs: $\log \mu_{trainer}$, in nats; receives no gradient.
        sampler_logprobs: $\log \mu_{sampler}$, in nats; receives no gradient.
        mask: True where the policy chose the token. Padding may hold anything.
        minimum: $\alpha$, the smallest ratio that is kept.
        maximum: $\beta$, the largest ratio that is kept.

    Returns:
        The sequence's weight at each of its tokens, zero where masked out. No gradient flows
        through it.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-probability is not floating point, or the mask not boolean.

    References:
        [When Speed Kills Stability](https://richardli.xyz/rl-collapse) (Liu et al., 2025), masked
        importance sampling over sequences

    Example:
        >>> trainer, sampler = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.25, 0.5]))
        >>> masked_sequence_importance_weights(trainer, sampler, jnp.array([True, True]))
        Array([2., 2.], dtype=float32)
    """
    log_ratio = _sampler_log_ratio(behaviour_logprobs, sampler_logprobs, mask)
    ratio = jnp.exp(bounded(jnp.sum(log_ratio, axis=-1, keepdims=True)))
    return jnp.where(mask, _within(ratio, minimum, maximum), 0)


def _sampler_log_ratio(
    behaviour_logprobs: PerToken, sampler_logprobs: PerToken, mask: Mask
) -> PerToken:
    trainer, sampler = masked_inputs(
        mask, behaviour_logprobs=behaviour_logprobs, sampler_logprobs=sampler_logprobs
    )
    return bounded(jax.lax.stop_gradient(trainer - sampler))


def _within(ratio: PerToken, minimum: Scalar, maximum: Scalar) -> PerToken:
    low, high = jnp.asarray(minimum, ratio.dtype), jnp.asarray(maximum, ratio.dtype)
    outside = (ratio < low) | (ratio > high)  # a ratio that is not a number is neither, and stays
    return jnp.where(outside, 0, ratio)
