"""Supervised fine-tuning from logits under Twinkle's name for the form that saves memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinkle_jax.loss.masked_inputs import Scalar
from twinkle_jax.loss.twinkle.cross_entropy import CrossEntropyLoss
from twinkle_jax.loss.twinkle.output import Loss, LossOutput


@dataclass(frozen=True)
class ChunkedCrossEntropyLoss(Loss):
    """`CrossEntropyLoss`, which needs no chunks here.

    Twinkle goes through the logits in chunks so as not to hold their probabilities beside them.
    Compiled, `CrossEntropyLoss` holds nothing beside the logits and their gradient as it is, and
    chunks would add to that. Where logits need not exist at all, `token_logprobs` saves more.

    Args:
        chunk_size: taken for Twinkle's sake; changes nothing.
        ignore_index: the label that means "no loss here".
        reduction: `'mean'`, or `'sum'`: then the output has `num_tokens`, to divide by later.
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
            raise ValueError(f"chunk_size must be at least 1, got {self.chunk_size}")
        self._whole()  # refuses the reductions that it does not know

    def __call__(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        denominator: Scalar | None = None,
        **kwargs: Any,
    ) -> LossOutput:
        """Compute the loss of a batch: see `CrossEntropyLoss`."""
        return self._whole()(inputs, outputs, denominator=denominator, **kwargs)

    def _whole(self) -> CrossEntropyLoss:
        return CrossEntropyLoss(self.ignore_index, self.reduction, self.dft)
