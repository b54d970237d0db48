"""Estimators, optimizers and learning-rate schedules by the names that settings give them."""

import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from twinkle_jax.advantage import (
    ESTIMATORS,
    Advantage,
    GDPOAdvantage,
    PassAtKAdvantage,
    PKPOAdvantage,
    ReinforcePlusPlusAdvantage,
    Scale,
    get_advantage,
    kl_in_token_reward,
)
from twinkle_jax.model.decoder.parameters import EXPERTS

# Estimators of advantages.

_REINFORCE = "reinforce_plus_plus"


class Estimator(NamedTuple):
    """An estimator with its settings.

    Attributes:
        function: of rewards; called with Twinkle's signature unless it works per token.
        options: hyper-parameters.
    """

    function: Advantage | ReinforcePlusPlusAdvantage
    options: Mapping[str, Any] = MappingProxyType({})

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the data that it takes besides rewards."""
        return self.function.needs if isinstance(self.function, Advantage) else ()

    @property
    def has_scale(self) -> bool:
        """Whether it divides by what `scale` says, rather than by what its formula fixes."""
        if not isinstance(self.function, Advantage):
            return False
        call = getattr(type(self.function), "function", type(self.function).__call__)
        return "scale" in inspect.signature(call).parameters

    @property
    def works_per_token(self) -> bool:
        """Whether it takes a reward for each token, and makes an advantage of each."""
        return isinstance(self.function, ReinforcePlusPlusAdvantage)

    @property
    def compares_parts(self) -> bool:
        """Whether it compares each of several rewards by itself, before they are added up."""
        return isinstance(self.function, GDPOAdvantage)

    @property
    def needs_greedy_rewards(self) -> bool:
        """Whether rewards of the most probable completions are needed."""
        return "greedy_rewards" in self.needs

    def advantages(
        self,
        rewards: np.ndarray[Any, Any],
        num_samples: int,
        scale: Scale,
        *,
        where: np.ndarray[Any, Any] | None,
        lengths: np.ndarray[Any, Any],
        greedy_rewards: np.ndarray[Any, Any] | None,
        mask: Bool[Array, "rows time"],
        kl: Float[Array, "rows time"] | None = None,
        kl_coefficient: float = 0.0,
        reward_weights: np.ndarray[Any, Any] | None = None,
    ) -> jax.Array:
        """Estimate advantages.

        Args:
            rewards: one a completion, those of a prompt next to each other; or, for an estimator
                that compares them by themselves, several in a second axis, as in `where` then.
            num_samples: completions a prompt.
            scale: what advantages are divided by, for estimators that have a scale.
            where: True = keep, one a completion; None for all.
            lengths: tokens of each completion.
            greedy_rewards: one a prompt, where the estimator needs them.
            mask: True for tokens that the policy sampled.
            kl: divergence of each token, for an estimator that works per token; None for 0.
            kl_coefficient: what is subtracted for each nat of it.
            reward_weights: of several rewards; None for one.

        Returns:
            One advantage a completion, or one a token of `mask`.
        """
        if isinstance(self.function, ReinforcePlusPlusAdvantage):
            kept = mask if where is None else mask & jnp.asarray(where)[:, None]
            kl = jnp.zeros(mask.shape) if kl is None else kl
            earned = kl_in_token_reward(rewards, kl, mask, coefficient=kl_coefficient)
            return self.function(earned, masks=kept)
        data = {"lengths": lengths, "greedy_rewards": greedy_rewards}
        needed: dict[str, Any] = {name: data[name] for name in self.needs}
        if reward_weights is not None:
            needed["reward_weights"] = reward_weights
        return self.function(rewards, num_samples, scale, where=where, **needed, **self.options)

    def check(self, num_samples: int) -> None:
        """Raise for hyper-parameters that no prompt can be estimated with; uses no device.

        Args:
            num_samples: completions a prompt.

        Raises:
            ValueError: for a value out of range, such as a k above `num_samples`, and for one with
                which all advantages are 0.
            TypeError: for a value of a wrong type.
        """

        def of_one_prompt() -> jax.Array:
            return self.advantages(
                np.zeros(num_samples, np.float32),
                num_samples,
                "group",
                where=None,
                lengths=np.ones(num_samples, np.int32),
                greedy_rewards=np.zeros(1, np.float32),
                mask=jnp.ones((num_samples, 1), bool),
            )

        jax.eval_shape(of_one_prompt)
        for name, most in (("epsilon", sys.float_info.max), ("gamma", 1.0)):
            if not 0 <= self.options.get(name, 0) <= most:
                which = "finite and at least 0" if name == "epsilon" else "from 0 to 1"
                raise ValueError(f"{name} must be {which}, got {self.options[name]}")
        compares_subsets = isinstance(self.function, PassAtKAdvantage | PKPOAdvantage)
        less_the_mean = self.options.get("baseline", "mean") == "mean"
        if compares_subsets and less_the_mean and self.options["k"] == num_samples:
            raise ValueError(
                f"k must be below num_generations={num_samples}, got {num_samples}: all samples of "
                "a prompt share the only subset, so that their advantages are 0"
            )


def make_estimator(name: str, options: Mapping[str, Any]) -> Estimator:
    """Find an estimator.

    Args:
        name: of an estimator that `get_advantage` knows, or `reinforce_plus_plus`.
        options: its hyper-parameters: `k` of `pass_at_k` and `pkpo`, `epsilon`, ...

    Returns:
        The estimator.

    Raises:
        ValueError: for an unknown name.
        TypeError: for an unknown option, or a missing one.
    """
    if name == _REINFORCE:
        check_options(f"advantage {name}", options, {"gamma"})
        return Estimator(ReinforcePlusPlusAdvantage(**options), dict(options))
    if name not in ESTIMATORS:
        known = ", ".join(sorted([*ESTIMATORS, _REINFORCE]))
        raise ValueError(f"advantage must be one of {known}, got {name!r}")
    function = get_advantage(name)
    parameters = function.hyper_parameters
    required = {option for option, is_required in parameters.items() if is_required}
    check_options(f"advantage {name}", options, parameters, required)
    return Estimator(function, dict(options))


# Optimizers and schedules: Optax's, by their names there.

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

    Layers are stacked along the first axis, experts along the second. Optax would take a stack of
    matrices for no matrix, and a stack of vectors, the embeddings and the output matrix for one.
    """
    tables = {"embed_tokens", "embed_tokens_per_layer", "lm_head"}

    def axes(path: Any, leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
        names = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        first = int("layers" in names) + int(EXPERTS in names)
        if leaf.ndim != first + 2 or not tables.isdisjoint(names):
            return None
        return optax.contrib.MuonDimensionNumbers(first, first + 1)

    return jax.tree_util.tree_map_with_path(axes, params)


# They compute with the learning rate before the last step, or need the value of the loss: their
# updates at the rate 1, multiplied by another rate, are not those at that rate.
_NOT_PROPORTIONAL = {
    "cocob",
    "dadapt_adamw",
    "fromage",
    "lbfgs",
    "madgrad",
    "momo",
    "momo_adam",
    "scale_by_madgrad",
    "schedule_free",
    "schedule_free_adamw",
    "schedule_free_sgd",
    "sophia",
}
_NOT_PROPORTIONAL_OPTIONS = {"adafactor": {"weight_decay_rate"}}


def make_optimizer(name: str, **options: Any) -> optax.GradientTransformation:
    """Make an Optax optimizer of learning rate 1, as `apply_gradients` takes it.

    Args:
        name: of a function of `optax` or `optax.contrib` whose updates are a learning rate times
            something else: `adamw`, `adam`, `sgd`, `lion`, `adafactor`, `muon`, ...
        options: its other arguments. Where it takes a mask for weight decay, norms and biases are
            left out unless another mask is given. Muon is for the matrices of layers, each by
            itself, and Adam for embeddings, the output matrix and vectors.

    Returns:
        The optimizer; the same object for the same arguments, so that nothing compiles twice.

    Raises:
        ValueError: for an unknown name, and for optimizers whose updates are not proportional to
            the learning rate (`fromage`, `schedule_free_adamw`) or need the loss (`lbfgs`).
        TypeError: for an unknown option; the message lists the known ones.

    Example:
        >>> make_optimizer("adamw", b2=0.99) is make_optimizer("adamw", b2=0.99)
        True
    """

    def hashable(value: Any) -> Any:
        if isinstance(value, dict):
            raise TypeError(
                f"options of optimizer {name} must be numbers, strings, lists or null, got {value}"
            )
        return tuple(map(hashable, value)) if isinstance(value, list) else value

    return _make_optimizer(name, tuple(sorted((key, hashable(x)) for key, x in options.items())))


@functools.cache
def _make_optimizer(name: str, options: tuple[tuple[str, Any], ...]) -> Any:
    make = getattr(optax, name, None) or getattr(optax.contrib, name, None)
    known = _arguments(make)
    if make is None or "learning_rate" not in known or name in _NOT_PROPORTIONAL:
        raise ValueError(
            "optimizer must be the name of an Optax optimizer, with updates proportional to the "
            f"learning rate, such as adamw, adam, sgd, lion, adafactor or muon, got {name!r}"
        )
    known -= {"learning_rate"} | _NOT_PROPORTIONAL_OPTIONS.get(name, set())
    check_options(f"optimizer {name}", dict(options), known)
    defaults = {
        "mask": decayed,
        "weight_decay_mask": decayed,
        "muon_weight_dimension_numbers": muon_dimensions,
    }
    applicable = {key: value for key, value in defaults.items() if key in known}
    optimizer = make(1.0, **(applicable | dict(options)))
    if options:
        _check_update(name, optimizer, dict(options))
    return optimizer


def _check_update(name: str, optimizer: Any, options: dict[str, Any]) -> None:
    """Raise for options that an update cannot compute with; Optax itself reads few before."""
    shapes = {"layers": {"kernel": (2, 4, 4), "norm": (2, 4)}, "embed_tokens": (8, 4)}
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )

    def update(params: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(params, optimizer.init(params), params)

    try:
        jax.eval_shape(update, params)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"options of optimizer {name} must be values that Optax can compute an update with, "
            f"got {options}: {error}"
        ) from error


