"""The call that Twinkle's policy losses share: read the batch, compose the functions, reduce."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from twinkle_jax.loss.entropy import entropy_bonus
from twinkle_jax.loss.kl import kl_k3
from twinkle_jax.loss.masked_inputs import Mask, PerToken, Scalar
from twinkle_jax.loss.policy_metrics import PolicyMetrics, policy_metrics
from twinkle_jax.loss.ratio import token_log_ratio
from twinkle_jax.loss.reduction import sequence_mean
from twinkle_jax.loss.surrogate import clipped_surrogate
from twinkle_jax.loss.twinkle.inputs.alignment import SampleValues
from twinkle_jax.loss.twinkle.inputs.known_arguments import refuse_unknown
from twinkle_jax.loss.twinkle.inputs.policy_batch import PolicyBatch, read_policy_batch
from twinkle_jax.loss.twinkle.output import Loss, LossOutput, Unit


class PolicyLoss(Loss):
    """Base of Twinkle's policy losses: three methods say what one of them is made of.

    A subclass brings the five coefficients below as fields, and replaces `log_ratio`,
    `per_token` or `reduce`; with `reduce` it says anew what the loss `divides_by`.
    """

    epsilon: Scalar
    epsilon_high: Scalar | None
    beta: Scalar
    entropy_coef: Scalar
    ignore_index: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "reduce" in vars(cls) and "divides_by" not in vars(cls):
            raise TypeError(
                f"divides_by must be declared beside reduce, got {cls.__name__} without it"
            )

    @property
    def divides_by(self) -> Unit:
        """Sequences, which `reduce` averages over unless a subclass replaces it."""
        return "sequences"

    @property
    def require_entropy(self) -> bool:
        """Whether `outputs['entropies']` is needed: where there is an entropy bonus."""
        return not _is_zero(self.entropy_coef)

    def log_ratio(self, logprobs: PerToken, behaviour_logprobs: PerToken, mask: Mask) -> PerToken:
        """Compare the policy with the one that drew the tokens; by default token by token."""
        return token_log_ratio(logprobs, behaviour_logprobs, mask)

    def per_token(
        self, log_ratio: PerToken, logprobs: PerToken, advantages: PerToken, mask: Mask
    ) -> PerToken:
        """Weigh the tokens; by default with the clipped surrogate."""
        return clipped_surrogate(
            log_ratio, advantages, mask, epsilon=self.epsilon, epsilon_high=self.epsilon_high
        )

    def reduce(self, losses: PerToken, mask: Mask, denominator: Scalar | None) -> Float[Array, ""]:
        """Make one number of them; by default a mean in each sequence, then over sequences."""
        return sequence_mean(losses, mask, denominator=denominator)

    def metrics(
        self, log_ratio: PerToken, advantages: PerToken, mask: Mask, entropies: PerToken | None
    ) -> PolicyMetrics:
        """Summarise the step; by default with the clip range of the clipped surrogate."""
        return policy_metrics(
            log_ratio,
            advantages,
            mask,
            epsilon=self.epsilon,
            epsilon_high=self.epsilon_high,
            entropies=entropies,
        )

    def __call__(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        old_logps: SampleValues | None = None,
        ref_logps: SampleValues | None = None,
        advantages: SampleValues | None = None,
        denominator: Scalar | None = None,
        **kwargs: Any,
    ) -> LossOutput:
        """Compute the loss of a batch, and what to log about it.

        Args:
            inputs: `labels` [batch, time]: at each position the token that `outputs` is about
                (not the next one: nothing is shifted here), or `ignore_index` for no loss.
            outputs: `logps` [batch, time], or `logits` [batch, time, vocabulary]; and `entropies`
                [batch, time] where there is an entropy bonus.
            old_logps: log-probabilities under the policy that drew the tokens: an array
                [batch, time], or for each sequence a list, of its labelled tokens or of all
                positions. None means on policy: every ratio is 1.
            ref_logps: the same under a reference policy. Without them `beta` has no effect.
            advantages: one a sequence, or one a token in the forms of `old_logps`. None gives a
                loss of 0 without gradient.
            denominator: for gradient accumulation, what the reduction divides by in the whole
                batch: sequences, or tokens for a mean over tokens.
            **kwargs: arguments of other losses are ignored, so that losses can be swapped.

        Returns:
            The loss, differentiable in `logps` or `logits` (and `entropies`), and its metrics.

        Raises:
            ValueError: if a shape or a row does not fit, or a label is seen to name no token.
            TypeError: if labels are not integers, or an argument is unknown.
        """
        refuse_unknown(kwargs)
        batch = read_policy_batch(
            inputs,
            outputs,
            self.ignore_index,
            old_logps=old_logps,
            ref_logps=ref_logps,
            advantages=advantages,
            entropies_needed=self.require_entropy,
        )
        log_ratio = self.log_ratio(batch.logprobs, batch.behaviour_logprobs, batch.mask)
        loss = self.reduce(self._losses(batch, log_ratio), batch.mask, denominator)
        if advantages is None:
            loss = jnp.zeros_like(loss)
        metrics = self.metrics(log_ratio, batch.advantages, batch.mask, batch.entropies)
        return LossOutput(loss, metrics)

    def _losses(self, batch: PolicyBatch, log_ratio: PerToken) -> PerToken:
        logprobs, mask = batch.logprobs, batch.mask
        losses = self.per_token(log_ratio, logprobs, batch.advantages, mask)
        if batch.reference_logprobs is not None and not _is_zero(self.beta):
            beta = jnp.asarray(self.beta, losses.dtype)
            losses += beta * kl_k3(logprobs, batch.reference_logprobs, mask)
        if batch.entropies is not None and not _is_zero(self.entropy_coef):
            losses += entropy_bonus(batch.entropies, mask, coefficient=self.entropy_coef)
        return losses


def _is_zero(coefficient: Scalar) -> bool:
    """Whether a coefficient is known to be zero; a traced one is not."""
    return not isinstance(coefficient, jax.core.Tracer) and bool(coefficient == 0)
