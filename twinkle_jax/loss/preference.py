"""Losses of pairs of sequences, one chosen and one rejected.

The first four compare log-ratios to a reference policy, summed over tokens; SimPO, CPO and ORPO
need no reference. `bradley_terry_loss` trains a reward model on its scores. The objects under
Twinkle's names take rows that alternate: chosen, rejected, chosen, rejected.
"""

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Shaped

from twinkle_jax.loss.loss_object import (
    InvalidLossInputError,
    Labels,
    Loss,
    LossOutput,
    SampleValues,
    aligned,
    entry,
    label_logprobs,
    read_labels,
    refuse_unknown,
)
from twinkle_jax.loss.per_token import (
    Coefficient,
    Mask,
    PerToken,
    floats,
    masked_inputs,
    one_number,
    token_mean,
)
from twinkle_jax.loss.policy_metrics import PreferenceMetrics
from twinkle_jax.loss.supervised import cross_entropy

PerPair = Float[Array, "*pairs"]
"""One number per pair of sequences."""

LARGEST_LOGPROB = -1e-7  # nats; at 0 the odds are infinite


def sigmoid_preference(
    chosen: PerPair,
    rejected: PerPair,
    *,
    beta: Coefficient = 0.1,
    label_smoothing: Coefficient = 0.0,
) -> PerPair:
    r"""Loss of DPO: the chosen sequence wins in a model of pairwise comparisons.

    $$\ell = -(1-\varepsilon) \log \sigma(\beta (\Delta_w - \Delta_l))
    - \varepsilon \log \sigma(-\beta (\Delta_w - \Delta_l)), \qquad
    \Delta = \sum_t \log \frac{\pi(a_t)}{\pi_{ref}(a_t)}$$

    Args:
        chosen: $\Delta_w$, log-ratio of the chosen sequence to the reference policy, in nats.
        rejected: $\Delta_l$, that of the rejected one.
        beta: how much a nat of difference counts, above 0.
        label_smoothing: $\varepsilon$, the share of pairs assumed to be mislabelled, below 0.5.

    Returns:
        Loss per pair.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-ratio is not floating point.

    References:
        [Direct Preference Optimization](https://arxiv.org/abs/2305.18290) (Rafailov et al., 2023);
        [A note on DPO with noisy preferences](https://ericmitchell.ai/cdpo.pdf) (Mitchell, 2023)

    Example:
        >>> print(sigmoid_preference(jnp.array([2.0]), jnp.array([2.0]))[0])
        0.6931472
    """
    margin = _margin(chosen, rejected, beta)
    smoothing = jnp.asarray(label_smoothing, margin.dtype)
    return -(1 - smoothing) * jax.nn.log_sigmoid(margin) - smoothing * jax.nn.log_sigmoid(-margin)


def hinge_preference(chosen: PerPair, rejected: PerPair, *, beta: Coefficient = 0.1) -> PerPair:
    r"""Loss of SLiC on the margin of DPO: 0, and without gradient, above a margin of 1.

    $$\ell = \max(0,\ 1 - \beta (\Delta_w - \Delta_l))$$

    Args:
        chosen: $\Delta_w$, log-ratio of the chosen sequence to the reference policy, in nats.
        rejected: $\Delta_l$, that of the rejected one.
        beta: how much a nat of difference counts, above 0.

    Returns:
        Loss per pair.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-ratio is not floating point.

    References:
        [SLiC-HF](https://arxiv.org/abs/2305.10425) (Zhao et al., 2023)

    Example:
        >>> hinge_preference(jnp.array([2.0]), jnp.array([1.0]), beta=0.25)
        Array([0.75], dtype=float32)
    """
    return jax.nn.relu(1 - _margin(chosen, rejected, beta))


