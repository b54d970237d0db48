"""Policy losses under Twinkle's names: each is a ratio, a loss per token and a reduction."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from twinkle_jax.loss.loss_object import (
    Loss,
    LossOutput,
    LossUnit,
    SampleValues,
    aligned,
    entry,
    label_logprobs,
    per_position,
    read_labels,
    refuse_unknown,
)
from twinkle_jax.loss.off_policy import (
    Correction,
    binary_kl_mask,
    off_policy_sequence_mask,
    total_variation_mask,
)
from twinkle_jax.loss.penalties import entropy_bonus, kl_k3
from twinkle_jax.loss.per_token import (
    Coefficient,
    Mask,
    PerToken,
    constant_length,
    sequence_mean,
    token_mean,
)
from twinkle_jax.loss.policy_metrics import PolicyMetrics, policy_metrics
from twinkle_jax.loss.surrogate import (
    clip_bounds,
    clipped_importance_surrogate,
    clipped_surrogate,
    gamma_weighted_surrogate,
    geometric_mean_surrogate,
    sequence_log_ratio,
    soft_gate_surrogate,
    token_log_ratio,
)


class PolicyLoss(Loss):
    """Base class of policy losses: `log_ratio`, then `per_token`, then `reduce`.

    A subclass has the coefficients below as fields and overrides some of the three methods. If it
    overrides `reduce`, it must also say what the loss `divides_by`.

    Attributes:
        epsilon: how far a ratio may fall below 1.
        epsilon_high: how far a ratio may rise above 1; `epsilon` if None.
        beta: weight of the divergence (`kl_k3`) from the reference policy, per nat.
        entropy_coef: weight of the entropy bonus, per nat.
        ignore_index: the label that means "no loss here".
        correction: weights the loss per token, as an `ImportanceCorrection` does, for a sampler
            whose log-probabilities differ from the trainer's; None for no correction. Divergence
            and entropy bonus are not weighted.
        off_policy_delta: sequences with a negative advantage are left out if the policy is further
            than this, in nats per token, from the one that drew them (`off_policy_sequence_mask`),
            by `sampler_logps` if there are some. They count in the reduction. None: no limit.
        dual_clip: the loss of a token with a negative advantage is at most this times the size of
            the advantage; None: no limit.
    """

    epsilon: Coefficient
    epsilon_high: Coefficient | None
    beta: Coefficient
    entropy_coef: Coefficient
    ignore_index: int
    correction: Correction | None = None
    off_policy_delta: Coefficient | None = None
    dual_clip: Coefficient | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "reduce" in vars(cls) and "divides_by" not in vars(cls):
            raise TypeError(
                f"divides_by must be declared with reduce, got {cls.__name__} without it"
            )
        super().__init_subclass__(**kwargs)

    @property
    def divides_by(self) -> LossUnit:
        """Sequences, which the default `reduce` averages over."""
        return "sequences"

    @property
    def require_entropy(self) -> bool:
        """Whether `outputs['entropies']` is needed, for the entropy bonus."""
        return not _is_zero(self.entropy_coef)

    def log_ratio(self, logprobs: PerToken, behaviour_logprobs: PerToken, mask: Mask) -> PerToken:
        """Compare the policy with the one that drew the tokens; default: `token_log_ratio`."""
        return token_log_ratio(logprobs, behaviour_logprobs, mask)

    def per_token(
        self, log_ratio: PerToken, logprobs: PerToken, advantages: PerToken, mask: Mask
    ) -> PerToken:
        """Compute the loss of each token; default: `clipped_surrogate`."""
        return clipped_surrogate(
            log_ratio,
            advantages,
            mask,
            epsilon=self.epsilon,
            epsilon_high=self.epsilon_high,
            dual_clip=self.dual_clip,
        )

    def reduce(
        self, losses: PerToken, mask: Mask, denominator: Coefficient | None
    ) -> Float[Array, ""]:
        """Reduce the losses to one number; default: `sequence_mean`."""
        return sequence_mean(losses, mask, denominator=denominator)

    def metrics(
        self, log_ratio: PerToken, advantages: PerToken, mask: Mask, entropies: PerToken | None
    ) -> PolicyMetrics:
        """Compute the metrics of the step; default: with the clip range of the surrogate."""
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
        sampler_logps: SampleValues | None = None,
        advantages: SampleValues | None = None,
        denominator: Coefficient | None = None,
        **kwargs: Any,
    ) -> LossOutput:
        """Compute the loss of a batch, and the metrics of the step.

        Args:
            inputs: `labels` [batch, time]: at each position the token that `outputs` is about
                (not the next one: nothing is shifted here), or `ignore_index` for no loss.
            outputs: `logps` [batch, time], or `logits` [batch, time, vocabulary]; and `entropies`
                [batch, time] for an entropy bonus.
            old_logps: log-probabilities under the policy that drew the tokens: an array
                [batch, time], or for each sequence a list, of its labelled tokens or of all
                positions. None means on policy: every ratio is 1.
            ref_logps: the same under a reference policy. Without them `beta` has no effect.
            sampler_logps: the same as the sampler reported them, where `old_logps` are the
                trainer's (or None), for `correction`, which needs them, and `off_policy_delta`.
            advantages: one per sequence, or one per token in the forms of `old_logps`. None gives
                a loss of 0 without gradient.
            denominator: for gradient accumulation, what the reduction divides by in the whole
                batch: sequences, or tokens for a mean over tokens.
            **kwargs: arguments of other losses are ignored, so that losses can be swapped.

        Returns:
            The loss, differentiable in `logps` or `logits` (and `entropies`), and its metrics.

        Raises:
            ValueError: if a shape or a row does not fit, or a label that is not traced is no token.
            TypeError: if labels are not integers, an argument is unknown, or `sampler_logps` are
                missing.
        """
        refuse_unknown(kwargs)
        labels = read_labels(inputs, self.ignore_index)
        mask = labels.mask
        logprobs = label_logprobs(outputs, labels)

        def read(name: str, values: SampleValues, *, per_sequence: bool = False) -> PerToken:
            return aligned(name, values, labels, logprobs.dtype, per_sequence=per_sequence)

        behaviour = logprobs if old_logps is None else read("old_logps", old_logps)
        reference = None if ref_logps is None else read("ref_logps", ref_logps)
        token_advantages = jnp.zeros_like(logprobs)
        if advantages is not None:
            token_advantages = read("advantages", advantages, per_sequence=True)
        entropies = None
        if self.require_entropy or outputs.get("entropies") is not None:
            _, entropies = entry("outputs", outputs, "entropies")
            entropies = per_position("outputs['entropies']", entropies, mask).astype(logprobs.dtype)

        log_ratio = self.log_ratio(logprobs, behaviour, mask)
        losses = self.per_token(log_ratio, logprobs, token_advantages, mask)
        if self.correction is not None and advantages is not None:
            if sampler_logps is None:
                raise TypeError("sampler_logps must be given to a loss with a correction, got None")
            sampler = read("sampler_logps", sampler_logps)
            losses *= jax.lax.stop_gradient(self.correction(behaviour, sampler, mask))
        if self.off_policy_delta is not None:
            drawn = behaviour if sampler_logps is None else read("sampler_logps", sampler_logps)
            kept = off_policy_sequence_mask(
                logprobs, drawn, token_advantages, mask, delta=self.off_policy_delta
            )
            losses = jnp.where(kept, losses, 0)
        if reference is not None and not _is_zero(self.beta):
            losses += jnp.asarray(self.beta, losses.dtype) * kl_k3(logprobs, reference, mask)
        if entropies is not None and not _is_zero(self.entropy_coef):
            losses += entropy_bonus(entropies, mask, coefficient=self.entropy_coef)
        loss = self.reduce(losses, mask, denominator)
        if advantages is None:
            loss = jnp.zeros_like(loss)
        return LossOutput(loss, self.metrics(log_ratio, token_advantages, mask, entropies))


def _is_zero(coefficient: Coefficient) -> bool:
    """Whether a coefficient is known to be zero; a traced one is not."""
    return not isinstance(coefficient, jax.core.Tracer) and bool(coefficient == 0)


@dataclass(frozen=True)
class GRPOLoss(PolicyLoss, name="grpo"):
    """Clipped surrogate, `sequence_mean`: each sequence weighs the same.

    See `PolicyLoss` for the arguments. Losses are immutable, equal when their fields are, and
    hashable.

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

    epsilon: Coefficient = 0.2
    epsilon_high: Coefficient | None = None
    beta: Coefficient = 0.0
    entropy_coef: Coefficient = 0.0
    ignore_index: int = -100
    correction: Correction | None = field(default=None, kw_only=True)
    off_policy_delta: Coefficient | None = field(default=None, kw_only=True)
    dual_clip: Coefficient | None = field(default=None, kw_only=True)


