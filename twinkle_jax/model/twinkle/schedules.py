"""Learning-rate schedules by Twinkle's and PyTorch's names."""

import inspect
import math
from collections.abc import Callable
from typing import Any

Factor = Callable[[int], float]
Schedule = Callable[[int, float], float]  # number of steps and base rate -> learning rate


def _constant() -> Schedule:
    return lambda step, base: base


def _cosine_annealing(*, T_max: int, eta_min: float = 0.0) -> Schedule:  # noqa: N803  PyTorch's
    """Swing between the base rate and `eta_min`, which it reaches after `T_max` steps."""
    if isinstance(T_max, bool) or not isinstance(T_max, int) or T_max < 1:
        raise ValueError(f"T_max must be a positive int, got {T_max!r}")

    def rate(step: int, base: float) -> float:
        return eta_min + (base - eta_min) * 0.5 * (1 + math.cos(math.pi * step / T_max))

    return rate


def _cosine_warmup(*, num_training_steps: int, num_warmup_steps: int = 0) -> Schedule:
    def decay(part: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * part))

    return _warmed_up(decay, num_warmup_steps, num_training_steps)


def _linear_warmup(*, num_training_steps: int, num_warmup_steps: int = 0) -> Schedule:
    return _warmed_up(lambda part: 1 - part, num_warmup_steps, num_training_steps)


def _warmed_up(decay: Callable[[float], float], warmup: int, steps: int) -> Schedule:
    def rate(step: int, base: float) -> float:
        if step < warmup:
            return base * step / warmup
        return base * decay(min((step - warmup) / max(steps - warmup, 1), 1.0))

    return rate


def _lambda(*, lr_lambda: Factor) -> Schedule:
    return lambda step, base: base * lr_lambda(step)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "ConstantLR": _constant,
    "CosineAnnealingLR": _cosine_annealing,
    "CosineWarmupScheduler": _cosine_warmup,
    "LinearWarmupScheduler": _linear_warmup,
    "LambdaLR": _lambda,
}


def choose_schedule(name: str | Factor, options: dict[str, Any]) -> Schedule:
    """Build a schedule by name, or from a function from the number of steps to a factor."""
    if callable(name):
        if options:
            raise TypeError(f"options must go with a name, not with a function, got {options}")
        return _lambda(lr_lambda=name)
    if name not in SCHEDULES:
        raise ValueError(
            f"scheduler must be one of {', '.join(SCHEDULES)} or a function from the number of "
            f"steps to a factor, got {name!r}"
        )
    known = inspect.signature(SCHEDULES[name]).parameters
    needed = {key for key, p in known.items() if p.default is p.empty}
    if set(options) - set(known) or needed - set(options):
        raise TypeError(
            f"options of {name} must be {', '.join(known) or 'none'}, got {sorted(options)}"
        )
    return SCHEDULES[name](**options)
