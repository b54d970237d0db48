"""Metrics of a policy step, of pairs, and of the sampler against the trainer; no gradient."""

from dataclasses import dataclass, fields
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from twinkle_jax.loss.per_token import (
    Advantages,
    Coefficient,
    Mask,
    PerToken,
    checked_mask,
    masked_advantages,
    masked_inputs,
    token_mean,
)
from twinkle_jax.loss.surrogate import bounded, clip_bounds


class PolicyMetrics(NamedTuple):
    """Metrics of one policy step, over the unmasked tokens."""

    clip_fraction_low: Float[Array, ""]
    """Share of tokens without a gradient because their ratio fell below the clip range."""
    clip_fraction_high: Float[Array, ""]
    """Share of tokens without a gradient because their ratio rose above the clip range.

    Of `CISPOLoss`: the share of tokens whose weight is clipped; they keep a gradient.
    """
    approximate_kl: Float[Array, ""]
    """Estimate (k3) of the divergence of the trained policy from the behaviour policy, in nats."""
    entropy: Float[Array, ""] | None
    """Mean entropy of the policy, in nats; None without entropies."""
    ratio_min: Float[Array, ""]
    """Smallest importance ratio; 1 if all tokens are masked."""
    ratio_max: Float[Array, ""]
    """Largest importance ratio; 1 if all tokens are masked."""


class PreferenceMetrics(NamedTuple):
    """Implicit rewards of DPO, averaged over pairs."""

    chosen_reward: Float[Array, ""]
    """Mean reward of the chosen sequences."""
    rejected_reward: Float[Array, ""]
    """Mean reward of the rejected ones."""
    margin: Float[Array, ""]
    """Mean difference of the two."""
    accuracy: Float[Array, ""]
    """Share of pairs whose chosen sequence has the higher reward."""


