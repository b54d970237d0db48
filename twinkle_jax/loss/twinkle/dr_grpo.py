"""Dr. GRPO under its name in Twinkle."""

from dataclasses import dataclass, field

from jaxtyping import Array, Float

from twinkle_jax.loss.masked_inputs import Mask, PerToken, Scalar
from twinkle_jax.loss.reduction import constant_length
from twinkle_jax.loss.twinkle.policy_loss import PolicyLoss


@dataclass(frozen=True)
class DRGRPOLoss(PolicyLoss):
    """Clipped surrogate, `constant_length`: no favour to short right answers and long wrong ones.

    Args:
        epsilon: how far a ratio may fall below 1.
        beta: weight of the divergence (`kl_k3`) from the reference policy, per nat.
        max_completion_length: what each sequence's sum is divided by, in tokens.
        ignore_index: the label that means "no loss here".
        epsilon_high: how far a ratio may rise above 1; `epsilon` if None.
        entropy_coef: weight of the entropy bonus, per nat.

    References:
        [Understanding R1-Zero-Like Training](https://arxiv.org/abs/2503.20783) (Liu et al., 2025),
        Dr. GRPO

    Example:
        >>> DRGRPOLoss().max_completion_length
        1024
    """

    divides_by = "sequences"

    epsilon: Scalar = 0.2
    beta: Scalar = 0.0
    max_completion_length: Scalar = 1024
    ignore_index: int = -100
    epsilon_high: Scalar | None = field(default=None, kw_only=True)
    entropy_coef: Scalar = field(default=0.0, kw_only=True)

    def reduce(self, losses: PerToken, mask: Mask, denominator: Scalar | None) -> Float[Array, ""]:
        """Divide by a constant."""
        return constant_length(
            losses, mask, length=self.max_completion_length, denominator=denominator
        )
