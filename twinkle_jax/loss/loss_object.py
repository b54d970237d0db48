"""Base class of the loss objects that a train step takes, and what they return."""

import abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jaxtyping import Array, Float

from twinkle_jax.loss.policy_metrics import PolicyMetrics

LossUnit = Literal["tokens", "sequences", "pairs", "batches"]
"""What a loss is a mean over: see `Loss.divides_by`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class LossOutput(Mapping[str, Any]):
    """The loss of a batch and its metrics, as attributes or by name, as in Twinkle's dictionary.

    A pytree, so `jit` and `jax.grad(..., has_aux=True)` may return it.

    Attributes:
        loss: the loss.
        metrics: metrics of the step; None where the loss has none.
        num_tokens: tokens to divide a loss by that is a sum; None for a mean.

    Example:
        >>> output = LossOutput(0.5)
        >>> output.loss, output["loss"], dict(output)
        (0.5, 0.5, {'loss': 0.5, 'metrics': None, 'num_tokens': None})
    """

    loss: Float[Array, ""]
    metrics: PolicyMetrics | None = None
    num_tokens: Float[Array, ""] | None = None

    def __getitem__(self, name: str) -> Any:
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dataclass_fields__)

    def __len__(self) -> int:
        return len(self.__dataclass_fields__)


class Loss(abc.ABC):
    """Base class of loss objects; subclass it to write a loss of your own.

    The flags say what the forward pass must put into `outputs`. `divides_by` says what the loss
    divides by, so that a training loop can sum over micro-batches and divide once.
    """

    require_logps: bool = True
    require_logits: bool = False
    require_values: bool = False

    @property
    def divides_by(self) -> LossUnit:
        """What the loss is a mean over, and what `denominator` counts.

        `'tokens'` with a label, `'sequences'`, or `'pairs'` of sequences. `'batches'`: the loss
        ignores `denominator`, and each micro-batch weighs the same.
        """
        return "tokens"

    @property
    def require_entropy(self) -> bool:
        """Whether `outputs['entropies']` is needed."""
        return False

    @abc.abstractmethod
    def __call__(
        self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], **kwargs: Any
    ) -> LossOutput:
        """Compute the loss of a batch.

        Args:
            inputs: the batch that the model was called with, and its `labels`.
            outputs: outputs of the model, such as `logps`.
            **kwargs: further inputs, such as `advantages`.

        Returns:
            The loss and, if it has any, its metrics.
        """
