"""What a rendering of a chat template may use: steps, characters and seconds, counted as it runs.

The sandbox calls these before and after each operation of a template.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2.exceptions import SecurityError


class Budget:
    """What a rendering may still use: steps, characters and time."""

    def __init__(self, steps: int, characters: int, seconds: float) -> None:
        self.steps, self.characters, self.largest = steps, characters, characters
        self.deadline = time.monotonic() + seconds

    def spend(self, characters: int = 0) -> None:
        """Count a step and what it produced."""
        self.steps -= 1
        self.characters -= characters
        if self.steps < 0:
            raise SecurityError("too many steps")
        if self.characters < 0:
            raise SecurityError("too much text")
        if time.monotonic() > self.deadline:
            raise SecurityError("too much time")


_BUDGET: ContextVar[Budget] = ContextVar("budget of the rendering that runs")


def _size(value: Any, depth: int = 3) -> int:
    """Bound how much text or memory a value can become in one operation."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return abs(value)
    if depth and isinstance(value, Mapping):
        return sum(_size(x, depth - 1) + 1 for x in value.values())
    if depth and isinstance(value, list | tuple):
        return sum(_size(x, depth - 1) + 1 for x in value)
    return 1


def check_before(receiver: Any, arguments: Iterable[Any]) -> None:
    """Refuse an operation that could make too much of a text."""
    budget = _BUDGET.get()
    budget.spend()
    most = (1 + _size(receiver)) * (1 + sum(_size(x) for x in arguments))
    if most > 5 * budget.largest:
        raise SecurityError("a text too large")


def check_after(value: Any) -> Any:
    """Refuse a text that has become too large, and count what will be drawn from an iterator."""
    budget = _BUDGET.get()
    if _size(value) > budget.largest and not isinstance(value, int):
        raise SecurityError("a text too large")
    return each(value) if isinstance(value, Iterator) else value


def each(values: Iterable[Any]) -> Iterator[Any]:
    """Count the steps of a loop."""
    budget = _BUDGET.get()
    for value in values:
        budget.spend(_size(value) if isinstance(values, Iterator) else 0)
        yield value


def joined(values: list[Any]) -> str:
    """Join texts, measured first."""
    texts = [str(value) for value in values]
    check_before("", texts)
    return "".join(texts)


def count_shown(value: Any) -> Any:
    """Count a text that is written out."""
    _BUDGET.get().spend(_size(value) if isinstance(value, str) else 0)
    return value


def counted(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """Have a filter checked before and after; jinja's marks on it (`pass_context`) stay."""
    passed = getattr(filter_, "jinja_pass_arg", None) is not None

    @wraps(filter_)
    def checked(*arguments: Any, **named: Any) -> Any:
        own = arguments[1:] if passed else arguments
        check_before(own[0] if own else "", [*own[1:], *named.values()])
        return check_after(filter_(*arguments, **named))

    return checked


@contextmanager
def within(budget: Budget) -> Iterator[None]:
    """Count against this budget."""
    token = _BUDGET.set(budget)
    try:
        yield
    finally:
        _BUDGET.reset(token)