class GSPOLoss(GRPOLoss, name="gspo"):
    """Clipped surrogate of one ratio per sequence, `sequence_mean`.

    See `PolicyLoss` for the arguments. The clip range of the paper is much smaller than the
    default, 0.0003 below and 0.0004 above.

    References:
        [Group Sequence Policy Optimization](https://arxiv.org/abs/2507.18071) (Zheng et al., 2025)

    Example:
        >>> GSPOLoss(epsilon=0.0003, epsilon_high=0.0004) == GSPOLoss(0.0003, 0.0004)
        True
    """

    def log_ratio(self, logprobs: PerToken, behaviour_logprobs: PerToken, mask: Mask) -> PerToken:
        """Compare the policies over the whole sequence: `sequence_log_ratio`."""
        return sequence_log_ratio(logprobs, behaviour_logprobs, mask)


class LUSPOLoss(GSPOLoss, name="luspo"):
    """GSPO's loss of each sequence times its tokens: long sequences weigh more.

    See `PolicyLoss` for the arguments. Divergence and entropy bonus are summed over a sequence as
    well.

    References:
        [Length-Unbiased Sequence Policy Optimization](https://arxiv.org/abs/2602.05261) (Liu et
        al., 2026)

    Example:
        >>> LUSPOLoss(epsilon=0.0003) == GSPOLoss(epsilon=0.0003)
        False
    """

    divides_by = "sequences"

    def reduce(
        self, losses: PerToken, mask: Mask, denominator: Coefficient | None
    ) -> Float[Array, ""]:
        """Sum over each sequence, and average over sequences: `constant_length` of 1."""
        return constant_length(losses, mask, length=1.0, denominator=denominator)


