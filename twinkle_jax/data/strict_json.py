"""Strict text and JSON: UTF-8, no duplicate keys, NaN, huge numbers or unpaired surrogates."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Open a file in UTF-8; an error for other bytes names it."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"{path} must be UTF-8, got the byte {byte:#04x}") from None


def parse_json(text: str) -> Any:
    r"""Parse one JSON value.

    Raises:
        ValueError: for anything that is not JSON, duplicate keys, NaN, Infinity, numbers beyond
            float64, integers of thousands of digits, nesting that Python cannot parse, and
            unpaired surrogates such as `\ud83d`, which cannot be encoded.
    """
    value, end = parse_json_at(text, len(text) - len(text.lstrip(_SPACE)))
    if text[end:].strip(_SPACE):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def parse_json_at(text: str, start: int) -> tuple[Any, int]:
    """Parse the JSON value that begins at a place of a text; return it, and where it ends.

    Raises:
        ValueError: as `parse_json`.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
        if _SURROGATE.search(text, start, end):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"{error.object[error.start]!r} is an unpaired surrogate") from None
    return value, end


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        ((duplicate, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key {duplicate!r:.80}")
    return record


def _finite(literal: str) -> float:
    value = float(literal)
    if math.isinf(value):
        raise ValueError(f"{literal:.40} is beyond float64")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_SPACE = " \t\n\r"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse_constant
)
