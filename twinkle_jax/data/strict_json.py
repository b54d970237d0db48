"""JSON without duplicate keys, NaN, Infinity and numbers beyond float64."""

import json
import math
from collections import Counter
from typing import Any


def parse_json(text: str) -> Any:
    """Parse JSON.

    Args:
        text: one JSON value.

    Returns:
        The value.

    Raises:
        ValueError: for anything that is not JSON, duplicate keys, NaN, Infinity, numbers beyond
            float64, integers of thousands of digits, and nesting that Python cannot parse.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = counts.most_common(1)[0][0]
        raise ValueError(f"duplicate key {twice!r:.80}")
    return record


def _finite(literal: str) -> float:
    value = float(literal)
    if math.isinf(value):
        raise ValueError(f"{literal:.40} is beyond float64")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse_constant
)