@dataclass(frozen=True)
class GMPOLoss(GRPOLoss, name="gmpo"):
    """Geometric mean of a sequence's clipped ratios, `sequence_mean`.

    See `PolicyLoss` for the other arguments.

    Args:
        epsilon: how far the logarithm of a ratio may fall below 0.
        epsilon_high: how far it may rise above 0; `epsilon` if None.

    Raises:
        ValueError: if `dual_clip` is given: ratios are of sequences.

    References:
        [Geometric-Mean Policy Optimization](https://arxiv.org/abs/2507.20673) (Zhao et al., 2025)

    Example:
        >>> GMPOLoss().epsilon
        0.4
    """

    epsilon: Coefficient = 0.4

    def __post_init__(self) -> None:
        if self.dual_clip is not None:
            raise ValueError(
                f"dual_clip must be None for GMPO, whose ratios are of sequences, got "
                f"{self.dual_clip}"
            )

    def per_token(
        self, log_ratio: PerToken, logprobs: PerToken, advantages: PerToken, mask: Mask
    ) -> PerToken:
        """Average the clipped log-ratios of a sequence: `geometric_mean_surrogate`."""
        return geometric_mean_surrogate(
            log_ratio, advantages, mask, epsilon=self.epsilon, epsilon_high=self.epsilon_high
        )

    def metrics(
        self, log_ratio: PerToken, advantages: PerToken, mask: Mask, entropies: PerToken | None
    ) -> PolicyMetrics:
        """Compute the metrics of the step, with the bounds of logarithms as those of ratios."""
        low, high = clip_bounds(self.epsilon, self.epsilon_high, log_ratio.dtype)
        return policy_metrics(
            log_ratio,
            advantages,
            mask,
            epsilon=1 - jnp.exp(low - 1),
            epsilon_high=jnp.exp(high - 1) - 1,
            entropies=entropies,
        )


