"""The loss of a run by its name, with those of the run's settings that it takes."""

from typing import Any

from twinkle_jax.loss import LOSSES, PolicyLoss
from twinkle_jax.training.configuration.parts import UpdateConfig


def make_loss(update: UpdateConfig, max_new_tokens: int) -> PolicyLoss:
    """Find a loss.

    Args:
        update: names it, and has its coefficients.
        max_new_tokens: the most tokens of a completion, which Dr. GRPO divides by.

    Returns:
        The loss.

    Raises:
        ValueError: if there is none of that name that learns from rewards.
    """
    policy_losses = {name: cls for name, cls in LOSSES.items() if issubclass(cls, PolicyLoss)}
    by_class_name = {cls.__name__: cls for cls in policy_losses.values()}
    kind = (policy_losses | by_class_name).get(update.loss)
    if kind is None:
        known = ", ".join(policy_losses)
        raise ValueError(f"update.loss must be one of {known}, got {update.loss!r}")
    options: dict[str, Any] = {"epsilon": update.epsilon}
    if update.epsilon_high is not None:
        options["epsilon_high"] = update.epsilon_high
    if update.kl_beta:
        options["beta"] = update.kl_beta
    if hasattr(kind, "max_completion_length"):
        options["max_completion_length"] = max_new_tokens
    return kind(**options)
