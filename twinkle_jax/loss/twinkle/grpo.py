"""Twinkle's losses under Twinkle's names: a choice of functions and coefficients each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Array, Float

from twinkle_jax.loss.masked_inputs import Mask, PerToken, Scalar
from twinkle_jax.loss.metrics import PolicyMetrics, policy_metrics
from twinkle_jax.loss.ratio import sequence_log_ratio
from twinkle_jax.loss.reduction import constant_length, sequence_mean, token_mean
from twinkle_jax.loss.surrogate import clipped_importance_surrogate, soft_gate_surrogate
from twinkle_jax.loss.twinkle.output import LossOutput
from twinkle_jax.loss.twinkle.policy_loss import PolicyLoss

PPO_REDUCTIONS = {"token-mean": token_mean, "seq-mean-token-mean": sequence_mean}


@dataclass(frozen=True)
class GRPOLoss(PolicyLoss):
    """Clipped surrogate, `sequence_mean`: each sequence weighs the same.

    See [GRPO](https://arxiv.org/abs/2402.03300), and the page on losses for the formulas. Losses
    are immutable, equal when their fields are, and hashable.

    Args:
        epsilon: how far a ratio may fall below 1.
        epsilon_high: how far a ratio may rise above 1; `epsilon` if None.
        beta: weight of the divergence (`kl_k3`) from the reference policy, per nat.
        entropy_coef: weight of the entropy bonus, per nat.
        ignore_index: the label that means "no loss here".

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

    See [GSPO](https://arxiv.org/abs/2507.18071). Arguments are those of `GRPOLoss`; the paper's
    clip range is much smaller, 0.0003 below and 0.0004 above.

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

    Example:
        >>> BNPOLoss(epsilon=0.1).epsilon
        0.1
    """

    def reduce(self, losses: PerToken, mask: Mask, denominator: Scalar | None) -> Float[Array, ""]:
        """Average over tokens."""
        return token_mean(losses, mask, denominator=denominator)


@dataclass(frozen=True)
class DAPOLoss(BNPOLoss):
    """Clipped surrogate with a higher upper bound, `token_mean`.

    See [DAPO](https://arxiv.org/abs/2503.14476). Arguments are those of `GRPOLoss`, but
    `epsilon_high` is 0.28 unless told otherwise. Twinkle has no class of this name.

    Example:
        >>> DAPOLoss()
        DAPOLoss(epsilon=0.2, epsilon_high=0.28, beta=0.0, entropy_coef=0.0, ignore_index=-100)
    """

    epsilon_high: Scalar | None = 0.28


class CISPOLoss(GRPOLoss):
    """Importance weight clipped at `1 + epsilon`, `token_mean`: every token keeps its gradient.

    See [MiniMax-M1](https://arxiv.org/abs/2506.13585). Arguments are those of `GRPOLoss`; where
    `epsilon_high` is given, the weight is clipped at `1 + epsilon_high` instead. A call knows
    Twinkle's `num_items_in_batch` as another name for `denominator`.

    Example:
        >>> CISPOLoss() == GRPOLoss()
        False
    """

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


@dataclass(frozen=True)
class SAPOLoss(PolicyLoss):
    """Soft gate in place of a clip, `sequence_mean`.

    See [SAPO](https://arxiv.org/abs/2511.20347).

    Args:
        epsilon: without effect, as in Twinkle: nothing is clipped.
        beta: weight of the divergence (`kl_k3`) from the reference policy, per nat.
        tau_pos: steepness of the gate for positive advantages, above 0.
        tau_neg: steepness of the gate for the others, above 0; the paper takes 1.05.
        ignore_index: the label that means "no loss here".
        epsilon_high: without effect.
        entropy_coef: weight of the entropy bonus, per nat.

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


@dataclass(frozen=True)
class DRGRPOLoss(PolicyLoss):
    """Clipped surrogate, `constant_length`: no favour to short right answers and long wrong ones.

    See [Dr. GRPO](https://arxiv.org/abs/2503.20783).

    Args:
        epsilon: how far a ratio may fall below 1.
        beta: weight of the divergence (`kl_k3`) from the reference policy, per nat.
        max_completion_length: what each sequence's sum is divided by, in tokens.
        ignore_index: the label that means "no loss here".
        epsilon_high: how far a ratio may rise above 1; `epsilon` if None.
        entropy_coef: weight of the entropy bonus, per nat.

    Example:
        >>> DRGRPOLoss().max_completion_length
        1024
    """

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


@dataclass(frozen=True)
class PPOLoss(PolicyLoss):
    """Clipped surrogate with a choice of reductions, for advantages from a critic.

    See [PPO](https://arxiv.org/abs/1707.06347).

    Args:
        loss_agg_mode: `'token-mean'` for `token_mean`, `'seq-mean-token-mean'` for `sequence_mean`.
        epsilon: how far a ratio may fall below 1.
        epsilon_high: how far a ratio may rise above 1; `epsilon` if None.
        beta: weight of the divergence (`kl_k3`) from the reference policy, per nat.
        entropy_coef: weight of the entropy bonus, per nat.
        ignore_index: the label that means "no loss here".

    Raises:
        ValueError: if the reduction is unknown.

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

    def reduce(self, losses: PerToken, mask: Mask, denominator: Scalar | None) -> Float[Array, ""]:
        """Average as `loss_agg_mode` says."""
        return PPO_REDUCTIONS[self.loss_agg_mode](losses, mask, denominator=denominator)