def ipo_preference(chosen: PerPair, rejected: PerPair, *, beta: Coefficient = 0.1) -> PerPair:
    r"""Loss of IPO as in Twinkle: the squared distance of the margin from $1 / (2\beta)$.

    $$\ell = \left(\beta (\Delta_w - \Delta_l) - \frac{1}{2\beta}\right)^2$$

    The paper has $(\Delta_w - \Delta_l - \frac{1}{2\tau})^2$, as other libraries do with $\tau$
    for $\beta$: this is $\tau$ times it, at $\tau = \beta^2$. Their 0.1 is 0.32 here.

    Args:
        chosen: $\Delta_w$, log-ratio of the chosen sequence to the reference policy, in nats.
        rejected: $\Delta_l$, that of the rejected one.
        beta: how much a nat of difference counts, above 0.

    Returns:
        Loss per pair.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-ratio is not floating point.

    References:
        [A General Theoretical Paradigm to Understand Learning from Human
        Preferences](https://arxiv.org/abs/2310.12036) (Azar et al., 2023)

    Example:
        >>> ipo_preference(jnp.array([2.0]), jnp.array([1.0]), beta=0.5)
        Array([0.25], dtype=float32)
    """
    margin = _margin(chosen, rejected, beta)
    return jnp.square(margin - 0.5 / jnp.asarray(beta, margin.dtype))


def kto_pair_preference(chosen: PerPair, rejected: PerPair, *, beta: Coefficient = 0.1) -> PerPair:
    r"""Loss of KTO for pairs, without its baseline: chosen and rejected sequences count separately.

    $$\ell = 1 - \sigma(\beta \Delta_w) + \sigma(\beta \Delta_l)$$

    Args:
        chosen: $\Delta_w$, log-ratio of the chosen sequence to the reference policy, in nats.
        rejected: $\Delta_l$, that of the rejected one.
        beta: how much a nat of difference counts, above 0.

    Returns:
        Loss per pair.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-ratio is not floating point.

    References:
        [KTO](https://arxiv.org/abs/2402.01306) (Ethayarajh et al., 2024)

    Example:
        >>> kto_pair_preference(jnp.array([0.0]), jnp.array([0.0]))
        Array([1.], dtype=float32)
    """
    chosen, rejected = _checked(chosen, rejected)
    slope = jnp.asarray(beta, chosen.dtype)
    return 1 - jax.nn.sigmoid(slope * chosen) + jax.nn.sigmoid(slope * rejected)


def simpo_preference(
    chosen: PerPair, rejected: PerPair, *, beta: Coefficient = 2.5, gamma: Coefficient = 0.5
) -> PerPair:
    r"""Loss of SimPO: mean log-probabilities are compared, without a reference policy.

    $$\ell = -\log \sigma\left(\beta (\bar s_w - \bar s_l) - \gamma\right), \qquad
    \bar s = \frac{1}{T} \sum_{t=1}^{T} \log \pi(a_t)$$

    Args:
        chosen: $\bar s_w$, mean log-probability of the tokens of the chosen sequence, in nats.
        rejected: $\bar s_l$, that of the rejected one.
        beta: how much a nat per token counts, above 0; 2 to 10 in the paper.
        gamma: $\gamma$, the margin to reach, at least 0; 0.3 to 1.6 in the paper.

    Returns:
        Loss per pair.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-probability is not floating point.

    References:
        [SimPO](https://arxiv.org/abs/2405.14734) (Meng et al., 2024)

    Example:
        >>> print(simpo_preference(jnp.array([-1.0]), jnp.array([-1.25]), beta=2.0)[0])
        0.6931472
    """
    margin = _margin(chosen, rejected, beta)
    return -jax.nn.log_sigmoid(margin - jnp.asarray(gamma, margin.dtype))


def cpo_preference(chosen: PerPair, rejected: PerPair, *, beta: Coefficient = 0.1) -> PerPair:
    r"""Loss of CPO: that of DPO for a uniform reference policy, whose terms cancel.

    $$\ell = -\log \sigma(\beta (s_w - s_l)), \qquad s = \sum_t \log \pi(a_t)$$

    The paper adds the cross entropy of the chosen sequence, which keeps its probability from
    falling.

    Args:
        chosen: $s_w$, log-probability of the chosen sequence, in nats.
        rejected: $s_l$, that of the rejected one.
        beta: how much a nat of difference counts, above 0.

    Returns:
        Loss per pair.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-probability is not floating point.

    References:
        [Contrastive Preference Optimization](https://arxiv.org/abs/2401.08417) (Xu et al., 2024)

    Example:
        >>> print(cpo_preference(jnp.array([-2.0]), jnp.array([-2.0]))[0])
        0.6931472
    """
    return -jax.nn.log_sigmoid(_margin(chosen, rejected, beta))


