"""Learning-rate schedules by Twinkle's and PyTorch's names: a factor for each number of steps."""

import math
from collections.abc import Callable
from typing import Any

Schedule = Callable[[int], float]


def _constant() -> Schedule:
    return lambda step: 1.0


def _warmup(step: int, steps: int) -> float:
    return min(step / max(steps, 1), 1.0) if steps else 1.0


def _cosine_warmup(*, num_warmup_steps: int = 0, num_training_steps: int) -> Schedule:
    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return _warmup(step, num_warmup_steps)
        rest = max(num_training_steps - num_warmup_steps, 1)
        return 0.5 * (1 + math.cos(math.pi * min((step - num_warmup_steps) / rest, 1.0)))

    return factor


def _linear_warmup(*, num_warmup_steps: int = 0, num_training_steps: int) -> Schedule:
    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return _warmup(step, num_warmup_steps)
        rest = max(num_training_steps - num_warmup_steps, 1)
        return max((num_training_steps - step) / rest, 0.0)

    return factor


def _lambda(*, lr_lambda: Schedule) -> Schedule:
    return lr_lambda


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "ConstantLR": _constant,
    "CosineWarmupScheduler": _cosine_warmup,
    "LinearWarmupScheduler": _linear_warmup,
    "LambdaLR": _lambda,
}


def named_schedule(name: str | Schedule, options: dict[str, Any]) -> Schedule:
    """Build a schedule by name, or take a function from steps to a factor as it is."""
    if callable(name):
        return name
    if name not in SCHEDULES:
        raise ValueError(
            f"expected a scheduler of {', '.join(SCHEDULES)} or a function from the number of "
            f"steps to a factor, got {name!r}"
        )
    try:
        return SCHEDULES[name](**options)
    except TypeError as error:
        known = ", ".join(SCHEDULES[name].__annotations__.keys() - {"return"}) or "no options"
        raise TypeError(f"{name} knows {known}: {error}") from None
