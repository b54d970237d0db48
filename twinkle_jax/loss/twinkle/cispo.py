"""CISPO under its name in Twinkle."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from twinkle_jax.loss.clipped_importance import clipped_importance_surrogate
from twinkle_jax.loss.masked_inputs import Mask, PerToken, Scalar
from twinkle_jax.loss.policy_metrics import PolicyMetrics, policy_metrics
from twinkle_jax.loss.reduction import token_mean
from twinkle_jax.loss.twinkle.grpo import GRPOLoss
from twinkle_jax.loss.twinkle.output import LossOutput


class CISPOLoss(GRPOLoss):
    """Importance weight clipped at `1 + epsilon`, `token_mean`: every token keeps its gradient.

    Arguments are those of `GRPOLoss`; where `epsilon_high` is given, the weight is clipped at
    `1 + epsilon_high` instead. ScaleRL clips it at 5: `CISPOLoss(epsilon_high=4.0)`. A call
    knows Twinkle's `num_items_in_batch` as another name for `denominator`.

    References:
        [MiniMax-M1](https://arxiv.org/abs/2506.13585) (MiniMax, 2025), CISPO;
        [The Art of Scaling Reinforcement Learning Compute for LLMs](https://arxiv.org/abs/2510.13786)
        (Khatri et al., 2025), ScaleRL

    Example:
        >>> CISPOLoss() == GRPOLoss()
        False
    """

    divides_by = "tokens"

    def per_token(
        self, log_ratio: PerToken, logprobs: PerToken, advantages: PerToken, mask: Mask
    ) -> PerToken:
        """Weigh the log-probabilities."""
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return clipped_importance_surrogate(
            log_ratio, logprobs, advantages, mask, epsilon_high=high
        )

    def reduce(self, losses: PerToken, mask: Mask, denominator: Scalar | None) -> Float[Array, ""]:
        """Average over tokens."""
        return token_mean(losses, mask, denominator=denominator)

    def metrics(
        self, log_ratio: PerToken, advantages: PerToken, mask: Mask, entropies: PerToken | None
    ) -> PolicyMetrics:
        """Count weights above the bound, whatever the sign of the advantage; none is below one."""
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return policy_metrics(
            log_ratio, None, mask, epsilon=1.0, epsilon_high=high, entropies=entropies
        )

    def __call__(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        denominator: Scalar | None = None,
        num_items_in_batch: Scalar | None = None,
        **kwargs: Any,
    ) -> LossOutput:
        """Compute the loss of a batch: see `PolicyLoss`."""
        if denominator is None:
            denominator = num_items_in_batch
        return super().__call__(inputs, outputs, denominator=denominator, **kwargs)
