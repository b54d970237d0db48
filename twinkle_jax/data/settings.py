"""Fields of settings: ranges, `auto`, and which of them a resumed run may change."""

import math
from collections.abc import Callable, Mapping
from dataclasses import field, fields, is_dataclass
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np

AUTO: Any = None  # chosen by the run, which knows the policy
MAY_CHANGE: Mapping[str, Any] = MappingProxyType({"may_change": True})
"""Metadata of a field, or of a section of fields, that a resumed run may change."""

_FLOAT32 = np.finfo(np.float32)
_NUMBERS: Mapping[type, type] = {int: Integral, float: Real}


class Range(NamedTuple):
    """Which values of a setting are valid; the metadata `range` of its field."""

    contains: Callable[[float], bool]
    description: str


def _ranged(
    default: Any, may_change: bool, contains: Callable[[float], bool], description: str
) -> Any:
    metadata = {"range": Range(contains, description), "may_change": may_change}
    return field(default=default, metadata=metadata)


def at_least(least: float, *, default: Any, may_change: bool = False) -> Any:
    """Make a field for finite numbers from a smallest one on."""
    return _ranged(default, may_change, lambda x: least <= x < math.inf, f"at least {least}")


def positive(*, default: Any) -> Any:
    """Make a field for finite numbers above 0."""
    return _ranged(default, False, lambda x: 0 < x < math.inf, "above 0 and finite")


def seconds(*, default: Any, may_change: bool = False) -> Any:
    """Make a field for a limit of time, which the system's clocks can count to."""
    return _ranged(default, may_change, lambda x: 0 < x <= 1e9, "above 0 and at most 1e9")


def share(*, default: Any, may_change: bool = False) -> Any:
    """Make a field for numbers from 0 to 1."""
    return _ranged(default, may_change, lambda x: 0 <= x <= 1, "in [0, 1]")


def share_above_zero(*, default: Any) -> Any:
    """Make a field for numbers above 0 and up to 1."""
    return _ranged(default, False, lambda x: 0 < x <= 1, "in (0, 1]")


def share_below_one(*, default: Any) -> Any:
    """Make a field for numbers from 0 to below 1."""
    return _ranged(default, False, lambda x: 0 <= x < 1, "in [0, 1)")


def seed_of_32_bits(*, default: int) -> Any:
    """Make a field for a seed, which JAX takes modulo 2^32."""
    return _ranged(default, False, lambda x: 0 <= x < 2**32, "from 0 to 4294967295")


def check_values(config: Any, prefix: str = "") -> None:
    """Check each setting by itself: its choices if its type is a `Literal`, and its range."""
    hints = get_type_hints(type(config))
    for setting in fields(config):
        name, value = prefix + setting.name, getattr(config, setting.name)
        hint, valid = hints[setting.name], setting.metadata.get("range")
        if is_dataclass(value):
            check_values(value, f"{name}.")
        elif value is None and setting.default is None:
            continue  # stands for no limit, or is replaced later
        elif get_origin(hint) is Literal and value not in get_args(hint):
            raise ValueError(f"{name} must be one of {', '.join(get_args(hint))}, got {value!r}")
        elif hint is bool and not isinstance(value, bool | np.bool_):
            raise TypeError(f"{name} must be True or False, got {value!r}")
        elif valid is not None and not isinstance(value, _NUMBERS.get(hint, object) | None):
            kind = "an integer" if hint is int else "a number"
            raise TypeError(f"{name} must be {kind}, got {value!r}")
        elif valid is not None and (value is None or not valid.contains(value)):
            raise ValueError(f"{name} must be {valid.description}, got {value}")
        elif name != "seed":  # whose range is that of unsigned integers
            check_32_bits(name, value)


def check_32_bits(name: str, value: Any) -> None:
    """Refuse numbers, also in options, that are another number on a device.

    Infinity is left to those who take an option: it is the same number there.
    """
    if isinstance(value, Mapping):
        for key, part in value.items():
            check_32_bits(f"{name}.{key}", part)
    elif isinstance(value, list | tuple):
        for part in value:
            check_32_bits(name, part)
    elif isinstance(value, int) and abs(value) >= 2**31:
        raise ValueError(f"{name} must be below {2**31}, which fits 32 bits, got {value}")
    elif isinstance(value, float) and value and math.isfinite(value):
        least, most = (float(x) for x in (_FLOAT32.tiny, _FLOAT32.max))
        if not least <= abs(value) <= most:
            raise ValueError(
                f"{name} must be a number of float32, 0 or from {least:.3g} to {most:.3g} in size, "
                f"got {value}"
            )