def orpo_preference(chosen: PerPair, rejected: PerPair) -> PerPair:
    r"""Loss of ORPO: the odds of the chosen sequence against those of the rejected one.

    $$\ell = -\log \sigma\left(\log \frac{p_w}{1 - p_w} - \log \frac{p_l}{1 - p_l}\right), \qquad
    \log p = \frac{1}{T} \sum_{t=1}^{T} \log \pi(a_t)$$

    The paper adds a tenth of it to the cross entropy of the chosen sequence.

    Args:
        chosen: $\log p_w$, mean log-probability of the tokens of the chosen sequence, in nats.
        rejected: $\log p_l$, that of the rejected one.

    Returns:
        Loss per pair. $\log p$ counts as at most $-10^{-7}$ where odds would be infinite.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-probability is not floating point.

    References:
        [ORPO](https://arxiv.org/abs/2403.07691) (Hong et al., 2024)

    Example:
        >>> chosen, rejected = jnp.log(jnp.array([0.75])), jnp.log(jnp.array([0.5]))
        >>> print(jnp.exp(-orpo_preference(chosen, rejected))[0])  # odds of 3 and of 1
        0.75
    """
    chosen, rejected = _checked(chosen, rejected)
    return -jax.nn.log_sigmoid(_log_odds(chosen) - _log_odds(rejected))


def bradley_terry_loss(
    chosen: PerPair,
    rejected: PerPair,
    *,
    margin: PerPair | Coefficient | None = None,
    center_coefficient: Coefficient = 0.0,
) -> PerPair:
    r"""Loss of a reward model: the chosen answer wins in a model of pairwise comparisons.

    $$\ell = -\log \sigma(r_w - r_l - m) + c\,(r_w + r_l)^2$$

    Comparisons say nothing about the level of scores; the second term keeps it near 0.

    Args:
        chosen: $r_w$, score of the chosen answer.
        rejected: $r_l$, that of the rejected one.
        margin: $m$, by how much the chosen answer should win, one number or one for each pair, at
            least 0; receives no gradient. None for 0.
        center_coefficient: $c$, at least 0; TRL recommends 0.01.

    Returns:
        Loss per pair.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a score is not floating point, or the margin not a number.

    References:
        [Learning to summarize from human feedback](https://arxiv.org/abs/2009.01325) (Stiennon et
        al., 2020); [InstructGPT](https://arxiv.org/abs/2203.02155) (Ouyang et al., 2022); $m$:
        [Llama 2](https://arxiv.org/abs/2307.09288) (Touvron et al., 2023); $c$: [Helping or
        Herding?](https://arxiv.org/abs/2312.09244) (Eisenstein et al., 2023)

    Example:
        >>> print(bradley_terry_loss(jnp.array([3.0]), jnp.array([1.0]), margin=2.0)[0])
        0.6931472
    """
    chosen, rejected = _checked(chosen, rejected)
    difference = chosen - rejected
    if margin is not None:
        wanted = jnp.asarray(margin)
        if wanted.shape not in ((), chosen.shape):
            raise ValueError(
                f"margin must have the shape of chosen, {chosen.shape}, or be one number, "
                f"got {wanted.shape}"
            )
        if not jnp.isdtype(wanted.dtype, ("integral", "real floating")):
            raise TypeError(f"margin must be real numbers, got {wanted.dtype}")
        difference -= jax.lax.stop_gradient(wanted.astype(chosen.dtype))
    losses = -jax.nn.log_sigmoid(difference)
    if isinstance(center_coefficient, int | float) and center_coefficient == 0:
        return losses
    return losses + jnp.asarray(center_coefficient, chosen.dtype) * jnp.square(chosen + rejected)


