"""The mean squared error under its name in Twinkle."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from twinkle_jax.loss.masked_inputs import Scalar
from twinkle_jax.loss.twinkle.inputs.known_arguments import refuse_unknown
from twinkle_jax.loss.twinkle.inputs.labels import entry, floating
from twinkle_jax.loss.twinkle.output import Loss, LossOutput


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
        denominator: Scalar | None = None,
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
