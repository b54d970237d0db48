"""Twinkle's loss of a critic."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinkle_jax.loss.masked_inputs import Scalar
from twinkle_jax.loss.reduction import token_mean
from twinkle_jax.loss.twinkle.inputs.alignment import SampleValues, aligned
from twinkle_jax.loss.twinkle.inputs.known_arguments import refuse_unknown
from twinkle_jax.loss.twinkle.inputs.labels import entry, per_position, read_labels
from twinkle_jax.loss.twinkle.output import Loss, LossOutput
from twinkle_jax.loss.value import clipped_value_loss


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

    epsilon: Scalar = 0.2
    ignore_index: int = -100

    def __call__(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        old_values: SampleValues | None = None,
        returns: SampleValues | None = None,
        denominator: Scalar | None = None,
        **kwargs: Any,
    ) -> LossOutput:
        """Compute the loss of a batch.

        Args:
            inputs: `labels` [batch, time], with `ignore_index` where there is no loss.
            outputs: `values` [batch, time] or [batch, time, 1].
            old_values: values when the tokens were drawn: an array [batch, time]; or for each
                sequence a list, of its labelled tokens or of all positions; or one a sequence.
                Needed, as are `returns`.
            returns: what the critic should predict, in the same forms.
            denominator: for gradient accumulation, the labelled tokens in the whole batch.
            **kwargs: arguments of other losses are ignored, so that losses can be swapped.

        Returns:
            The loss, differentiable in `values`; it has no metrics.

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