def preference_metrics(
    chosen: PerPair,
    rejected: PerPair,
    *,
    beta: Coefficient = 0.1,
    where: Bool[Array, "*pairs"] | None = None,
) -> PreferenceMetrics:
    r"""Compute how far a policy prefers chosen sequences to rejected ones.

    $$r_w = \beta \Delta_w, \quad r_l = \beta \Delta_l, \quad \overline{r_w - r_l}, \quad
    \overline{[r_w > r_l]}$$

    Args:
        chosen: $\Delta_w$, log-ratio of the chosen sequence to the reference policy, in nats.
        rejected: $\Delta_l$, that of the rejected one.
        beta: how much a nat of difference counts, above 0.
        where: True for the pairs that count; all if None.

    Returns:
        The metrics, without gradient; all 0 without pairs.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if a log-ratio is not floating point, or `where` not boolean.

    References:
        [Direct Preference Optimization](https://arxiv.org/abs/2305.18290) (Rafailov et al., 2023)

    Example:
        >>> metrics = preference_metrics(jnp.array([2.0, 0.0]), jnp.array([1.0, 1.0]), beta=0.5)
        >>> print(metrics.chosen_reward, metrics.margin, metrics.accuracy)
        0.5 0.0 0.5
    """
    chosen, rejected = map(jax.lax.stop_gradient, _checked(chosen, rejected))
    slope = jnp.asarray(beta, chosen.dtype)
    counted = jnp.ones(chosen.shape, bool) if where is None else jnp.asarray(where)
    if counted.dtype != jnp.bool_:
        raise TypeError(f"where must be boolean (True to count a pair), got {counted.dtype}")
    if counted.shape != chosen.shape:
        raise ValueError(
            f"where must have the shape of chosen, {chosen.shape}, got {counted.shape}"
        )
    count = jnp.maximum(jnp.sum(counted, dtype=chosen.dtype), 1)

    def mean(values: PerPair) -> Float[Array, ""]:
        return jnp.sum(jnp.where(counted, values.astype(chosen.dtype), 0)) / count

    return PreferenceMetrics(
        slope * mean(chosen),
        slope * mean(rejected),
        slope * mean(chosen - rejected),
        mean(chosen > rejected),
    )


def _log_odds(logprobs: PerPair) -> PerPair:
    return logprobs - jax.nn.log1mexp(-jnp.minimum(logprobs, LARGEST_LOGPROB))


def _margin(chosen: PerPair, rejected: PerPair, beta: Coefficient) -> PerPair:
    chosen, rejected = _checked(chosen, rejected)
    return jnp.asarray(beta, chosen.dtype) * (chosen - rejected)


def _checked(chosen: PerPair, rejected: PerPair) -> tuple[PerPair, PerPair]:
    chosen, rejected = floats(chosen=chosen, rejected=rejected)
    if chosen.shape != rejected.shape:
        raise ValueError(
            f"rejected must have the shape of chosen, {chosen.shape}, got {rejected.shape}"
        )
    return chosen, rejected


LOSS_TYPES: dict[str, Callable[..., PerPair]] = {
    "sigmoid": sigmoid_preference,
    "hinge": hinge_preference,
    "ipo": ipo_preference,
    "kto_pair": kto_pair_preference,
}


class _Compared(NamedTuple):
    """The losses of pairs, and what they compare."""

    losses: PerPair
    chosen: PerPair
    rejected: PerPair
    beta: Coefficient  # what these are multiplied by in metrics
    sft_weight: Coefficient = 0.0  # of the cross entropy of the chosen sequences


class PreferenceLoss(Loss):
    """A loss of pairs; rows alternate between chosen and rejected."""

    divides_by = "pairs"

    ignore_index: int
    tokens_per_pair: Coefficient | None = None  # a field of losses with a cross entropy

    def for_parts(self, tokens_per_pair: Coefficient) -> Self:
        """Return the loss of parts of a batch that has so many tokens of chosen sequences a pair.

        That is this loss itself where it has no cross entropy of them.
        """
        itself: Any = self
        has_field = "tokens_per_pair" in itself.__dataclass_fields__
        loss: Self = replace(itself, tokens_per_pair=tokens_per_pair) if has_field else self
        return loss