def make_schedule(name: str, *, steps: int, peak: float, **options: Any) -> Schedule:
    r"""Make a learning-rate schedule.

    Args:
        name: `constant`; `linear` and `cosine`, which fall from the peak to 0 after the last step;
            or a schedule of `optax`, such as `exponential_decay` or `piecewise_constant_schedule`.
        steps: updates in all.
        peak: the highest learning rate, unless `options` of an `optax` schedule set it.
        options: arguments of the schedule of `optax`; of `linear` and `cosine`, `warmup_steps`,
            over which the rate first rises from 0, and `end_value`, to which it falls.

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
        check_options("schedule constant", options, set())
        return lambda step: peak
    if name in _FALLING:
        check_options(f"schedule {name}", options, {"warmup_steps", "end_value"})
        return _falling(_FALLING[name], steps, peak, **options)
    schedule = optax_schedule(name, peak, options)
    return lambda step: float(schedule(step))


def optax_schedule(name: str, peak: float, options: Mapping[str, Any]) -> optax.Schedule:
    """Make a schedule of `optax`, which takes and returns arrays; see `make_schedule`."""
    make = getattr(optax, name, None)
    known = _arguments(make)
    values = {"init_value", "peak_value", "value"} & known
    if make is None or not values or "learning_rate" in known:
        raise ValueError(
            "schedule must be constant, linear, cosine or the name of an Optax schedule such as "
            f"exponential_decay, got {name!r}"
        )
    check_options(f"schedule {name}", options, known)
    if "peak_value" in known:
        start = {"init_value": 0.0} if "init_value" in known else {}
        options = start | {"peak_value": peak} | dict(options)
    else:
        options = {values.pop(): peak} | dict(options)
    if "boundaries_and_scales" in options:  # JSON and YAML have strings as keys
        scales = options["boundaries_and_scales"]
        try:
            options["boundaries_and_scales"] = {int(k): float(x) for k, x in dict(scales).items()}
        except (TypeError, ValueError) as error:
            raise TypeError(
                "option boundaries_and_scales must map numbers of updates to factors, "
                f"got {scales!r}"
            ) from error
    schedule = make(**options)
    with jax.numpy_dtype_promotion("standard"):
        jax.eval_shape(schedule, 0)  # raises for values of a wrong type, and uses no device
    return schedule


def rises(name: str | None) -> bool:
    """Whether a schedule of `optax` rises to a peak, so that it needs no other warmup."""
    return "peak_value" in _arguments(getattr(optax, name or "", None))


_FALLING: Mapping[str, Callable[[float], float]] = {
    "linear": lambda part: 1 - part,
    "cosine": lambda part: 0.5 * (1 + math.cos(math.pi * part)),
}


def _falling(
    shape: Callable[[float], float],
    steps: int,
    peak: float,
    *,
    warmup_steps: int = 0,
    end_value: float = 0.0,
) -> Schedule:
    length = steps - warmup_steps if steps > warmup_steps else 1

    def rate(step: int) -> float:  # in Python's own floats: exact for the first and the last step
        if step < warmup_steps:
            return peak * step / warmup_steps
        part = min((step - warmup_steps) / length, 1.0)
        return end_value + (peak - end_value) * shape(part)

    return rate


def _arguments(function: Any) -> set[str]:
    if not callable(function) or isinstance(function, type):
        return set()
    return set(inspect.signature(function).parameters)


def check_options(
    what: str,
    options: Mapping[str, Any],
    known: Collection[str],
    required: Collection[str] = (),
) -> None:
    """Raise for an unknown option, and for a required one that is missing."""
    for option in sorted(options.keys() - set(known)):
        names = ", ".join(sorted(known)) or "none"
        raise TypeError(f"options of {what} must be among {names}, got {option!r}")
    for option in required:
        if option not in options:
            raise TypeError(f"options of {what} must have {option!r}, got {dict(options)}")
