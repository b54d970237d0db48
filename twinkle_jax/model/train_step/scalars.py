"""Numbers that compiled functions take as arguments, checked where they can be seen."""

import math
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

Scalar = float | Float[Array, ""]


def traced_scalar(value: Any) -> Any:
    """Give a Python number a type, so that all numbers share what is compiled."""
    return np.float32(value) if isinstance(value, int | float) else value


def positive_scalar(name: str, value: Any) -> Any:
    """The same for a number above 0; what is on a device is not looked at."""
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | np.number | np.ndarray):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if math.isnan(float(value)) or float(value) <= 0:
        raise ValueError(f"{name} must be above 0, got {value}")
    return np.float32(value)