@dataclass(frozen=True)
class DPOLoss(PreferenceLoss, name="dpo"):
    """Loss of DPO and variants, averaged over pairs; rows alternate between chosen and rejected.

    Calls `sigmoid_preference`, `hinge_preference`, `ipo_preference` or `kto_pair_preference`.
    Immutable, equal when its fields are, hashable.

    Args:
        beta: how much a nat of difference counts, above 0.
        label_smoothing: share of pairs assumed to be mislabelled; for `'sigmoid'` only.
        ignore_index: the label that means "no loss here".
        loss_type: `'sigmoid'` (DPO), `'hinge'` (SLiC), `'ipo'` or `'kto_pair'`.
        reference_free: ignore the reference policy.
        sft_weight: weight of the cross entropy of the chosen sequences, averaged over their tokens.
        tokens_per_pair: see `CPOLoss`.

    Raises:
        ValueError: if `loss_type` is unknown, or has no label smoothing.

    References:
        [Direct Preference Optimization](https://arxiv.org/abs/2305.18290) (Rafailov et al., 2023)

    Example:
        >>> outputs, inputs = {"logps": jnp.zeros((2, 3))}, {"labels": jnp.ones((2, 3), int)}
        >>> print(DPOLoss()(inputs, outputs, ref_logps=jnp.zeros((2, 3))).loss)
        0.6931472
    """

    beta: Coefficient = 0.1
    label_smoothing: float = 0.0
    ignore_index: int = -100
    loss_type: str = "sigmoid"
    reference_free: bool = False
    sft_weight: Coefficient = 0.0
    tokens_per_pair: Coefficient | None = None

    def __post_init__(self) -> None:
        if self.loss_type not in LOSS_TYPES:
            known = ", ".join(map(repr, LOSS_TYPES))
            raise ValueError(
                f"Unknown loss_type: it must be one of {known}, got {self.loss_type!r}"
            )
        if self.loss_type != "sigmoid" and self.label_smoothing != 0:
            raise ValueError(
                f"label_smoothing must be 0 for loss_type={self.loss_type!r}, got "
                f"{self.label_smoothing}"
            )

    def __call__(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        ref_outputs: Mapping[str, Any] | None = None,
        ref_logps: SampleValues | None = None,
        ref_chosen_logps: ArrayLike | None = None,
        ref_rejected_logps: ArrayLike | None = None,
        denominator: Coefficient | None = None,
        **kwargs: Any,
    ) -> LossOutput:
        """Compute the loss of a batch.

        Args:
            inputs: `labels` [batch, time]; rows are chosen, rejected, chosen, rejected, …
            outputs: `logps` [batch, time], or `logits` [batch, time, vocabulary].
            ref_outputs: outputs of the reference policy, with `logps`; or
            ref_logps: its log-probabilities, [batch, time] or a row for each sequence; or
            ref_chosen_logps: their sums over each chosen sequence, [pairs], and
            ref_rejected_logps: over each rejected one. Without any of them, the loss is 0 without
                gradient, unless it is `reference_free`.
            denominator: for gradient accumulation, the pairs in the whole batch. The cross entropy
                of `sft_weight` needs `tokens_per_pair` for it.
            **kwargs: arguments of other losses are ignored, so that losses can be swapped.

        Returns:
            The loss, differentiable in `logps` or `logits`, and its `PreferenceMetrics`. A pair
            without labels has a loss of 0, and does not count in metrics.

        Raises:
            ValueError: if a shape or a row does not fit, rows are not in pairs, or `ref_outputs`
                have no `logps`.
            TypeError: if labels are not integers, an argument is unknown, or there are sums of
                only the chosen or only the rejected sequences.
        """
        refuse_unknown(kwargs)
        labels, logprobs = _read_pairs(inputs, outputs, self.ignore_index)
        if ref_logps is None and ref_outputs is not None:
            _, ref_logps = entry("ref_outputs", ref_outputs, "logps")
        reference = _reference(labels, logprobs, ref_logps, ref_chosen_logps, ref_rejected_logps)
        if reference is None and not self.reference_free:
            return LossOutput(jnp.zeros((), logprobs.dtype))
        sums = jnp.sum(logprobs, axis=-1)
        if reference is not None and not self.reference_free:
            sums -= jax.lax.stop_gradient(reference)
        preference = LOSS_TYPES[self.loss_type]
        if self.loss_type == "sigmoid":
            preference = partial(sigmoid_preference, label_smoothing=self.label_smoothing)
        ratios = _chosen_and_rejected(sums)
        losses = preference(*ratios, beta=self.beta)
        compared = _Compared(losses, *ratios, self.beta, self.sft_weight)
        return _pair_mean(compared, logprobs, labels.mask, denominator, self.tokens_per_pair)


