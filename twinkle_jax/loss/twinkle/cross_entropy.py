"""Supervised fine-tuning under its name in Twinkle."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from twinkle_jax.loss.masked_inputs import Scalar
from twinkle_jax.loss.reduction import token_mean
from twinkle_jax.loss.supervised import cross_entropy, dynamic_fine_tuning
from twinkle_jax.loss.twinkle.inputs.known_arguments import refuse_unknown
from twinkle_jax.loss.twinkle.inputs.labels import label_logprobs, read_labels
from twinkle_jax.loss.twinkle.output import Loss, LossOutput


@dataclass(frozen=True)
class CrossEntropyLoss(Loss):
    """Negative log-probability of the labels, `token_mean`.

    See `cross_entropy` and `dynamic_fine_tuning`, which this calls. Immutable, equal when its
    fields are, hashable.

    Args:
        ignore_index: the label that means "no loss here".
        reduction: `'mean'`, or `'sum'`: then the output has `num_tokens`, to divide by later.
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
            raise ValueError(f"reduction must be one of 'mean', 'sum', got {self.reduction!r}")

    def __call__(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        denominator: Scalar | None = None,
        **kwargs: Any,
    ) -> LossOutput:
        """Compute the loss of a batch.

        Args:
            inputs: `labels` [batch, time], or [time], with `ignore_index` where there is no loss.
            outputs: `logps` of that shape, or `logits` with the vocabulary as one axis more.
            denominator: for gradient accumulation, the labelled tokens in the whole batch.
            **kwargs: arguments of other losses are ignored, so that losses can be swapped.

        Returns:
            The loss, differentiable in `logps` or `logits`; with `'sum'` also `num_tokens`.

        Raises:
            ValueError: if a shape does not fit, or a label is seen to name no token.
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