class BNPOLoss(GRPOLoss, name="bnpo"):
    """Clipped surrogate, `token_mean` over the tokens of the batch.

    See `PolicyLoss` for the arguments.

    References:
        [BNPO](https://arxiv.org/abs/2506.02864) (Xiao et al., 2025), whose name Twinkle and TRL
        use for this reduction

    Example:
        >>> BNPOLoss(epsilon=0.1).epsilon
        0.1
    """

    divides_by = "tokens"

    def reduce(
        self, losses: PerToken, mask: Mask, denominator: Coefficient | None
    ) -> Float[Array, ""]:
        """Average over tokens: `token_mean`."""
        return token_mean(losses, mask, denominator=denominator)


@dataclass(frozen=True)
class DAPOLoss(BNPOLoss, name="dapo"):
    """Clipped surrogate with a higher upper bound, `token_mean`. Twinkle has no such class.

    See `PolicyLoss` for the arguments; `epsilon_high` defaults to 0.28.

    References:
        [DAPO](https://arxiv.org/abs/2503.14476) (Yu et al., 2025)

    Example:
        >>> DAPOLoss() == BNPOLoss(epsilon_high=0.28), DAPOLoss().epsilon_high
        (False, 0.28)
    """

    epsilon_high: Coefficient | None = 0.28


@dataclass(frozen=True)
class CISPOLoss(BNPOLoss, name="cispo"):
    """Importance weight clipped at `1 + epsilon`, `token_mean`: every token keeps its gradient.

    See `PolicyLoss` for the arguments. If `epsilon_high` is given, the weight is clipped at
    `1 + epsilon_high` instead. ScaleRL clips it at 5: `CISPOLoss(epsilon_high=4.0)`. A call also
    takes Twinkle's `num_items_in_batch` for `denominator`.

    Raises:
        ValueError: if `dual_clip` is given: weights have one bound.

    References:
        [MiniMax-M1](https://arxiv.org/abs/2506.13585) (MiniMax, 2025), CISPO;
        [The Art of Scaling Reinforcement Learning Compute for LLMs](https://arxiv.org/abs/2510.13786)
        (Khatri et al., 2025), ScaleRL

    Example:
        >>> CISPOLoss() == GRPOLoss()
        False
    """

    def __post_init__(self) -> None:
        if self.dual_clip is not None:
            raise ValueError(
                f"dual_clip must be None for CISPO, which bounds weights, got {self.dual_clip}"
            )

    def per_token(
        self, log_ratio: PerToken, logprobs: PerToken, advantages: PerToken, mask: Mask
    ) -> PerToken:
        """Weigh the log-probabilities: `clipped_importance_surrogate`."""
        return clipped_importance_surrogate(
            log_ratio, logprobs, advantages, mask, epsilon_high=self._epsilon_high()
        )

    def metrics(
        self, log_ratio: PerToken, advantages: PerToken, mask: Mask, entropies: PerToken | None
    ) -> PolicyMetrics:
        """Count weights above the bound, for advantages of either sign; there is no lower bound."""
        return policy_metrics(
            log_ratio,
            None,
            mask,
            epsilon=1.0,
            epsilon_high=self._epsilon_high(),
            entropies=entropies,
        )

    def _epsilon_high(self) -> Coefficient:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def __call__(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        denominator: Coefficient | None = None,
        num_items_in_batch: Coefficient | None = None,
        **kwargs: Any,
    ) -> LossOutput:
        """Compute the loss of a batch: see `PolicyLoss`."""
        if denominator is None:
            denominator = num_items_in_batch
        return super().__call__(inputs, outputs, denominator=denominator, **kwargs)


