"""Losses by name, as Twinkle's scripts choose them."""

from typing import Any

from twinkle_jax.loss.twinkle.chunked_cross_entropy import ChunkedCrossEntropyLoss
from twinkle_jax.loss.twinkle.cispo import CISPOLoss
from twinkle_jax.loss.twinkle.critic import PPOValueLoss
from twinkle_jax.loss.twinkle.cross_entropy import CrossEntropyLoss
from twinkle_jax.loss.twinkle.dpo import DPOLoss
from twinkle_jax.loss.twinkle.dr_grpo import DRGRPOLoss
from twinkle_jax.loss.twinkle.function_loss import FunctionLoss, LossFunction
from twinkle_jax.loss.twinkle.gkd import GKDLoss
from twinkle_jax.loss.twinkle.grpo import BNPOLoss, DAPOLoss, GRPOLoss, GSPOLoss
from twinkle_jax.loss.twinkle.mse import MSELoss
from twinkle_jax.loss.twinkle.output import Loss
from twinkle_jax.loss.twinkle.ppo import PPOLoss
from twinkle_jax.loss.twinkle.sapo import SAPOLoss

NAMED: dict[str, type[Loss]] = {
    "bnpo": BNPOLoss,
    "chunked_cross_entropy": ChunkedCrossEntropyLoss,
    "cispo": CISPOLoss,
    "cross_entropy": CrossEntropyLoss,
    "dapo": DAPOLoss,
    "dpo": DPOLoss,
    "dr_grpo": DRGRPOLoss,
    "gkd": GKDLoss,
    "grpo": GRPOLoss,
    "gspo": GSPOLoss,
    "mse": MSELoss,
    "ppo": PPOLoss,
    "ppo_value": PPOValueLoss,
    "sapo": SAPOLoss,
}
CLASSES = {cls.__name__: cls for cls in NAMED.values()}


def get_loss(loss: str | type[Loss] | Loss | LossFunction, **options: Any) -> Loss:
    """Give a loss object, by its name, its class, or from a function.

    Args:
        loss: a name (`'grpo'`, or that of the class, `'GRPOLoss'`), a class, an object, which is
            given back, or a function `(inputs, outputs, ...)` that returns a number or a mapping
            with a `loss`. The function gets the arguments that it names. If `denominator` is one
            of them it must divide its sum over tokens by it; else each micro-batch weighs the same.
        **options: arguments of the class.

    Returns:
        The loss object.

    Raises:
        ValueError: if no loss has this name.
        TypeError: if it is nothing of all this, or there are options that it does not take.

    Example:
        >>> get_loss("grpo", epsilon=0.1).epsilon
        0.1
    """
    if isinstance(loss, str):
        cls = NAMED.get(loss) or CLASSES.get(loss)
        if cls is None:
            known = ", ".join(map(repr, NAMED))
            raise ValueError(f"loss must be one of {known}, or a class of them, got {loss!r}")
        return cls(**options)
    if isinstance(loss, type) and issubclass(loss, Loss):
        return loss(**options)
    if isinstance(loss, type) or not callable(loss):
        raise TypeError(f"loss must be a name, a loss or a function, got {loss!r}")
    if options:
        raise TypeError(f"options must be given to the class, not to {loss!r}, got {options}")
    return loss if isinstance(loss, Loss) else FunctionLoss(loss)
