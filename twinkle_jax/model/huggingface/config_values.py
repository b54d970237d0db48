"""Single values of a `config.json`: taken if they are what they must be, else refused by name."""

import reprlib
from collections.abc import Mapping
from typing import Any

LARGEST_SIZE, MOST_LAYERS = 2**31 - 1, 4096


def shown(value: Any) -> str:
    """Show a value in one short line."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return reprlib.repr(value)


def size(
    config: Mapping[str, Any], name: str, default: int | None = None, *, most: int = LARGEST_SIZE
) -> int:
    """Take a size; a key that is not there has its default, if there is one."""
    value = config.get(name, default)
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{name} must be a positive integer of at most {most}, got {shown(value)}")
    return value


def number(config: Mapping[str, Any], name: str, default: float, *, zero: bool = False) -> float:
    """Take a positive, finite number; 0 too, if it means something."""
    value = config.get(name, default)
    plain = type(value) in (int, float)
    if not plain or not (1e-30 <= value <= 1e30 or (zero and value == 0)):  # in float32, too
        kind = "at least 0" if zero else "positive"
        raise ValueError(f"{name} must be a finite number, {kind}, got {shown(value)}")
    return float(value)


def flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """Take true or false."""
    value = config.get(name, default)
    if type(value) is not bool:
        raise ValueError(f"{name} must be true or false, got {shown(value)}")
    return value


def section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Take a JSON object; null and nothing are an empty one."""
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a JSON object, got {shown(value)}")
    return dict(value or {})


def only(config: Mapping[str, Any], name: str, values: tuple[Any, ...]) -> Any:
    """Take one of few values; the first is the default."""
    value = config.get(name, values[0])
    if not any(type(value) is type(known) and value == known for known in values):
        listed = " or ".join(repr(known) for known in values)
        raise ValueError(f"{name} must be {listed}, got {shown(value)}: nothing else is built")
    return value
