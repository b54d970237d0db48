"""Importance weights for a sampler whose log-probabilities differ from the trainer's.

The sampler and the trainer have the same weights, but other kernels, shapes and precisions. Each
function has a level (one weight per token, or one per sequence) and a way to bound it (truncate, or
mask, which drops what is out of range). `ImportanceCorrection` is any of them, for a loss object.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from twinkle_jax.loss.masked_inputs import Coefficient, Mask, PerToken, masked_inputs
from twinkle_jax.loss.ratio import bounded

CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
"""What an `ImportanceCorrection` weighs, and what it does with weights above its cap."""

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
