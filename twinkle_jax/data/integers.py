"""Integers from outside, checked before they are cast to int32, where larger ones would wrap."""

from typing import Any

import numpy as np

Row = np.ndarray[Any, Any]
LARGEST = 2**31 - 1


def read_integers(name: str, values: Any) -> Row:
    """Take integers of any width as they are; refuse everything else."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"{name} must be a rectangular array, got rows of many lengths") from None
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    # An unsigned integer beyond int64 stays beyond every bound.
    return np.minimum(array, 2**63 - 1).astype(np.int64) if array.dtype == np.uint64 else array


def cast_integers(name: str, array: Row, low: int = -LARGEST, high: int = LARGEST) -> Row:
    """Cast to int32 what lies in [low, high], and refuse the rest before it could wrap."""
    beyond = array[(array < low) | (array > high)]
    if beyond.size:
        raise ValueError(f"{name} must be in [{low}, {high}], got {int(beyond[0])}")
    return array.astype(np.int32)