class ReferenceFreeLoss(PreferenceLoss):
    """A loss of pairs without a reference policy; rows alternate between chosen and rejected."""

    @abc.abstractmethod
    def _compare(self, logprobs: PerToken, mask: Mask) -> _Compared:
        """Compare the rows of each pair."""

    def __call__(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        denominator: Coefficient | None = None,
        **kwargs: Any,
    ) -> LossOutput:
        """Compute the loss of a batch: see `DPOLoss`."""
        refuse_unknown(kwargs)
        labels, logprobs = _read_pairs(inputs, outputs, self.ignore_index)
        compared = self._compare(logprobs, labels.mask)
        return _pair_mean(compared, logprobs, labels.mask, denominator, self.tokens_per_pair)


@dataclass(frozen=True)
class SimPOLoss(ReferenceFreeLoss, name="simpo"):
    """Loss of SimPO, averaged over pairs; rows alternate between chosen and rejected.

    Calls `simpo_preference`. Immutable, equal when its fields are, hashable.

    Args:
        beta: how much a nat per token counts, above 0.
        gamma: the margin to reach, at least 0.
        ignore_index: the label that means "no loss here".

    References:
        [SimPO](https://arxiv.org/abs/2405.14734) (Meng et al., 2024)

    Example:
        >>> outputs, inputs = {"logps": jnp.zeros((2, 3))}, {"labels": jnp.ones((2, 3), int)}
        >>> print(SimPOLoss(gamma=0.0)(inputs, outputs).loss)
        0.6931472
    """

    beta: Coefficient = 2.5
    gamma: Coefficient = 0.5
    ignore_index: int = -100

    def _compare(self, logprobs: PerToken, mask: Mask) -> _Compared:
        """Compare mean log-probabilities."""
        means = _chosen_and_rejected(_means(logprobs, mask))
        losses = simpo_preference(*means, beta=self.beta, gamma=self.gamma)
        return _Compared(losses, *means, self.beta)


@dataclass(frozen=True)
class CPOLoss(ReferenceFreeLoss, name="cpo"):
    """Loss of CPO, averaged over pairs, plus the cross entropy of the chosen sequences.

    Calls `cpo_preference` and `cross_entropy`, which is averaged over tokens, as in Twinkle. Rows
    alternate between chosen and rejected. Immutable, equal when its fields are, hashable.

    Args:
        beta: how much a nat of difference counts, above 0.
        bc_coef: weight of the cross entropy.
        ignore_index: the label that means "no loss here".
        tokens_per_pair: for gradient accumulation, the labelled tokens of chosen sequences in the
            whole batch, divided by its pairs; None averages the cross entropy of each call over
            its own tokens.

    References:
        [Contrastive Preference Optimization](https://arxiv.org/abs/2401.08417) (Xu et al., 2024)

    Example:
        >>> outputs, inputs = {"logps": jnp.zeros((2, 3))}, {"labels": jnp.ones((2, 3), int)}
        >>> print(CPOLoss()(inputs, outputs).loss)
        0.6931472
    """

    beta: Coefficient = 0.1
    bc_coef: Coefficient = 1.0
    ignore_index: int = -100
    tokens_per_pair: Coefficient | None = None

    def _compare(self, logprobs: PerToken, mask: Mask) -> _Compared:
        """Compare sums of log-probabilities."""
        sums = _chosen_and_rejected(jnp.sum(logprobs, axis=-1))
        return _Compared(cpo_preference(*sums, beta=self.beta), *sums, self.beta, self.bc_coef)


@dataclass(frozen=True)
class ORPOLoss(ReferenceFreeLoss, name="orpo"):
    """Cross entropy of the chosen sequences, plus the odds ratio of ORPO averaged over pairs.

    Calls `cross_entropy`, which is averaged over tokens, and `orpo_preference`. Rows alternate
    between chosen and rejected. Immutable, equal when its fields are, hashable.

    Args:
        lambda_orpo: weight of the odds ratio.
        ignore_index: the label that means "no loss here".
        tokens_per_pair: see `CPOLoss`.

    References:
        [ORPO](https://arxiv.org/abs/2403.07691) (Hong et al., 2024)

    Example:
        >>> outputs = {"logps": jnp.full((2, 3), -1.0)}
        >>> print(ORPOLoss()({"labels": jnp.ones((2, 3), int)}, outputs).loss)  # 1 + log(2) / 10
        1.0693147
    """

    lambda_orpo: Coefficient = 0.1
    ignore_index: int = -100
    tokens_per_pair: Coefficient | None = None

    def _compare(self, logprobs: PerToken, mask: Mask) -> _Compared:
        """Compare mean log-probabilities."""
        means = _chosen_and_rejected(_means(logprobs, mask))
        losses = orpo_preference(*means)
        weight = jnp.asarray(self.lambda_orpo, losses.dtype)
        return _Compared(weight * losses, *means, self.lambda_orpo, sft_weight=1.0)


