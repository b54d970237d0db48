"""Losses of the clipped surrogate under Twinkle's names: GRPO, GSPO, BNPO, DAPO."""

from dataclasses import dataclass

from jaxtyping import Array, Float

from twinkle_jax.loss.masked_inputs import Mask, PerToken, Scalar
from twinkle_jax.loss.ratio import sequence_log_ratio
from twinkle_jax.loss.reduction import token_mean
from twinkle_jax.loss.twinkle.policy_loss import PolicyLoss


@dataclass(frozen=True)
class GRPOLoss(PolicyLoss):
    """Clipped surrogate, `sequence_mean`: each sequence weighs the same.

    The page on losses has the formulas. Losses are immutable, equal when their fields are, and
    hashable.

    Args:
        epsilon: how far a ratio may fall below 1.
        epsilon_high: how far a ratio may rise above 1; `epsilon` if None.
        beta: weight of the divergence (`kl_k3`) from the reference policy, per nat.
        entropy_coef: weight of the entropy bonus, per nat.
        ignore_index: the label that means "no loss here".

    References:
        [DeepSeekMath](https://arxiv.org/abs/2402.03300) (Shao et al., 2024), GRPO

    Example:
        >>> import jax.numpy as jnp
        >>> loss_fn = GRPOLoss(epsilon=0.25)
        >>> outputs = {"logps": jnp.array([[-1.0, -2.0, -3.0]])}
        >>> inputs = {"labels": jnp.array([[-100, 7, 9]])}
        >>> output = loss_fn(inputs, outputs, old_logps=[[-9.0, -3.0]], advantages=[2.0])
        >>> output.loss, output["loss"]
        (Array(-2.25, dtype=float32), Array(-2.25, dtype=float32))
        >>> print(output.metrics.clip_fraction_high)
        0.5
    """

    epsilon: Scalar = 0.2
    epsilon_high: Scalar | None = None
    beta: Scalar = 0.0
    entropy_coef: Scalar = 0.0
    ignore_index: int = -100


class GSPOLoss(GRPOLoss):
    """Clipped surrogate of one ratio a sequence, `sequence_mean`.

    Arguments are those of `GRPOLoss`; the paper's
    clip range is much smaller, 0.0003 below and 0.0004 above.

    References:
        [Group Sequence Policy Optimization](https://arxiv.org/abs/2507.18071) (Zheng et al., 2025)

    Example:
        >>> GSPOLoss(epsilon=0.0003, epsilon_high=0.0004) == GSPOLoss(0.0003, 0.0004)
        True
    """

    def log_ratio(self, logprobs: PerToken, behaviour_logprobs: PerToken, mask: Mask) -> PerToken:
        """Compare the policies over the whole sequence."""
        return sequence_log_ratio(logprobs, behaviour_logprobs, mask)


class BNPOLoss(GRPOLoss):
    """Clipped surrogate, `token_mean` over the tokens at hand.

    Arguments are those of `GRPOLoss`.

    References:
        [BNPO](https://arxiv.org/abs/2506.02864) (Xiao et al., 2025), whose name Twinkle and TRL
        use for this reduction

    Example:
        >>> BNPOLoss(epsilon=0.1).epsilon
        0.1
    """

    divides_by = "tokens"

    def reduce(self, losses: PerToken, mask: Mask, denominator: Scalar | None) -> Float[Array, ""]:
        """Average over tokens."""
        return token_mean(losses, mask, denominator=denominator)


@dataclass(frozen=True)
class DAPOLoss(BNPOLoss):
    """Clipped surrogate with a higher upper bound, `token_mean`.

    Arguments are those of `GRPOLoss`, but
    `epsilon_high` is 0.28 unless told otherwise. Twinkle has no class of this name.

    References:
        [DAPO](https://arxiv.org/abs/2503.14476) (Yu et al., 2025)

    Example:
        >>> DAPOLoss()
        DAPOLoss(epsilon=0.2, epsilon_high=0.28, beta=0.0, entropy_coef=0.0, ignore_index=-100)
    """

    epsilon_high: Scalar | None = 0.28
