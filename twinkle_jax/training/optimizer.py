"""Optimizers and learning-rate schedules: Optax's, by their names there."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

Schedule = Callable[[int], float]  # number of updates so far -> learning rate

# Weight decay leaves these out, as Twinkle and transformers do.
_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def decayed(params: Any) -> Any:
    """Mask for weight decay: False for norms and biases."""

    def applies(path: Any, leaf: Any) -> bool:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return _NOT_DECAYED.search(name.lower()) is None

    return jax.tree_util.tree_map_with_path(applies, params)


def muon_dimensions(params: Any) -> Any:
    """Axes that Muon orthogonalizes: those of each layer's matrices; None, for Adam, elsewhere.

    Layers are stacked along the first axis. Optax would take a stack of matrices for no matrix, and
    a stack of vectors, the embeddings and the output matrix for one.
    """

    def axes(path: Any, leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
        names = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        first = int("layers" in names)
        if leaf.ndim != first + 2 or {"embed_tokens", "lm_head"} & set(names):
            return None
        return optax.contrib.MuonDimensionNumbers(first, first + 1)

    return jax.tree_util.tree_map_with_path(axes, params)


def make_optimizer(name: str, **options: Any) -> optax.GradientTransformation:
    """Make an Optax optimizer of learning rate 1, as `apply_gradients` takes it.

    Args:
        name: of a function of `optax` or `optax.contrib` that takes a learning rate: `adamw`,
            `adam`, `sgd`, `lion`, `adafactor`, `muon`, ...
        options: its other arguments. Where it takes a mask for weight decay, norms and biases are
            left out unless another mask is given. Muon is for the matrices of layers, each by
            itself, and Adam for embeddings, the output matrix and vectors.

    Returns:
        The optimizer; the same object for the same arguments, so that nothing compiles twice.

    Raises:
        ValueError: for an unknown name.
        TypeError: for an unknown option; the message lists the known ones.

    Example:
        >>> make_optimizer("adamw", b2=0.99) is make_optimizer("adamw", b2=0.99)
        True
    """
    hashable = {key: tuple(x) if isinstance(x, list) else x for key, x in options.items()}
    return _make_optimizer(name, tuple(sorted(hashable.items())))


@functools.cache
def _make_optimizer(name: str, options: tuple[tuple[str, Any], ...]) -> Any:
    make = getattr(optax, name, None) or getattr(optax.contrib, name, None)
    known = _arguments(make)
    if make is None or "learning_rate" not in known:
        raise ValueError(
            "optimizer must be the name of an Optax optimizer such as adamw, adam, sgd, lion, "
            f"adafactor or muon, got {name!r}"
        )
    _check_options(f"optimizer {name}", dict(options), known - {"learning_rate"})
    defaults = {
        "mask": decayed,
        "weight_decay_mask": decayed,
        "muon_weight_dimension_numbers": muon_dimensions,
    }
    applicable = {key: value for key, value in defaults.items() if key in known}
    return make(1.0, **(applicable | dict(options)))


def make_schedule(name: str, *, steps: int, peak: float, **options: Any) -> Schedule:
    r"""Make a learning-rate schedule.

    Args:
        name: `constant`; `linear` and `cosine`, which fall from the peak to 0 after the last step;
            or a schedule of `optax`, such as `exponential_decay` or `piecewise_constant_schedule`.
        steps: updates in all.
        peak: the highest learning rate, unless `options` of an `optax` schedule set it.
        options: arguments of the schedule of `optax`.

    Returns:
        A function from the number of updates so far to the learning rate.

    Raises:
        ValueError: for an unknown name.
        TypeError: for an unknown option.

    Example:
        >>> rate = make_schedule("linear", steps=4, peak=0.5)
        >>> [rate(step) for step in range(5)]
        [0.5, 0.375, 0.25, 0.125, 0.0]
    """
    if name == "constant":
        _check_options("schedule constant", options, set())
        return lambda step: peak
    if name in ("linear", "cosine"):
        _check_options(f"schedule {name}", options, set())
        if name == "linear":  # in Python's own floats: exact for the first and the last step
            return lambda step: peak * max(1 - step / max(steps, 1), 0.0)
        cosine = optax.cosine_decay_schedule(peak, max(steps, 1))
        return lambda step: float(cosine(step))
    make = getattr(optax, name, None)
    known = _arguments(make)
    values = {"init_value", "peak_value", "value"} & known
    if make is None or not values or "learning_rate" in known:
        raise ValueError(
            "schedule must be constant, linear, cosine or the name of an Optax schedule such as "
            f"exponential_decay, got {name!r}"
        )
    _check_options(f"schedule {name}", options, known)
    if "peak_value" in known:
        options = {"peak_value": peak, "init_value": 0.0} | options
    else:
        options = {values.pop(): peak} | options
    if "boundaries_and_scales" in options:  # JSON and YAML have strings as keys
        scales = options["boundaries_and_scales"]
        options["boundaries_and_scales"] = {int(key): x for key, x in scales.items()}
    schedule = make(**options)
    return lambda step: float(schedule(step))


def _arguments(function: Any) -> set[str]:
    if not callable(function) or isinstance(function, type):
        return set()
    return set(inspect.signature(function).parameters)


def _check_options(what: str, options: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(options.keys() - known)
    if unknown:
        names = ", ".join(sorted(known)) or "none"
        raise TypeError(f"options of {what} must be among {names}, got {unknown[0]!r}")
