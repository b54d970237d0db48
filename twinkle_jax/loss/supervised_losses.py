"""Losses under Twinkle's names with a target: tokens, a teacher, numbers, returns of a critic."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from twinkle_jax.loss.loss_object import (
    InvalidLossInputError,
    Loss,
    LossOutput,
    SampleValues,
    aligned,
    entry,
    floating,
    label_logprobs,
    per_position,
    read_labels,
    refuse_unknown,
)
from twinkle_jax.loss.masked_inputs import Coefficient
from twinkle_jax.loss.reduction import token_mean
from twinkle_jax.loss.supervised import (
    Logits,
    clipped_value_loss,
    cross_entropy,
    dynamic_fine_tuning,
    generalised_jsd,
)


@dataclass(frozen=True)
class CrossEntropyLoss(Loss):
    """Negative log-probability of the labels, `token_mean`.

    See `cross_entropy` and `dynamic_fine_tuning`, which this calls. Immutable, equal when its
    fields are, hashable.

    Args:
        ignore_index: the label that means "no loss here".
        reduction: `'mean'`, or `'sum'` with `num_tokens` in the output, to divide by later.
        dft: whether to weigh tokens by their probability.

    Raises:
        ValueError: if the reduction is unknown.

    References:
        [On the Generalization of SFT](https://arxiv.org/abs/2508.05629) (Wu et al., 2025), DFT

    Example:
        >>> outputs = {"logps": jnp.array([[-1.0, -2.0, 0.0]])}
        >>> CrossEntropyLoss()({"labels": jnp.array([[5, 6, -100]])}, outputs).loss
        Array(1.5, dtype=float32)
    """

    ignore_index: int = -100
    reduction: str = "mean"
    dft: bool = False

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise InvalidLossInputError(
                f"reduction must be one of 'mean', 'sum', got {self.reduction!r}"
            )

    def __call__(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        denominator: Coefficient | None = None,
        **kwargs: Any,
    ) -> LossOutput:
        """Compute the loss of a batch.

        Args:
            inputs: `labels` [batch, time], or [time], with `ignore_index` where there is no loss.
            outputs: `logps` of that shape, or `logits` of that shape and the vocabulary.
            denominator: for gradient accumulation, the labelled tokens in the whole batch.
            **kwargs: arguments of other losses are ignored, so that losses can be swapped.

        Returns:
            The loss, differentiable in `logps` or `logits`; with `'sum'` also `num_tokens`.

        Raises:
            ValueError: if a shape does not fit, or a label that is not traced is no token.
            TypeError: if labels are not integers, or an argument is unknown.
        """
        refuse_unknown(kwargs)
        labels = read_labels(inputs, self.ignore_index)
        logprobs = label_logprobs(outputs, labels)
        per_token = dynamic_fine_tuning if self.dft else cross_entropy
        losses = per_token(logprobs, labels.mask)
        if self.reduction == "mean":
            return LossOutput(token_mean(losses, labels.mask, denominator=denominator))
        divisor = 1.0 if denominator is None else denominator
        tokens = jnp.maximum(jnp.sum(labels.mask, dtype=losses.dtype), 1)
        return LossOutput(token_mean(losses, labels.mask, denominator=divisor), num_tokens=tokens)


@dataclass(frozen=True)
class ChunkedCrossEntropyLoss(Loss):
    """`CrossEntropyLoss` under another name: compiled, it needs no chunks.

    Twinkle computes it in chunks of logits to save memory. Here `CrossEntropyLoss` holds only the
    logits and their gradient when compiled. `token_logprobs` saves more: it never holds all logits.

    Args:
        chunk_size: for Twinkle's signature; has no effect.
        ignore_index: the label that means "no loss here".
        reduction: `'mean'`, or `'sum'` with `num_tokens` in the output, to divide by later.
        dft: whether to weigh tokens by their probability.

    Raises:
        ValueError: if the chunk size is below 1, or the reduction is unknown.

    References:
        [On the Generalization of SFT](https://arxiv.org/abs/2508.05629) (Wu et al., 2025), DFT

    Example:
        >>> import jax.numpy as jnp
        >>> outputs = {"logits": jnp.zeros((1, 3, 8))}
        >>> ChunkedCrossEntropyLoss()({"labels": jnp.array([[5, 6, -100]])}, outputs).loss
        Array(2.0794415, dtype=float32)
    """

    chunk_size: int = 1024
    ignore_index: int = -100
    reduction: str = "mean"
    dft: bool = False

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise InvalidLossInputError(f"chunk_size must be at least 1, got {self.chunk_size}")
        self._unchunked()  # raises for an unknown reduction

    def __call__(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        denominator: Coefficient | None = None,
        **kwargs: Any,
    ) -> LossOutput:
        """Compute the loss of a batch: see `CrossEntropyLoss`."""
        return self._unchunked()(inputs, outputs, denominator=denominator, **kwargs)

    def _unchunked(self) -> CrossEntropyLoss:
        return CrossEntropyLoss(self.ignore_index, self.reduction, self.dft)


@dataclass(frozen=True)
class LigerFusedLinearCrossEntropyLoss(CrossEntropyLoss):
    """`CrossEntropyLoss` under another name: its log-probabilities come from fused kernels anyway.

    Twinkle calls Liger's kernel, so that the logits are never held. Here `token_logprobs`, which
    the train step calls, holds none for any loss.

    Args:
        ignore_index: the label that means "no loss here".
        reduction: `'sum'` with `num_tokens` in the output, to divide by later, or `'mean'`.
        dft: whether to weigh tokens by their probability.
        label_smoothing: must be 0.
        softcap: must be None: the model's configuration says whether logits are capped.

    Raises:
        ValueError: if the reduction is unknown, or one of the last two is set.

    References:
        [Liger Kernel](https://arxiv.org/abs/2410.10989) (Hsu et al., 2024)

    Example:
        >>> outputs = {"logps": jnp.array([[-1.0, -2.0, 0.0]])}
        >>> inputs = {"labels": jnp.array([[5, 6, -100]])}
        >>> output = LigerFusedLinearCrossEntropyLoss()(inputs, outputs)
        >>> print(output.loss, output.num_tokens)
        3.0 2.0
    """

    reduction: str = "sum"
    label_smoothing: float = 0.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing != 0:
            raise ValueError(f"label_smoothing must be 0, got {self.label_smoothing}")
        if self.softcap is not None:
            raise ValueError(
                f"softcap must be None, for the model's configuration has it, got {self.softcap}"
            )


@dataclass(frozen=True)
class GKDLoss(Loss):
    """Divergence of a student from its teacher, `token_mean`.

    See `generalised_jsd`, which this calls. Immutable, equal when its fields are, hashable.

    Args:
        beta: weight of the teacher, in [0, 1]: 0 for the divergence of the teacher from the student
            (mode-covering), 1 for the reverse (mode-seeking).
        temperature: what both logits are divided by, above 0.
        ignore_index: the label that means "no loss here".
        chunk_size: tokens to compute at a time.
        topk: compare the teacher's most likely tokens only, this many; None for all.

    Raises:
        ValueError: if a number is out of its range.

    References:
        [On-Policy Distillation of Language Models](https://arxiv.org/abs/2306.13649)
        (Agarwal et al., 2024)

    Example:
        >>> logits = jnp.zeros((1, 2, 4))
        >>> inputs, outputs = {"labels": jnp.array([[1, -100]])}, {"logits": logits}
        >>> GKDLoss()(inputs, outputs, teacher_logits=logits).loss
        Array(0., dtype=float32)
    """

    require_logps = False
    require_logits = True

    beta: Coefficient = 0.5
    temperature: Coefficient = 1.0
    ignore_index: int = -100
    chunk_size: int = 512
    topk: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.beta, int | float) and not 0 <= self.beta <= 1:
            raise ValueError(f"beta must be in [0, 1], got {self.beta}")
        if isinstance(self.temperature, int | float) and not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}")
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {self.chunk_size}")

    def __call__(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        teacher_logits: ArrayLike | None = None,
        teacher_topk_logprobs: ArrayLike | None = None,
        teacher_topk_indices: ArrayLike | None = None,
        topk: int | None = None,
        denominator: Coefficient | None = None,
        **kwargs: Any,
    ) -> LossOutput:
        """Compute the loss of a batch.

        Args:
            inputs: `labels` [batch, time], with `ignore_index` where there is no loss.
            outputs: `logits` [batch, time, vocabulary] of the student; or `teacher_token_logits`
                [batch, time, k], those of the teacher's tokens alone.
            teacher_logits: logits of the teacher, of that shape; or
            teacher_topk_logprobs: log-probabilities [batch, time, k] of the teacher's most
                likely tokens, as servers return them, and
            teacher_topk_indices: ids of these tokens. Both distributions are renormalised over
                them.
            topk: overrides the `topk` of the loss.
            denominator: for gradient accumulation, the labelled tokens in the whole batch.
            **kwargs: arguments of other losses are ignored, so that losses can be swapped.

        Returns:
            The loss, differentiable in `logits`.

        Raises:
            ValueError: if a shape does not fit, or there is no teacher.
            TypeError: if an argument is unknown, or labels are not integers.
        """
        refuse_unknown(kwargs)
        labels = read_labels(inputs, self.ignore_index)
        key, values = entry("outputs", outputs, "teacher_token_logits", "logits")
        student = floating(f"outputs[{key!r}]", values)
        if student.ndim != 3 or student.shape[:2] != labels.mask.shape:
            raise ValueError(
                f"outputs[{key!r}] must be [batch, time, vocabulary] with inputs['labels'] of "
                f"shape {labels.mask.shape}, got {student.shape}"
            )
        if teacher_topk_logprobs is not None and teacher_topk_indices is not None:
            teacher = floating("teacher_topk_logprobs", teacher_topk_logprobs)
            if key == "logits":
                student = _gathered(student, jnp.asarray(teacher_topk_indices), teacher)
        elif teacher_logits is not None:
            teacher = floating("teacher_logits", teacher_logits)
            count = self.topk if topk is None else topk
            if count is not None:
                teacher, indices = jax.lax.top_k(teacher, count)
                student = _gathered(student, indices, teacher)
        else:
            raise InvalidLossInputError(
                "teacher_logits, or teacher_topk_logprobs and teacher_topk_indices, must be given "
                "to GKDLoss, got None"
            )
        losses = generalised_jsd(
            student,
            teacher,
            labels.mask,
            beta=self.beta,
            temperature=self.temperature,
            chunk_size=self.chunk_size,
        )
        return LossOutput(token_mean(losses, labels.mask, denominator=denominator))


def _gathered(student: Logits, indices: Array, teacher: Logits) -> Logits:
    """Gather the student's logits of the teacher's tokens."""
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"teacher_topk_indices must be integers, got {indices.dtype}")
    if indices.shape != teacher.shape or indices.shape[:2] != student.shape[:2]:
        raise ValueError(
            f"teacher_topk_indices must have shape {(*student.shape[:2], teacher.shape[-1])}, that "
            f"of teacher_topk_logprobs, got {indices.shape}"
        )
    return jnp.take_along_axis(student, indices, axis=-1, mode="fill", fill_value=jnp.nan)


@dataclass(frozen=True)
class MSELoss(Loss):
    r"""Mean squared error of `outputs['logits']` against `inputs['labels']`, for regression.

    $$L = \frac{1}{N} \sum_n (y_n - \hat y_n)^2$$

    Immutable, equal to every other one, hashable.

    References:
        [Learning to summarize from human feedback](https://arxiv.org/abs/2009.01325) (Stiennon et
        al., 2020), for models that predict a number

    Example:
        >>> outputs = {"logits": jnp.array([[1.0, 2.0]])}
        >>> MSELoss()({"labels": jnp.array([[3.0, 5.0]])}, outputs).loss
        Array(6.5, dtype=float32)
    """

    require_logps = False
    require_logits = True

    def __call__(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        denominator: Coefficient | None = None,
        **kwargs: Any,
    ) -> LossOutput:
        """Compute the loss of a batch.

        Args:
            inputs: `labels`, the numbers to predict, of any shape.
            outputs: `logits`, the predictions, of that shape.
            denominator: for gradient accumulation, $N$, the numbers in the whole batch.
            **kwargs: arguments of other losses are ignored, so that losses can be swapped.

        Returns:
            The loss, differentiable in `logits`.

        Raises:
            ValueError: if the shapes differ.
            TypeError: if predictions are not floating point, or an argument is unknown.
        """
        refuse_unknown(kwargs)
        predictions = floating("outputs['logits']", entry("outputs", outputs, "logits")[1])
        targets = jnp.asarray(entry("inputs", inputs, "labels")[1]).astype(predictions.dtype)
        if targets.shape != predictions.shape:
            raise ValueError(
                f"outputs['logits'] must have the shape of inputs['labels'], {targets.shape}, got "
                f"{predictions.shape}"
            )
        errors = jnp.square(predictions - jax.lax.stop_gradient(targets))
        count = max(1, errors.size) if denominator is None else denominator
        return LossOutput(jnp.sum(errors) / jnp.asarray(count, errors.dtype))


@dataclass(frozen=True)
class PPOValueLoss(Loss):
    """Clipped squared error of a critic, `token_mean`.

    See `clipped_value_loss`, which this calls. Immutable, equal when its fields are, hashable.

    Args:
        epsilon: how far a value may move from the old one, in units of reward.
        ignore_index: the label that means "no loss here".

    References:
        [Proximal Policy Optimization](https://arxiv.org/abs/1707.06347) (Schulman et al., 2017)

    Example:
        >>> import jax.numpy as jnp
        >>> outputs = {"values": jnp.array([[0.0, 1.0, 10.0]])}
        >>> inputs = {"labels": jnp.array([[5, 6, -100]])}
        >>> PPOValueLoss()(inputs, outputs, old_values=[[0.0, 1.0]], returns=[[1.0, 1.0]]).loss
        Array(0.25, dtype=float32)
    """

    require_logps = False
    require_values = True

    epsilon: Coefficient = 0.2
    ignore_index: int = -100

    def __call__(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        old_values: SampleValues | None = None,
        returns: SampleValues | None = None,
        denominator: Coefficient | None = None,
        **kwargs: Any,
    ) -> LossOutput:
        """Compute the loss of a batch.

        Args:
            inputs: `labels` [batch, time], with `ignore_index` where there is no loss.
            outputs: `values` [batch, time] or [batch, time, 1].
            old_values: required; values when the tokens were drawn: an array [batch, time]; or for
                each sequence a list, of its labelled tokens or of all positions; or one number.
            returns: required; what the critic should predict, in the same forms.
            denominator: for gradient accumulation, the labelled tokens in the whole batch.
            **kwargs: arguments of other losses are ignored, so that losses can be swapped.

        Returns:
            The loss, differentiable in `values`; without metrics.

        Raises:
            ValueError: if a shape or a row does not fit.
            TypeError: if labels are not integers, or an argument is missing or unknown.
        """
        refuse_unknown(kwargs)
        if old_values is None or returns is None:
            missing = "old_values" if old_values is None else "returns"
            raise TypeError(f"{missing} must be given to PPOValueLoss, got None")
        labels = read_labels(inputs, self.ignore_index)
        mask = labels.mask
        _, values = entry("outputs", outputs, "values")
        values = per_position("outputs['values']", values, mask)
        old_values = aligned("old_values", old_values, labels, values.dtype, per_sequence=True)
        returns = aligned("returns", returns, labels, values.dtype, per_sequence=True)
        losses = clipped_value_loss(values, old_values, returns, mask, epsilon=self.epsilon)
        return LossOutput(token_mean(losses, mask, denominator=denominator))
