"""Weights and masks for tokens that were drawn by another policy than the one being trained.

Importance weights correct for a sampler that has the trainer's weights but other kernels, shapes
and precisions. Each function has a level (one weight per token, or one per sequence) and a way to
bound it (truncate, or mask, which drops what is out of range). `ImportanceCorrection` is any of
them, for a loss object. Trust-region masks leave out tokens and sequences that have moved too far
from the behaviour policy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from twinkle_jax.loss.per_token import (
    Advantages,
    Coefficient,
    Mask,
    PerToken,
    masked_advantages,
    masked_inputs,
)
from twinkle_jax.loss.surrogate import bounded

CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
"""Whether an `ImportanceCorrection` weighs tokens or sequences, and caps or drops them."""

Correction = Callable[[PerToken, PerToken, Mask], PerToken]
"""Weights per token from the trainer's log-probabilities, the sampler's, and the mask."""


def truncated_importance_weights(
    behaviour_logprobs: PerToken,
    sampler_logprobs: PerToken,
    mask: Mask,
    *,
    maximum: Coefficient = 2.0,
) -> PerToken:
    r"""Correct for the sampler, token by token, with weights of at most $C$.

    $$w_t = \min\left(\frac{\mu_{trainer}(a_t)}{\mu_{sampler}(a_t)},\ C\right)$$

    Multiply the losses per token by the weights.

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
    minimum: Coefficient = 0.5,
    maximum: Coefficient = 5.0,
) -> PerToken:
    r"""Correct for the sampler, token by token, and drop tokens whose ratio is out of range.

    $$w_t = \rho_t\,[\alpha \le \rho_t \le \beta], \qquad
    \rho_t = \frac{\mu_{trainer}(a_t)}{\mu_{sampler}(a_t)}$$

    Multiply the losses per token by the weights, and reduce with the original `mask`: a dropped
    token adds 0 and still counts. TRL's `token_mask` is this with $\alpha = 0$ and $\beta = 3$.

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


def truncated_sequence_importance_weights(
    behaviour_logprobs: PerToken,
    sampler_logprobs: PerToken,
    mask: Mask,
    *,
    maximum: Coefficient = 2.0,
) -> PerToken:
    r"""Correct for the sampler, sequence by sequence, with weights of at most $C$.

    $$w = \min\left(\prod_t \frac{\mu_{trainer}(a_t)}{\mu_{sampler}(a_t)},\ C\right)$$

    Multiply the losses per token by the weights. The product is unbiased where single ratios are
    not, since later tokens depend on earlier ones, and its variance grows with the length.

    Args:
        behaviour_logprobs: $\log \mu_{trainer}$, in nats; receives no gradient.
        sampler_logprobs: $\log \mu_{sampler}$, in nats; receives no gradient.
        mask: True where the policy chose the token. Padding may hold anything.
        maximum: $C$, above 0; 2 to 5 are usual.

    Returns:
        The sequence's weight at each of its tokens, zero where masked out. No gradient flows
        through it.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-probability is not floating point, or the mask not boolean.

    References:
        [When Speed Kills Stability](https://richardli.xyz/rl-collapse) (Liu et al., 2025),
        truncated importance sampling over sequences

    Example:
        >>> trainer, sampler = jnp.log(jnp.array([0.5, 0.75])), jnp.log(jnp.array([0.5, 0.5]))
        >>> truncated_sequence_importance_weights(trainer, sampler, jnp.array([True, True]))
        Array([1.5, 1.5], dtype=float32)
    """
    ratio = _sequence_ratio(behaviour_logprobs, sampler_logprobs, mask)
    return jnp.where(mask, jnp.minimum(ratio, jnp.asarray(maximum, ratio.dtype)), 0)


def masked_sequence_importance_weights(
    behaviour_logprobs: PerToken,
    sampler_logprobs: PerToken,
    mask: Mask,
    *,
    minimum: Coefficient = 0.0,
    maximum: Coefficient = 3.0,
) -> PerToken:
    r"""Correct for the sampler, sequence by sequence, and drop those whose ratio is out of range.

    $$w = \rho\,[\alpha \le \rho \le \beta], \qquad
    \rho = \prod_t \frac{\mu_{trainer}(a_t)}{\mu_{sampler}(a_t)}$$

    Multiply the losses per token by the weights, and reduce with the original `mask`. The defaults
    are those of TRL, whose `sequence_mask` this is. The longer the sequences, the more products
    leave the range: watch `sequence_sample_size` of `sampler_mismatch`.

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
    ratio = _sequence_ratio(behaviour_logprobs, sampler_logprobs, mask)
    return jnp.where(mask, _within(ratio, minimum, maximum), 0)


@dataclass(frozen=True)
class ImportanceCorrection:
    """One of the corrections for the sampler, as `PolicyLoss` objects take it.

    Immutable, equal when its fields are, and hashable.

    Args:
        mode: `'token_truncate'` and `'sequence_truncate'` lower weights to the cap; `'token_mask'`
            and `'sequence_mask'` drop tokens or sequences whose ratio is not in [floor, cap].
        cap: the largest weight, above 0. Usual are 2 for tokens, 2 to 5 for sequences, and 3 to 5
            for masks.
        floor: for masks, the smallest ratio that is kept.

    Raises:
        ValueError: if the mode is unknown, or a truncation has a floor.

    References:
        see `truncated_importance_weights`, `masked_importance_weights` and the forms of both for
        sequences, which this calls

    Example:
        >>> correction = ImportanceCorrection("token_mask", cap=3.0)
        >>> trainer, sampler = jnp.array([-1.0, -1.0]), jnp.array([-1.0, -9.0])
        >>> correction(trainer, sampler, jnp.array([True, True]))
        Array([1., 0.], dtype=float32)
    """

    mode: CorrectionMode = "token_truncate"
    cap: Coefficient = 2.0
    floor: Coefficient = 0.0

    def __post_init__(self) -> None:
        if self.mode not in get_args(CorrectionMode):
            known = ", ".join(map(repr, get_args(CorrectionMode)))
            raise ValueError(f"mode must be one of {known}, got {self.mode!r}")
        # A traced floor has no value yet.
        has_floor = isinstance(self.floor, int | float) and self.floor != 0
        if self.mode.endswith("truncate") and has_floor:
            raise ValueError(f"floor must be 0 for mode={self.mode!r}, got {self.floor}")

    def __call__(
        self, behaviour_logprobs: PerToken, sampler_logprobs: PerToken, mask: Mask
    ) -> PerToken:
        """Compute the weights: see `truncated_importance_weights` and the other functions."""
        weights: dict[CorrectionMode, Callable[..., PerToken]] = {
            "token_truncate": truncated_importance_weights,
            "token_mask": partial(masked_importance_weights, minimum=self.floor),
            "sequence_truncate": truncated_sequence_importance_weights,
            "sequence_mask": partial(masked_sequence_importance_weights, minimum=self.floor),
        }
        return weights[self.mode](behaviour_logprobs, sampler_logprobs, mask, maximum=self.cap)


def _sampler_log_ratio(
    behaviour_logprobs: PerToken, sampler_logprobs: PerToken, mask: Mask
) -> PerToken:
    trainer, sampler = masked_inputs(
        mask, behaviour_logprobs=behaviour_logprobs, sampler_logprobs=sampler_logprobs
    )
    return bounded(jax.lax.stop_gradient(trainer - sampler))


def _sequence_ratio(
    behaviour_logprobs: PerToken, sampler_logprobs: PerToken, mask: Mask
) -> PerToken:
    """Multiply the ratios of each sequence; the time axis of the result has length 1."""
    log_ratio = _sampler_log_ratio(behaviour_logprobs, sampler_logprobs, mask)
    return jnp.exp(bounded(jnp.sum(log_ratio, axis=-1, keepdims=True)))


def _within(ratio: PerToken, minimum: Coefficient, maximum: Coefficient) -> PerToken:
    low, high = jnp.asarray(minimum, ratio.dtype), jnp.asarray(maximum, ratio.dtype)
    outside = (ratio < low) | (ratio > high)  # False for NaN, which stays visible
    return jnp.where(outside, 0, ratio)


SMALLEST_COMPLEMENT = 1e-8  # 1 - probability, so that its logarithm is finite


def total_variation_mask(
    logprobs: PerToken,
    behaviour_logprobs: PerToken,
    advantages: Advantages,
    mask: Mask,
    *,
    delta: Coefficient = 0.15,
    delta_high: Coefficient | None = None,
) -> Mask:
    r"""Keep tokens whose probability has not moved too far in the direction of the advantage.

    $$\text{dropped:}\quad \pi_t - \mu_t > \delta_{high} \text{ if } A_t > 0, \qquad
    \mu_t - \pi_t > \delta \text{ otherwise}$$

    $|\pi_t - \mu_t|$ is the total variation of the two policies if all other tokens are taken as
    one. Unlike a clipped ratio, it lets rare tokens move and restrains frequent ones. Apply the
    result to the unclipped surrogate, and reduce with the original `mask`: a dropped token adds 0
    and still counts.

    Args:
        logprobs: $\log \pi$, under the policy being trained, in nats.
        behaviour_logprobs: $\log \mu$, under the policy that drew the tokens.
        advantages: $A$, one a sequence or one a token.
        mask: True where the policy chose the token. Padding may hold anything.
        delta: how far a probability may fall.
        delta_high: how far it may rise; `delta` if None.

    Returns:
        True where the token counts; False where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-probability is not floating point, or the mask not boolean.

    References:
        [Rethinking the Trust Region in LLM Reinforcement
        Learning](https://arxiv.org/abs/2602.04879) (Qi et al., 2026), DPPO

    Example:
        >>> new, old = jnp.log(jnp.array([0.75, 0.75])), jnp.log(jnp.array([0.5, 0.5]))
        >>> total_variation_mask(new, old, jnp.array([1.0, -1.0]), jnp.array([True, True]))
        Array([False,  True], dtype=bool)
    """
    new, old, rising = _inputs(logprobs, behaviour_logprobs, advantages, mask)
    rise = jnp.exp(new) - jnp.exp(old)
    return _kept(rise, jnp.abs(rise), rising, mask, delta, delta_high)


def binary_kl_mask(
    logprobs: PerToken,
    behaviour_logprobs: PerToken,
    advantages: Advantages,
    mask: Mask,
    *,
    delta: Coefficient = 0.05,
    delta_high: Coefficient | None = None,
) -> Mask:
    r"""Keep tokens whose divergence is small, or that moved against the advantage.

    $$\text{dropped:}\quad D_t > \delta_{high},\ \pi_t > \mu_t \text{ if } A_t > 0, \qquad
    D_t > \delta,\ \pi_t < \mu_t \text{ otherwise}$$
    $$D_t = \mu_t \log \frac{\mu_t}{\pi_t} + (1-\mu_t) \log \frac{1-\mu_t}{1-\pi_t}$$

    $D_t$ is the divergence of the two policies if all other tokens are taken as one. Use it like
    `total_variation_mask`.

    Args:
        logprobs: $\log \pi$, under the policy being trained, in nats.
        behaviour_logprobs: $\log \mu$, under the policy that drew the tokens.
        advantages: $A$, one a sequence or one a token.
        mask: True where the policy chose the token. Padding may hold anything.
        delta: the largest divergence of a token whose probability fell, in nats.
        delta_high: the largest one of a token whose probability rose; `delta` if None.

    Returns:
        True where the token counts; False where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-probability is not floating point, or the mask not boolean.

    References:
        [Rethinking the Trust Region in LLM Reinforcement
        Learning](https://arxiv.org/abs/2602.04879) (Qi et al., 2026), DPPO

    Example:
        >>> new, old = jnp.log(jnp.array([0.75, 0.75])), jnp.log(jnp.array([0.5, 0.5]))
        >>> binary_kl_mask(new, old, jnp.array([1.0, -1.0]), jnp.array([True, True]))
        Array([False,  True], dtype=bool)
    """
    new, old, rising = _inputs(logprobs, behaviour_logprobs, advantages, mask)
    others = jnp.log(_complement(old) / _complement(new))
    divergence = jnp.exp(old) * (old - new) + _complement(old) * others
    return _kept(new - old, divergence, rising, mask, delta, delta_high)


def _inputs(
    logprobs: PerToken, behaviour_logprobs: PerToken, advantages: Advantages, mask: Mask
) -> tuple[PerToken, PerToken, Mask]:
    new, old = masked_inputs(mask, logprobs=logprobs, behaviour_logprobs=behaviour_logprobs)
    rising = masked_advantages(advantages, mask, new.dtype) > 0
    return jax.lax.stop_gradient(new), jax.lax.stop_gradient(old), rising


def _complement(logprobs: PerToken) -> PerToken:
    """Return the probability of all other tokens."""
    return jnp.maximum(-jnp.expm1(logprobs), SMALLEST_COMPLEMENT)


def _kept(
    rise: PerToken,
    distance: PerToken,
    rising: Mask,
    mask: Mask,
    delta: Coefficient,
    delta_high: Coefficient | None,
) -> Mask:
    low = jnp.asarray(delta, distance.dtype)
    high = low if delta_high is None else jnp.asarray(delta_high, distance.dtype)
    too_far = jnp.where(rising, (rise > 0) & (distance > high), (rise < 0) & (distance > low))
    return mask & ~too_far


def off_policy_sequence_mask(
    logprobs: PerToken,
    sampler_logprobs: PerToken,
    advantages: Advantages,
    mask: Mask,
    *,
    delta: Coefficient,
) -> Mask:
    r"""Drop off-policy sequences with a negative advantage (DeepSeek-V3.2).

    $$\text{dropped:}\quad A < 0 \ \text{ and }\
    \frac{1}{T} \sum_{t=1}^{T} \log \frac{\mu_t}{\pi_t} > \delta$$

    The divergence covers the updates since the rollout as well as the mismatch of sampler and
    trainer. Apply the result to the losses per token, and reduce with the original `mask`: a
    dropped token adds 0 and still counts.

    Args:
        logprobs: $\log \pi$, under the policy being trained, in nats.
        sampler_logprobs: $\log \mu$, as the sampler reported them, in nats.
        advantages: $A$, one a sequence, or one a token, which then decides for its token alone.
        mask: True where the policy chose the token. Padding may hold anything.
        delta: the largest divergence of a sequence with a negative advantage, in nats per token.

    Returns:
        True where the token counts; False where masked out.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-probability is not floating point, or the mask not boolean.

    References:
        [DeepSeek-V3.2](https://arxiv.org/abs/2512.02556) (DeepSeek-AI, 2025), section 3.1

    Example:
        >>> new, sampler = jnp.full((2, 2), -2.0), jnp.full((2, 2), -1.0)
        >>> mask, advantages = jnp.ones((2, 2), bool), jnp.array([1.0, -1.0])
        >>> off_policy_sequence_mask(new, sampler, advantages, mask, delta=0.5)
        Array([[ True,  True],
               [False, False]], dtype=bool)
    """
    new, sampler = masked_inputs(mask, logprobs=logprobs, sampler_logprobs=sampler_logprobs)
    negative = masked_advantages(advantages, mask, new.dtype) < 0
    length = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True, dtype=new.dtype), 1)
    divergence = jnp.sum(jax.lax.stop_gradient(sampler - new), axis=-1, keepdims=True) / length
    return mask & ~(negative & (divergence > jnp.asarray(delta, new.dtype)))
