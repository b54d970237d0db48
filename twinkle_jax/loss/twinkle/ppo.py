"""The policy loss of PPO under its name in Twinkle."""

from dataclasses import dataclass, field

from jaxtyping import Array, Float

from twinkle_jax.loss.masked_inputs import Mask, PerToken, Scalar
from twinkle_jax.loss.reduction import sequence_mean, token_mean
from twinkle_jax.loss.twinkle.output import Unit
from twinkle_jax.loss.twinkle.policy_loss import PolicyLoss

PPO_REDUCTIONS = {"token-mean": token_mean, "seq-mean-token-mean": sequence_mean}


@dataclass(frozen=True)
class PPOLoss(PolicyLoss):
    """Clipped surrogate with a choice of reductions, for advantages from a critic.

    Args:
        loss_agg_mode: `'token-mean'` for `token_mean`, `'seq-mean-token-mean'` for `sequence_mean`.
        epsilon: how far a ratio may fall below 1.
        epsilon_high: how far a ratio may rise above 1; `epsilon` if None.
        beta: weight of the divergence (`kl_k3`) from the reference policy, per nat.
        entropy_coef: weight of the entropy bonus, per nat.
        ignore_index: the label that means "no loss here".

    Raises:
        ValueError: if the reduction is unknown.

    References:
        [Proximal Policy Optimization](https://arxiv.org/abs/1707.06347) (Schulman et al., 2017)

    Example:
        >>> PPOLoss("seq-mean-token-mean", epsilon=0.1).epsilon
        0.1
    """

    loss_agg_mode: str = "token-mean"
    epsilon: Scalar = field(default=0.2, kw_only=True)
    epsilon_high: Scalar | None = field(default=None, kw_only=True)
    beta: Scalar = field(default=0.0, kw_only=True)
    entropy_coef: Scalar = field(default=0.0, kw_only=True)
    ignore_index: int = field(default=-100, kw_only=True)

    def __post_init__(self) -> None:
        if self.loss_agg_mode not in PPO_REDUCTIONS:
            raise ValueError(
                f"loss_agg_mode must be one of {', '.join(map(repr, PPO_REDUCTIONS))}, "
                f"got {self.loss_agg_mode!r}"
            )

    @property
    def divides_by(self) -> Unit:
        """Tokens or sequences, as `loss_agg_mode` says."""
        return "tokens" if self.loss_agg_mode == "token-mean" else "sequences"

    def reduce(self, losses: PerToken, mask: Mask, denominator: Scalar | None) -> Float[Array, ""]:
        """Average as `loss_agg_mode` says."""
        return PPO_REDUCTIONS[self.loss_agg_mode](losses, mask, denominator=denominator)
