"""Values in the JSON of an answer: of the right type and in range, or refused."""

import reprlib
from collections.abc import Mapping
from typing import Any, NoReturn

IMPOSSIBLE = -9999.0  # what vLLM writes for the logarithm of 0


def logprob(name: str, value: Any) -> float:
    """Take a log-probability; NaN and what no probability has are none."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not -1e30 < value <= 1e-3:  # a little above 0 is rounding
        refuse(f"{name} that are finite and at most 0", value)
    return float(value)


def integer(what: str, value: Any) -> int:
    """Take an integer."""
    if not isinstance(value, int) or isinstance(value, bool):
        refuse(what, value)
    return int(value)


def entries(name: str, holder: Mapping[str, Any]) -> list[Any]:
    """Take the list of that name."""
    value = holder.get(name)
    if not isinstance(value, list):
        refuse(f"a list of {name}", value)
    return list(value)


def mapping(what: str, value: Any) -> dict[str, Any]:
    """Take an object."""
    if not isinstance(value, dict):
        refuse(what, value)
    return dict(value)


def refuse(what: str, got: Any) -> NoReturn:
    """Say what a part of an answer must be, and what it is.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"{what}, got {reprlib.repr(got)}")