@dataclass(frozen=True)
class DRGRPOLoss(PolicyLoss, name="dr_grpo"):
    """Clipped surrogate, `constant_length`: unbiased by the length of completions.

    See `PolicyLoss` for the other arguments.

    Args:
        max_completion_length: what the sum of each sequence is divided by, in tokens.

    References:
        [Understanding R1-Zero-Like Training](https://arxiv.org/abs/2503.20783) (Liu et al., 2025),
        Dr. GRPO

    Example:
        >>> DRGRPOLoss().max_completion_length
        1024
    """

    divides_by = "sequences"

    epsilon: Coefficient = 0.2
    beta: Coefficient = 0.0
    max_completion_length: Coefficient = 1024
    ignore_index: int = -100
    epsilon_high: Coefficient | None = field(default=None, kw_only=True)
    entropy_coef: Coefficient = field(default=0.0, kw_only=True)
    correction: Correction | None = field(default=None, kw_only=True)
    off_policy_delta: Coefficient | None = field(default=None, kw_only=True)
    dual_clip: Coefficient | None = field(default=None, kw_only=True)

    def reduce(
        self, losses: PerToken, mask: Mask, denominator: Coefficient | None
    ) -> Float[Array, ""]:
        """Divide by a constant: `constant_length`."""
        return constant_length(
            losses, mask, length=self.max_completion_length, denominator=denominator
        )


@dataclass(frozen=True)
class SAPOLoss(PolicyLoss, name="sapo"):
    """Soft gate in place of a clip, `sequence_mean`.

    See `PolicyLoss` for the other arguments; `epsilon` and `epsilon_high` have no effect, as in
    Twinkle.

    Args:
        tau_pos: steepness of the gate for positive advantages, above 0.
        tau_neg: steepness of the gate for the others, above 0; the paper takes 1.05.

    References:
        [Soft Adaptive Policy Optimization](https://arxiv.org/abs/2511.20347) (Gao et al., 2025)

    Example:
        >>> SAPOLoss(tau_neg=1.05).tau_neg
        1.05
    """

    epsilon: Coefficient = 0.2
    beta: Coefficient = 0.0
    tau_pos: Coefficient = 1.0
    tau_neg: Coefficient = 1.0
    ignore_index: int = -100
    epsilon_high: Coefficient | None = field(default=None, kw_only=True)
    entropy_coef: Coefficient = field(default=0.0, kw_only=True)
    correction: Correction | None = field(default=None, kw_only=True)
    off_policy_delta: Coefficient | None = field(default=None, kw_only=True)

    def per_token(
        self, log_ratio: PerToken, logprobs: PerToken, advantages: PerToken, mask: Mask
    ) -> PerToken:
        """Weigh the tokens with the soft gate: `soft_gate_surrogate`."""
        return soft_gate_surrogate(
            log_ratio, advantages, mask, tau_pos=self.tau_pos, tau_neg=self.tau_neg
        )

    def metrics(
        self, log_ratio: PerToken, advantages: PerToken, mask: Mask, entropies: PerToken | None
    ) -> PolicyMetrics:
        """Compute the metrics of the step; clip fractions are 0, since nothing is clipped."""
        return _unclipped_metrics(log_ratio, advantages, mask, entropies)


