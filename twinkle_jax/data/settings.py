"""Fields of settings: ranges, `auto`, and which of them a resumed run may change."""

import math
from collections.abc import Callable, Mapping
from dataclasses import field
from types import MappingProxyType
from typing import Any, NamedTuple

AUTO: Any = None  # chosen by the run, which knows the policy
MAY_CHANGE: Mapping[str, Any] = MappingProxyType({"may_change": True})
"""Metadata of a field, or of a section of fields, that a resumed run may change."""


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


def positive(*, default: Any, may_change: bool = False) -> Any:
    """Make a field for finite numbers above 0."""
    return _ranged(default, may_change, lambda x: 0 < x < math.inf, "above 0 and finite")


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
