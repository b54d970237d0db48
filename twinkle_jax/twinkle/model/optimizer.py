"""Optimizers and schedules by PyTorch's and Twinkle's names; optimizers are Optax's."""

import inspect
from collections.abc import Callable
from typing import Any

import optax

from twinkle_jax.training import make_optimizer, make_schedule
from twinkle_jax.training.by_name import check_options
from twinkle_jax.twinkle.names import IGNORED

DEFAULT_LEARNING_RATE = 1e-5

Factor = Callable[[int], float]
Schedule = Callable[[int, float], float]  # number of steps and base rate -> learning rate

# Optax's names of PyTorch's optimizers, and their options with PyTorch's defaults.
_TORCH: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("adamw", {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}),
    "Adam": ("adam", {"betas": (0.9, 0.999), "eps": 1e-8}),
    "SGD": ("sgd", {"momentum": 0.0, "nesterov": False}),
    "Lion": ("lion", {"betas": (0.9, 0.99), "weight_decay": 0.0}),
    "Muon": (
        "muon",
        {"weight_decay": 0.1, "momentum": 0.95, "nesterov": True}
        | {"eps": 1e-7, "ns_steps": 5, "adjust_lr_fn": None},
    ),
}
_MUON_SCALES = {None: None, "original": None, "match_rms_adamw": 0.2}  # PyTorch's `adjust_lr_fn`


def choose_optimizer(
    optimizer: str | type | optax.GradientTransformation, options: dict[str, Any]
) -> optax.GradientTransformation:
    """Make an optimizer by PyTorch's or Optax's name or PyTorch's class, or check one of Optax."""
    if isinstance(optimizer, type) and optimizer.__name__ in _TORCH:
        optimizer = optimizer.__name__
    if isinstance(optimizer, str):
        if optimizer not in _TORCH:
            return make_optimizer(optimizer, **options)
        name, defaults = _TORCH[optimizer]
        options = {x: y for x, y in options.items() if x not in IGNORED["set_optimizer"]}
        check_options(optimizer, options, defaults)
        return make_optimizer(name, **_optax_options(name, defaults | options))
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(f"optimizer must be a name or an Optax transformation, got {optimizer!r}")
    if options:
        raise TypeError(f"options must be given to the Optax transformation itself, got {options}")
    return optimizer


def _optax_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    if "betas" in options:
        options["b1"], options["b2"] = options.pop("betas")
    if name == "sgd":
        options["momentum"] = options["momentum"] or None
    if name == "muon":
        scale = options.pop("adjust_lr_fn")
        if scale not in _MUON_SCALES:
            raise ValueError(f"adjust_lr_fn must be one of {list(_MUON_SCALES)}, got {scale!r}")
        options["consistent_rms"] = _MUON_SCALES[scale]
        options["beta"] = options.pop("momentum")
    return options


def _cosine_annealing(*, T_max: int, eta_min: float = 0.0) -> Schedule:  # noqa: N803  PyTorch's
    """Oscillate between the base rate and `eta_min`, which it reaches after `T_max` steps."""
    if isinstance(T_max, bool) or not isinstance(T_max, int) or T_max < 1:
        raise ValueError(f"T_max must be a positive int, got {T_max!r}")
    falling = _falling("cosine", T_max, end_value=eta_min)
    return lambda step, base: falling(_swing(step, T_max), base)


def _constant(*, factor: float = 1 / 3, total_iters: int = 5) -> Schedule:
    """Multiply the base rate by a factor for some steps, as PyTorch's `ConstantLR` does."""
    return lambda step, base: base * (factor if step < total_iters else 1)


def _swing(position: float, half: float) -> float:
    """Return how far a pendulum is that takes `half` in each direction."""
    return abs((position + half) % (2 * half) - half)


def _cosine_warmup(
    *,
    num_training_steps: int,
    num_warmup_steps: int = 0,
    eta_min: float = 0.0,
    num_cycles: float = 0.5,
) -> Schedule:
    if not num_cycles > 0:
        raise ValueError(f"num_cycles must be above 0, got {num_cycles!r}")
    length = max(num_training_steps - num_warmup_steps, 1)
    half = length / (2 * num_cycles)
    options = {"warmup_steps": num_warmup_steps, "end_value": eta_min}
    falling = _falling("cosine", num_warmup_steps + half, **options)

    def rate(step: int, base: float) -> float:
        position = step - num_warmup_steps
        moved = position if position < 0 else _swing(min(position, length), half)
        return falling(num_warmup_steps + moved, base)

    return rate


def _linear_warmup(*, num_training_steps: int, num_warmup_steps: int = 0) -> Schedule:
    falling = _falling("linear", num_training_steps, warmup_steps=num_warmup_steps)
    end = max(num_training_steps, num_warmup_steps)  # a warm-up may be all of the training
    return lambda step, base: falling(step, base) if step < end else 0.0


def _falling(name: str, steps: Any, **options: Any) -> Callable[[Any, float], float]:
    return lambda step, base: make_schedule(name, steps=steps, peak=base, **options)(step)


_SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "ConstantLR": _constant,
    "CosineAnnealingLR": _cosine_annealing,
    "CosineWarmupScheduler": _cosine_warmup,
    "LinearWarmupScheduler": _linear_warmup,
    "LambdaLR": lambda *, lr_lambda: lambda step, base: base * lr_lambda(step),
}


def choose_schedule(name: str | type | Factor, options: dict[str, Any]) -> Schedule:
    """Make a schedule by name, by PyTorch's class, or from a function of the number of steps."""
    if isinstance(name, type):
        name = name.__name__
    if callable(name):
        if options:
            raise TypeError(f"options must go with a name, not with a function, got {options}")
        return lambda step, base: base * name(step)
    if name not in _SCHEDULES:
        raise ValueError(
            f"scheduler must be one of {', '.join(_SCHEDULES)} or a function from the number of "
            f"steps to a factor, got {name!r}"
        )
    known = inspect.signature(_SCHEDULES[name]).parameters
    needed = [key for key, parameter in known.items() if parameter.default is parameter.empty]
    check_options(name, options, known, needed)
    return _SCHEDULES[name](**options)