def policy_metrics(
    log_ratio: PerToken,
    advantages: Advantages | None,
    mask: Mask,
    *,
    epsilon: Coefficient = 0.2,
    epsilon_high: Coefficient | None = None,
    entropies: PerToken | None = None,
    denominator: Coefficient | None = None,
) -> PolicyMetrics:
    r"""Compute the metrics of a policy step.

    $$\text{low} = \overline{[r_t < 1-\epsilon,\ A_t < 0]}, \quad
    \text{high} = \overline{[r_t > 1+\epsilon_{high},\ A_t > 0]}, \quad
    \text{KL} = \overline{r_t - 1 - \log r_t}$$

    with a bar for the mean over unmasked tokens. The means of micro-batches add up when the
    `denominator` of the whole batch is passed.

    Args:
        log_ratio: $\log r_t$ from `token_log_ratio` or `sequence_log_ratio`.
        advantages: $A$, one a sequence or one a token; None to count clips of either sign.
        mask: True where the policy chose the token. Padding may hold anything.
        epsilon: how far the ratio may fall below 1.
        epsilon_high: how far it may rise above 1; `epsilon` if None.
        entropies: entropy of the policy at each token, in nats.
        denominator: unmasked tokens of the whole batch; those in `mask` if None.

    Returns:
        The metrics, without gradient; fractions, divergence and entropy are 0 if all is masked.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if an array is not floating point, or the mask not boolean.

    References:
        [Proximal Policy Optimization](https://arxiv.org/abs/1707.06347) (Schulman et al., 2017);
        [Approximating KL Divergence](http://joschu.net/blog/kl-approx.html) (Schulman, 2020)

    Example:
        >>> log_ratio, mask = jnp.log(jnp.array([2.0, 0.5])), jnp.array([True, True])
        >>> metrics = policy_metrics(log_ratio, jnp.array(1.0), mask)
        >>> print(metrics.clip_fraction_low, metrics.clip_fraction_high, metrics.ratio_max)
        0.0 0.5 2.0
    """
    mask = checked_mask(mask)
    (log_ratio,) = masked_inputs(mask, log_ratio=log_ratio)
    log_ratio = jax.lax.stop_gradient(bounded(log_ratio))
    ratio = jnp.exp(log_ratio)
    low, high = clip_bounds(epsilon, epsilon_high, ratio.dtype)
    below, above = ratio < low, ratio > high
    if advantages is not None:
        advantages = masked_advantages(advantages, mask, ratio.dtype)
        below, above = below & (advantages < 0), above & (advantages > 0)

    if entropies is not None:
        (entropies,) = masked_inputs(mask, entropies=entropies)

    def mean(values: PerToken) -> Float[Array, ""]:
        return token_mean(values.astype(ratio.dtype), mask, denominator=denominator)

    all_masked = ~jnp.any(mask)
    return PolicyMetrics(
        clip_fraction_low=mean(below),
        clip_fraction_high=mean(above),
        approximate_kl=mean(jnp.expm1(log_ratio) - log_ratio),
        entropy=None if entropies is None else jax.lax.stop_gradient(mean(entropies)),
        ratio_min=jnp.where(all_masked, 1, jnp.min(ratio, where=mask, initial=jnp.inf)),
        ratio_max=jnp.where(all_masked, 1, jnp.max(ratio, where=mask, initial=-jnp.inf)),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerMismatch:
    """Sums over tokens and sequences, from which the mismatch of sampler and trainer is computed.

    Add those of micro-batches with `+`; `metrics` divides at the end, so that the size of a
    micro-batch changes nothing. A pytree of scalars.

    Attributes:
        tokens: unmasked tokens.
        sequences: sequences with an unmasked token.
        absolute_sum: sum of the absolute differences of log-probabilities.
        absolute_max: largest of them.
        outside: tokens whose ratio is outside the band.
        kl_sum: sum of the estimates of the divergence.
        ratio_sum: sum of the ratios of tokens.
        ratio_square_sum: sum of their squares.
        sequence_ratio_sum: sum of the ratios of sequences.
        sequence_ratio_square_sum: sum of their squares.
    """

    tokens: Float[Array, ""]
    sequences: Float[Array, ""]
    absolute_sum: Float[Array, ""]
    absolute_max: Float[Array, ""]
    outside: Float[Array, ""]
    kl_sum: Float[Array, ""]
    ratio_sum: Float[Array, ""]
    ratio_square_sum: Float[Array, ""]
    sequence_ratio_sum: Float[Array, ""]
    sequence_ratio_square_sum: Float[Array, ""]

    def __add__(self, other: "SamplerMismatch") -> "SamplerMismatch":
        """Combine two micro-batches."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        sums["absolute_max"] = jnp.maximum(self.absolute_max, other.absolute_max)
        return SamplerMismatch(**sums)

    def metrics(self) -> dict[str, Float[Array, ""]]:
        """Divide the sums.

        Returns:
            `logp_diff/mean` and `logp_diff/max`, in nats; `ratio_outside`, share of tokens whose
            ratio is outside the band; `mismatch_kl`, in nats per token; `token_sample_size` and
            `sequence_sample_size`, the effective sample sizes as shares. Without
            a token the sample sizes are 1 and all others 0.
        """

        def mean(total: Float[Array, ""]) -> Float[Array, ""]:
            return total / jnp.maximum(self.tokens, 1)

        def sample_size(
            total: Float[Array, ""], squares: Float[Array, ""], count: Float[Array, ""]
        ) -> Float[Array, ""]:
            size = jnp.square(total) / jnp.where(count == 0, 1, count * squares)
            return jnp.where(count == 0, 1, size)

        return {
            "logp_diff/mean": mean(self.absolute_sum),
            "logp_diff/max": self.absolute_max,
            "ratio_outside": mean(self.outside),
            "mismatch_kl": mean(self.kl_sum),
            "token_sample_size": sample_size(self.ratio_sum, self.ratio_square_sum, self.tokens),
            "sequence_sample_size": sample_size(
                self.sequence_ratio_sum, self.sequence_ratio_square_sum, self.sequences
            ),
        }


def sampler_mismatch(
    logprobs: PerToken,
    sampler_logprobs: PerToken,
    mask: Mask,
    *,
    minimum: Coefficient = 0.9,
    maximum: Coefficient = 1.1,
) -> SamplerMismatch:
    r"""Compare the trainer's log-probabilities with the sampler's, both of the same weights.

    $$\overline{|\log \rho_t|}, \quad \max_t |\log \rho_t|, \quad
    \overline{[\rho_t < \alpha \text{ or } \rho_t > \beta]}, \quad
    \overline{\rho_t - 1 - \log \rho_t}, \quad \frac{(\sum w)^2}{n \sum w^2}, \qquad
    \rho_t = \frac{\mu_{trainer}(a_t)}{\mu_{sampler}(a_t)}$$

    The fourth estimates the divergence of the sampler from the trainer. The last is the effective
    sample size, as a share: of tokens with $w = \rho_t$, and of sequences with
    $w = \prod_t \rho_t$. Judge a run by the means, not by the largest token: in bfloat16, 0.5 nats
    at a single token are common in healthy runs.

    Args:
        logprobs: $\log \mu_{trainer}$, in nats.
        sampler_logprobs: $\log \mu_{sampler}$, in nats.
        mask: True where the policy chose the token. Padding may hold anything.
        minimum: $\alpha$, where the band of ratios begins.
        maximum: $\beta$, where it ends.

    Returns:
        Sums, without gradient, to be added over micro-batches. Exponents are clamped to ±20.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-probability is not floating point, or the mask not boolean.

    References:
        [Your Efficient RL Framework Secretly Brings You Off-Policy RL
        Training](https://fengyao.notion.site/off-policy-rl) (Yao et al., 2025);
        [Approximating KL Divergence](http://joschu.net/blog/kl-approx.html) (Schulman, 2020), k3

    Example:
        >>> trainer, sampler = jnp.log(jnp.array([[0.5, 0.25]])), jnp.log(jnp.array([[0.5, 0.5]]))
        >>> mismatch = sampler_mismatch(trainer, sampler, jnp.array([[True, True]]))
        >>> print(mismatch.metrics()["ratio_outside"], mismatch.metrics()["token_sample_size"])
        0.5 0.9
    """
    mask = checked_mask(mask)
    trainer, sampler = masked_inputs(mask, logprobs=logprobs, sampler_logprobs=sampler_logprobs)
    difference = jax.lax.stop_gradient(trainer - sampler)
    log_ratio = bounded(difference)
    ratio = jnp.exp(log_ratio)
    low, high = jnp.asarray(minimum, ratio.dtype), jnp.asarray(maximum, ratio.dtype)
    has_token = jnp.any(mask, axis=-1)
    sequence_ratio = jnp.exp(bounded(jnp.sum(log_ratio, axis=-1)))

    def total(values: PerToken, where: Mask = mask) -> Float[Array, ""]:
        return jnp.sum(values, where=where, dtype=ratio.dtype)

    return SamplerMismatch(
        tokens=total(mask),
        sequences=total(has_token, has_token),
        absolute_sum=total(jnp.abs(difference)),
        absolute_max=jnp.max(jnp.abs(difference), where=mask, initial=0),
        outside=total((ratio < low) | (ratio > high)),
        kl_sum=total(jnp.expm1(log_ratio) - log_ratio),
        ratio_sum=total(ratio),
        ratio_square_sum=total(jnp.square(ratio)),
        sequence_ratio_sum=total(sequence_ratio, has_token),
        sequence_ratio_square_sum=total(jnp.square(sequence_ratio), has_token),
    )
