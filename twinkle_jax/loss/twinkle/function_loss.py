"""A plain function in the place of a loss object."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from twinkle_jax.loss.twinkle.output import Loss, LossOutput, Unit

LossFunction = Callable[..., Float[Array, ""] | Mapping[str, Any]]


@dataclass(frozen=True)
class FunctionLoss(Loss):
    """A function `(inputs, outputs, ...)` as a loss: it gets those arguments that it names.

    One that names `denominator` must divide its sum over tokens by it. One that does not is taken
    as it is, and each micro-batch weighs the same. It may return a number, or a mapping with a
    `loss`.

    Args:
        function: what computes the loss.
    """

    function: LossFunction

    @property
    def divides_by(self) -> Unit:
        """Tokens where the function names `denominator`, else micro-batches."""
        return "tokens" if "denominator" in self._named() else "batches"

    def _named(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function).parameters

    def __call__(
        self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], **kwargs: Any
    ) -> LossOutput:
        """Call the function with what it names, or with everything if it takes `**kwargs`."""
        named = self._named()
        everything = any(p.kind is p.VAR_KEYWORD for p in named.values())
        chosen = {k: v for k, v in kwargs.items() if everything or k in named}
        result = self.function(inputs, outputs, **chosen)
        loss, metrics = result, None
        if isinstance(result, Mapping):
            loss, metrics = result["loss"], result.get("metrics")
        if not isinstance(loss, float | jax.Array) or jnp.ndim(loss):
            kind = getattr(loss, "shape", type(loss).__name__)
            raise TypeError(f"the loss function must return a number or a mapping, got {kind}")
        return LossOutput(jnp.asarray(loss), metrics)