@dataclass(frozen=True)
class DPPOLoss(PolicyLoss, name="dppo"):
    """Ratio without a clip, for tokens inside a trust region of probabilities, `token_mean`.

    A token whose probability has moved too far in the direction of its advantage has no loss, and
    still counts in the mean. See `PolicyLoss` for the other arguments; `epsilon` and `epsilon_high`
    have no effect.

    Args:
        divergence: `'tv'` for `total_variation_mask`, `'kl'` for `binary_kl_mask`.
        delta: how far a probability may fall: a difference of probabilities (the paper takes 0.15),
            or nats (0.05).
        delta_high: how far it may rise; `delta` if None.

    Raises:
        ValueError: if the divergence is unknown.

    References:
        [Rethinking the Trust Region in LLM Reinforcement
        Learning](https://arxiv.org/abs/2602.04879) (Qi et al., 2026), DPPO

    Example:
        >>> DPPOLoss(divergence="kl", delta=0.05).divergence
        'kl'
    """

    divides_by = "tokens"

    divergence: str = field(default="tv", kw_only=True)
    delta: Coefficient = field(default=0.15, kw_only=True)
    delta_high: Coefficient | None = field(default=None, kw_only=True)
    epsilon: Coefficient = field(default=0.2, kw_only=True)
    epsilon_high: Coefficient | None = field(default=None, kw_only=True)
    beta: Coefficient = field(default=0.0, kw_only=True)
    entropy_coef: Coefficient = field(default=0.0, kw_only=True)
    ignore_index: int = field(default=-100, kw_only=True)
    correction: Correction | None = field(default=None, kw_only=True)
    off_policy_delta: Coefficient | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_name("divergence", self.divergence, _DIVERGENCES)

    def per_token(
        self, log_ratio: PerToken, logprobs: PerToken, advantages: PerToken, mask: Mask
    ) -> PerToken:
        """Leave out what has moved too far, and clip nothing."""
        behaviour_logprobs = logprobs - log_ratio
        near = _DIVERGENCES[self.divergence](
            logprobs,
            behaviour_logprobs,
            advantages,
            mask,
            delta=self.delta,
            delta_high=self.delta_high,
        )
        unbounded = float("inf")
        losses = clipped_surrogate(log_ratio, advantages, mask, epsilon=1.0, epsilon_high=unbounded)
        return jnp.where(near, losses, 0)

    def reduce(
        self, losses: PerToken, mask: Mask, denominator: Coefficient | None
    ) -> Float[Array, ""]:
        """Average over tokens, those that are left out included: `token_mean`."""
        return token_mean(losses, mask, denominator=denominator)

    def metrics(
        self, log_ratio: PerToken, advantages: PerToken, mask: Mask, entropies: PerToken | None
    ) -> PolicyMetrics:
        """Compute the metrics of the step; clip fractions are 0, since ratios are not clipped."""
        return _unclipped_metrics(log_ratio, advantages, mask, entropies)