def _read_pairs(
    inputs: Mapping[str, Any], outputs: Mapping[str, Any], ignore_index: int
) -> tuple[Labels, PerToken]:
    """Read labels in pairs of rows, and their log-probabilities, 0 without a label."""
    labels = read_labels(inputs, ignore_index)
    if len(labels.mask) % 2:
        raise InvalidLossInputError(
            "inputs['labels'] must have an even number of rows, chosen, rejected, chosen, …, "
            f"got {len(labels.mask)}"
        )
    (logprobs,) = masked_inputs(labels.mask, logprobs=label_logprobs(outputs, labels))
    return labels, logprobs


def _chosen_and_rejected(rows: Shaped[Array, "batch ..."]) -> tuple[Array, Array]:
    """Take rows apart; a step of 2 along rows that are spread over an explicit mesh is an error."""
    pairs = rows.reshape(len(rows) // 2, 2, *rows.shape[1:])
    return pairs[:, 0], pairs[:, 1]


def _means(logprobs: PerToken, mask: Mask) -> Float[Array, " batch"]:
    lengths = jnp.sum(mask, axis=-1, dtype=logprobs.dtype)
    return jnp.sum(logprobs, axis=-1) / jnp.maximum(lengths, 1)


def _pair_mean(
    compared: _Compared,
    logprobs: PerToken,
    mask: Mask,
    denominator: Coefficient | None,
    tokens_per_pair: Coefficient | None,
) -> LossOutput:
    """Average over pairs, and add the weighted cross entropy of the chosen sequences."""
    losses, *rewarded, beta, sft_weight = compared
    labelled = jnp.logical_or(*_chosen_and_rejected(jnp.any(mask, axis=-1)))
    total = jnp.sum(jnp.where(labelled, losses, 0))
    count = max(1, len(losses)) if denominator is None else denominator
    if not (isinstance(sft_weight, int | float) and sft_weight == 0):
        (chosen_logprobs, _), (kept, _) = map(_chosen_and_rejected, (logprobs, mask))
        chosen = cross_entropy(chosen_logprobs, kept)
        if tokens_per_pair is None:
            # Pairs without labels fill up a micro-batch, and the denominator of the batch leaves
            # them out: the cross entropy would weigh more with them.
            pairs = count if denominator is None else jnp.sum(labelled)
            sums = token_mean(chosen, kept) * jnp.asarray(pairs, losses.dtype)
        else:
            sums = token_mean(chosen, kept, denominator=tokens_per_pair)
        total += jnp.asarray(sft_weight, losses.dtype) * sums
    metrics = preference_metrics(*rewarded, beta=beta, where=labelled)
    return LossOutput(total / one_number("denominator", count, losses.dtype), metrics)


def _reference(
    labels: Labels,
    logprobs: PerToken,
    per_token: SampleValues | None,
    chosen: ArrayLike | None,
    rejected: ArrayLike | None,
) -> Float[Array, " batch"] | None:
    """Sum the reference's log-probabilities over each sequence, unless the sums are passed."""
    dtype, pairs = logprobs.dtype, len(logprobs) // 2
    if (chosen is None) != (rejected is None):
        missing = "ref_rejected_logps" if rejected is None else "ref_chosen_logps"
        raise TypeError(f"{missing} must be given with the other sums of a pair, got None")
    if chosen is not None and rejected is not None:
        sums = jnp.asarray(chosen, dtype), jnp.asarray(rejected, dtype)
        for name, value in zip(("ref_chosen_logps", "ref_rejected_logps"), sums, strict=True):
            if value.shape != (pairs,):
                raise ValueError(f"{name} must have shape {(pairs,)}, got {value.shape}")
        return jnp.stack(sums, axis=1).reshape(-1)
    if per_token is None:
        return None
    rows = aligned("ref_logps", per_token, labels, dtype)
    return jnp.sum(masked_inputs(labels.mask, ref_logps=rows)[0], axis=-1)
