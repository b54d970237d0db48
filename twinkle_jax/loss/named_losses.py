"""Losses by name, and plain functions as losses."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from twinkle_jax.loss.contrastive import InfonceLoss
from twinkle_jax.loss.loss_object import Loss, LossOutput, LossUnit
from twinkle_jax.loss.policy_losses import POLICY_LOSSES
from twinkle_jax.loss.preference import CPOLoss, DPOLoss, ORPOLoss, SimPOLoss
from twinkle_jax.loss.supervised import (
    ChunkedCrossEntropyLoss,
    CrossEntropyLoss,
    GKDLoss,
    LigerFusedLinearCrossEntropyLoss,
    MSELoss,
    PPOValueLoss,
)

LossFunction = Callable[..., Float[Array, ""] | Mapping[str, Any]]
"""A function `(inputs, outputs, ...)` that returns a loss, or a mapping with a `loss`."""


@dataclass(frozen=True)
class FunctionLoss(Loss):
    """A function `(inputs, outputs, ...)` as a loss object; see `get_loss`.

    Args:
        function: computes the loss; called with the keyword arguments that it names.
    """

    function: LossFunction

    @property
    def divides_by(self) -> LossUnit:
        """Tokens if the function takes a `denominator`, else micro-batches."""
        return "tokens" if "denominator" in self._parameters() else "batches"

    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function).parameters

    def __call__(
        self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], **kwargs: Any
    ) -> LossOutput:
        """Call the function with the arguments that it names; with all if it takes `**kwargs`."""
        parameters = self._parameters()
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        named = {k: v for k, v in kwargs.items() if takes_all or k in parameters}
        result = self.function(inputs, outputs, **named)
        loss, metrics = result, None
        if isinstance(result, Mapping):
            loss, metrics = result["loss"], result.get("metrics")
        if not isinstance(loss, float | jax.Array) or jnp.ndim(loss):
            kind = getattr(loss, "shape", type(loss).__name__)
            raise TypeError(f"the loss function must return a number or a mapping, got {kind}")
        return LossOutput(jnp.asarray(loss), metrics)


_OTHERS: Mapping[str, type[Loss]] = {
    "chunked_cross_entropy": ChunkedCrossEntropyLoss,
    "cpo": CPOLoss,
    "cross_entropy": CrossEntropyLoss,
    "dpo": DPOLoss,
    "gkd": GKDLoss,
    "infonce": InfonceLoss,
    "liger_fused_linear_cross_entropy": LigerFusedLinearCrossEntropyLoss,
    "mse": MSELoss,
    "orpo": ORPOLoss,
    "ppo_value": PPOValueLoss,
    "simpo": SimPOLoss,
}
LOSSES: Mapping[str, type[Loss]] = MappingProxyType(
    dict(sorted({**POLICY_LOSSES, **_OTHERS}.items()))
)
"""Class of each loss by its short name. `get_loss` also knows them by the name of the class."""


def get_loss(loss: str | type[Loss] | Loss | LossFunction, **options: Any) -> Loss:
    """Make a loss object from its name, its class or a function.

    Args:
        loss: a name (`'grpo'`, or that of the class, `'GRPOLoss'`); a class; an object, which is
            returned as it is; or a function `(inputs, outputs, ...)` that returns a number, or a
            mapping with a `loss`. A function is called with the arguments that it names. If one of
            them is `denominator`, it must divide its sum over tokens by it; otherwise each
            micro-batch weighs the same.
        **options: arguments of the class.

    Returns:
        The loss object.

    Raises:
        ValueError: if no loss has this name.
        TypeError: if `loss` is none of these, or does not take one of the options.

    Example:
        >>> get_loss("grpo", epsilon=0.1).epsilon
        0.1
    """
    if isinstance(loss, str):
        by_name = {**LOSSES, **{cls.__name__: cls for cls in LOSSES.values()}}
        if loss not in by_name:
            known = ", ".join(map(repr, LOSSES))
            raise ValueError(f"loss must be one of {known}, or the name of a class, got {loss!r}")
        return by_name[loss](**options)
    if isinstance(loss, type) and issubclass(loss, Loss):
        return loss(**options)
    if isinstance(loss, type) or not callable(loss):
        raise TypeError(f"loss must be a name, a loss or a function, got {loss!r}")
    if options:
        raise TypeError(f"options must be given to the class, not to {loss!r}, got {options}")
    return loss if isinstance(loss, Loss) else FunctionLoss(loss)
