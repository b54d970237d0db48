"""What a loss object is and what it returns."""

import abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jaxtyping import Array, Float

from twinkle_jax.loss.policy_metrics import PolicyMetrics

Unit = Literal["tokens", "sequences", "pairs", "batches"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class LossOutput(Mapping[str, Any]):
    """The loss of a batch and, where the loss has them, its metrics.

    `num_tokens` is there where the loss is a sum, which the tokens are still to divide.

    A pytree, so it may leave `jit` and be the value that `jax.grad(..., has_aux=True)` passes on.
    Fields are read as attributes, or by name as from Twinkle's dictionary.

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
    """Base of the loss objects: subclass it to write one of your own.

    The flags say what the model's forward pass has to put into `outputs`, and `divides_by` what
    the loss divides by, so that a training loop can sum over micro-batches and divide once.
    """

    require_logps: bool = True
    require_logits: bool = False
    require_values: bool = False

    @property
    def divides_by(self) -> Unit:
        """What the loss is a mean over, which is what a `denominator` counts.

        `'tokens'` with a label, `'sequences'`, `'pairs'` of sequences, or `'batches'`: of a loss
        that knows no `denominator`, each micro-batch weighs the same.
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
            inputs: the batch that the model was given, with its `labels`.
            outputs: what the model returned.
            **kwargs: what else the loss needs, such as `advantages`.

        Returns:
            The loss, and its metrics where it has them.
        """
