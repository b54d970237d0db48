"""SAPO under its name in Twinkle."""

from dataclasses import dataclass, field

from twinkle_jax.loss.masked_inputs import Mask, PerToken, Scalar
from twinkle_jax.loss.policy_metrics import PolicyMetrics, policy_metrics
from twinkle_jax.loss.soft_gate import soft_gate_surrogate
from twinkle_jax.loss.twinkle.policy_loss import PolicyLoss


@dataclass(frozen=True)
class SAPOLoss(PolicyLoss):
    """Soft gate in place of a clip, `sequence_mean`.

    Args:
        epsilon: without effect, as in Twinkle: nothing is clipped.
        beta: weight of the divergence (`kl_k3`) from the reference policy, per nat.
        tau_pos: steepness of the gate for positive advantages, above 0.
        tau_neg: steepness of the gate for the others, above 0; the paper takes 1.05.
        ignore_index: the label that means "no loss here".
        epsilon_high: without effect.
        entropy_coef: weight of the entropy bonus, per nat.

    References:
        [Soft Adaptive Policy Optimization](https://arxiv.org/abs/2511.20347) (Gao et al., 2025)

    Example:
        >>> SAPOLoss(tau_neg=1.05).tau_neg
        1.05
    """

    epsilon: Scalar = 0.2
    beta: Scalar = 0.0
    tau_pos: Scalar = 1.0
    tau_neg: Scalar = 1.0
    ignore_index: int = -100
    epsilon_high: Scalar | None = field(default=None, kw_only=True)
    entropy_coef: Scalar = field(default=0.0, kw_only=True)

    def per_token(
        self, log_ratio: PerToken, logprobs: PerToken, advantages: PerToken, mask: Mask
    ) -> PerToken:
        """Weigh the tokens with the soft gate."""
        return soft_gate_surrogate(
            log_ratio, advantages, mask, tau_pos=self.tau_pos, tau_neg=self.tau_neg
        )

    def metrics(
        self, log_ratio: PerToken, advantages: PerToken, mask: Mask, entropies: PerToken | None
    ) -> PolicyMetrics:
        """Summarise the step; clip fractions are 0, for nothing is clipped."""
        unbounded = float("inf")
        return policy_metrics(
            log_ratio,
            advantages,
            mask,
            epsilon=unbounded,
            epsilon_high=unbounded,
            entropies=entropies,
        )
