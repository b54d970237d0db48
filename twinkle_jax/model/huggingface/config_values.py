"""Values of the keys of a `config.json`: each is checked when it is read."""

import reprlib
from collections.abc import Mapping
from typing import Any

_LARGEST_SIZE = 2**31 - 1


def shown(value: Any) -> str:
    """Show a value in one short line."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return reprlib.repr(value)


def read_size(
    config: Mapping[str, Any], name: str, default: int | None = None, *, most: int = _LARGEST_SIZE
) -> int:
    """Read a positive integer; without a default the key is required."""
    value = config.get(name, default)
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{name} must be a positive integer of at most {most}, got {shown(value)}")
    return value


def read_number(
    config: Mapping[str, Any], name: str, default: float, *, zero: bool = False
) -> float:
    """Read a positive, finite number; with `zero`, 0 is allowed too."""
    value = config.get(name, default)
    is_number = type(value) in (int, float)
    # Bounds that float32 can hold: the decoder computes with it.
    if not is_number or not (1e-30 <= value <= 1e30 or (zero and value == 0)):
        kind = "at least 0" if zero else "positive"
        raise ValueError(f"{name} must be a finite number, {kind}, got {shown(value)}")
    return float(value)


def read_soft_cap(config: Mapping[str, Any], name: str) -> float | None:
    """Read the bound of logits; without the key, or with null, there is none."""
    return None if config.get(name) is None else read_number(config, name, 1.0)


def read_flag(config: Mapping[str, Any], name: str) -> bool:
    """Read true or false; false is the default."""
    value = config.get(name, False)
    if type(value) is not bool:
        raise ValueError(f"{name} must be true or false, got {shown(value)}")
    return value


def read_section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Read a JSON object; empty if the key is missing or null."""
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a JSON object, got {shown(value)}")
    return dict(value or {})


def one_of(config: Mapping[str, Any], name: str, values: tuple[Any, ...]) -> Any:
    """Read one of a few values; the first is the default."""
    value = config.get(name, values[0])
    if not any(type(value) is type(known) and value == known for known in values):
        listed = " or ".join(repr(known) for known in values)
        raise ValueError(f"{name} must be {listed}, got {shown(value)}: unsupported")
    return value
