"""On-policy distillation under its name in Twinkle."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from twinkle_jax.loss.distillation import generalised_jsd
from twinkle_jax.loss.masked_inputs import Scalar
from twinkle_jax.loss.reduction import token_mean
from twinkle_jax.loss.twinkle.inputs.known_arguments import refuse_unknown
from twinkle_jax.loss.twinkle.inputs.labels import entry, floating, read_labels
from twinkle_jax.loss.twinkle.output import Loss, LossOutput

Logits = Float[Array, "batch time vocab"]


@dataclass(frozen=True)
class GKDLoss(Loss):
    """Divergence of a student from its teacher, `token_mean`.

    See `generalised_jsd`, which this calls. Immutable, equal when its fields are, hashable.

    Args:
        beta: weight of the teacher, in [0, 1]: 0 for the divergence from teacher to student, 1 for
            the reverse.
        temperature: what both logits are divided by, above 0.
        ignore_index: the label that means "no loss here".
        chunk_size: tokens to compute at a time.
        topk: tokens of the vocabulary to compare, the teacher's most likely ones; None for all.

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

    beta: Scalar = 0.5
    temperature: Scalar = 1.0
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
        denominator: Scalar | None = None,
        **kwargs: Any,
    ) -> LossOutput:
        """Compute the loss of a batch.

        Args:
            inputs: `labels` [batch, time], with `ignore_index` where there is no loss.
            outputs: `logits` [batch, time, vocabulary] of the student.
            teacher_logits: logits of the teacher, of that shape; or
            teacher_topk_logprobs: log-probabilities [batch, time, k] of some tokens, from a
                server, and
            teacher_topk_indices: which tokens these are. Both distributions are then over these
                tokens alone.
            topk: tokens to compare in place of the loss's own `topk`.
            denominator: for gradient accumulation, the labelled tokens in the whole batch.
            **kwargs: arguments of other losses are ignored, so that losses can be swapped.

        Returns:
            The loss, differentiable in `logits`.

        Raises:
            ValueError: if a shape does not fit.
            TypeError: if there is no teacher, labels are not integers, or an argument is unknown.
        """
        refuse_unknown(kwargs)
        labels = read_labels(inputs, self.ignore_index)
        student = floating("outputs['logits']", entry("outputs", outputs, "logits")[1])
        if student.ndim != 3 or student.shape[:2] != labels.mask.shape:
            raise ValueError(
                "outputs['logits'] must be [batch, time, vocabulary] with inputs['labels'] of "
                f"shape {labels.mask.shape}, got {student.shape}"
            )
        if teacher_topk_logprobs is not None and teacher_topk_indices is not None:
            teacher = floating("teacher_topk_logprobs", teacher_topk_logprobs)
            student = _at(student, jnp.asarray(teacher_topk_indices), teacher)
        elif teacher_logits is not None:
            teacher = floating("teacher_logits", teacher_logits)
            count = self.topk if topk is None else topk
            if count is not None:
                teacher, indices = jax.lax.top_k(teacher, count)
                student = _at(student, indices, teacher)
        else:
            raise TypeError(
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


def _at(student: Logits, indices: Array, teacher: Logits) -> Logits:
    """Give the student's logits of the tokens that the teacher is known at."""
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"teacher_topk_indices must be integers, got {indices.dtype}")
    if indices.shape != teacher.shape or indices.shape[:2] != student.shape[:2]:
        raise ValueError(
            f"teacher_topk_indices must have shape {(*student.shape[:2], teacher.shape[-1])}, that "
            f"of teacher_topk_logprobs, got {indices.shape}"
        )
    return jnp.take_along_axis(student, indices, axis=-1, mode="fill", fill_value=jnp.nan)