@dataclass(frozen=True)
class VESPOLoss(PolicyLoss, name="vespo"):
    """Smooth weight of a sequence's ratio in place of a clip, `token_mean`.

    See `PolicyLoss` for the other arguments; `epsilon` and `epsilon_high` have no effect.

    Args:
        k_pos: how fast the weight falls with a ratio below 1, for positive advantages.
        lambda_pos: how fast it falls with a ratio above 1, for positive advantages.
        k_neg: as `k_pos`, for the others.
        lambda_neg: as `lambda_pos`, for the others.

    References:
        [VESPO](https://arxiv.org/abs/2602.10693) (2026), variational sequence-level soft policy
        optimization

    Example:
        >>> VESPOLoss(lambda_neg=1.5).lambda_neg
        1.5
    """

    divides_by = "tokens"

    k_pos: Coefficient = field(default=2.0, kw_only=True)
    lambda_pos: Coefficient = field(default=3.0, kw_only=True)
    k_neg: Coefficient = field(default=3.0, kw_only=True)
    lambda_neg: Coefficient = field(default=2.0, kw_only=True)
    epsilon: Coefficient = field(default=0.2, kw_only=True)
    epsilon_high: Coefficient | None = field(default=None, kw_only=True)
    beta: Coefficient = field(default=0.0, kw_only=True)
    entropy_coef: Coefficient = field(default=0.0, kw_only=True)
    ignore_index: int = field(default=-100, kw_only=True)
    correction: Correction | None = field(default=None, kw_only=True)
    off_policy_delta: Coefficient | None = field(default=None, kw_only=True)

    def per_token(
        self, log_ratio: PerToken, logprobs: PerToken, advantages: PerToken, mask: Mask
    ) -> PerToken:
        """Weigh the log-probabilities of a sequence: `gamma_weighted_surrogate`."""
        return gamma_weighted_surrogate(
            log_ratio,
            logprobs,
            advantages,
            mask,
            k_pos=self.k_pos,
            lambda_pos=self.lambda_pos,
            k_neg=self.k_neg,
            lambda_neg=self.lambda_neg,
        )

    def reduce(
        self, losses: PerToken, mask: Mask, denominator: Coefficient | None
    ) -> Float[Array, ""]:
        """Average over tokens: `token_mean`."""
        return token_mean(losses, mask, denominator=denominator)

    def metrics(
        self, log_ratio: PerToken, advantages: PerToken, mask: Mask, entropies: PerToken | None
    ) -> PolicyMetrics:
        """Compute the metrics of the step; clip fractions are 0, since nothing is clipped."""
        return _unclipped_metrics(log_ratio, advantages, mask, entropies)


def _check_name(argument: str, name: str, known: Mapping[str, Any]) -> None:
    if name not in known:
        raise ValueError(f"{argument} must be one of {', '.join(map(repr, known))}, got {name!r}")


_DIVERGENCES = {"tv": total_variation_mask, "kl": binary_kl_mask}


def _unclipped_metrics(
    log_ratio: PerToken, advantages: PerToken, mask: Mask, entropies: PerToken | None
) -> PolicyMetrics:
    unbounded = float("inf")
    return policy_metrics(
        log_ratio, advantages, mask, epsilon=unbounded, epsilon_high=unbounded, entropies=entropies
    )


PPO_REDUCTIONS = {"token-mean": token_mean, "seq-mean-token-mean": sequence_mean}


@dataclass(frozen=True)
class PPOLoss(PolicyLoss, name="ppo"):
    """Clipped surrogate with a choice of reductions, for advantages from a critic.

    See `PolicyLoss` for the other arguments, which are keyword-only.

    Args:
        loss_agg_mode: `'token-mean'` for `token_mean`, `'seq-mean-token-mean'` for `sequence_mean`.

    Raises:
        ValueError: if the reduction is unknown.

    References:
        [Proximal Policy Optimization](https://arxiv.org/abs/1707.06347) (Schulman et al., 2017)

    Example:
        >>> PPOLoss("seq-mean-token-mean", epsilon=0.1).epsilon
        0.1
    """

    loss_agg_mode: str = "token-mean"
    epsilon: Coefficient = field(default=0.2, kw_only=True)
    epsilon_high: Coefficient | None = field(default=None, kw_only=True)
    beta: Coefficient = field(default=0.0, kw_only=True)
    entropy_coef: Coefficient = field(default=0.0, kw_only=True)
    ignore_index: int = field(default=-100, kw_only=True)
    correction: Correction | None = field(default=None, kw_only=True)
    off_policy_delta: Coefficient | None = field(default=None, kw_only=True)
    dual_clip: Coefficient | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_name("loss_agg_mode", self.loss_agg_mode, PPO_REDUCTIONS)

    @property
    def divides_by(self) -> LossUnit:
        """Tokens or sequences, as `loss_agg_mode` says."""
        return "tokens" if self.loss_agg_mode == "token-mean" else "sequences"

    def reduce(
        self, losses: PerToken, mask: Mask, denominator: Coefficient | None
    ) -> Float[Array, ""]:
        """Average over tokens or sequences, as `loss_agg_mode` says."""
        return PPO_REDUCTIONS[self.loss_agg_mode](losses, mask, denominator=denominator)
