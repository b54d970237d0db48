"""Where chat templates run: they are programs of strangers, so they see little and end soon.

Jinja's immutable sandbox refuses to leave the template's own values. What it does not bound is
bounded here: every loop step, call, filter and joined text is counted while a template runs.
"""

import datetime
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_REFUSED = ("format", "urlize", "wordwrap", "xmlattr", "pprint", "random", "striptags")


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


def _before(receiver: Any, arguments: Iterable[Any]) -> None:
    """Refuse an operation that could make too much of a text."""
    budget = _BUDGET.get()
    budget.spend()
    most = (1 + _size(receiver)) * (1 + sum(_size(x) for x in arguments))
    if most > 5 * budget.largest:
        raise SecurityError("a text too large")


def _after(value: Any) -> Any:
    budget = _BUDGET.get()
    if _size(value) > budget.largest and not isinstance(value, int):
        raise SecurityError("a text too large")
    return _each(value) if isinstance(value, Iterator) else value


def _each(values: Iterable[Any]) -> Iterator[Any]:
    budget = _BUDGET.get()
    for value in values:
        budget.spend(_size(value) if isinstance(values, Iterator) else 0)
        yield value


def _joined(values: list[Any]) -> str:
    texts = [str(value) for value in values]
    _before("", texts)
    return "".join(texts)


def _finalize(value: Any) -> Any:
    _BUDGET.get().spend(_size(value) if isinstance(value, str) else 0)
    return value


def _counted(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """Have a filter checked before and after; jinja's marks on it (`pass_context`) stay."""
    passed = getattr(filter_, "jinja_pass_arg", None) is not None

    @wraps(filter_)
    def checked(*arguments: Any, **named: Any) -> Any:
        own = arguments[1:] if passed else arguments
        _before(own[0] if own else "", [*own[1:], *named.values()])
        return _after(filter_(*arguments, **named))

    return checked


class _Counting(NodeTransformer):
    """Put counters into a parsed template, where it loops and where it joins texts."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        """Count the steps of a loop."""
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_each")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """Measure what `~` joins."""
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_joined")


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's part, is only looked through."""

    tags = {"generation"}  # noqa: RUF012  (jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that templates are compiled for and run in."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            finalize=_finalize,
        )
        for name in _REFUSED:
            del self.filters[name]
        self.filters["tojson"] = _tojson
        self.filters = {name: _counted(filter_) for name, filter_ in self.filters.items()}
        self.filters |= {"_each": _each, "_joined": _joined}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def compile_counted(self, source: str) -> jinja2.Template:
        """Compile a template with counters in it."""
        tree = _Counting().visit(self.parse(source)).set_environment(self)
        code = self.compile(tree)
        return self.template_class.from_code(self, code, self.make_globals(None))

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Refuse what the sandbox does not show."""
        raise SecurityError(f"{attribute!r} of {type(obj).__name__} is out of its reach")

    def wrap_str_format(self, value: Any) -> None:
        """Refuse formats, which can pad without end."""
        if super().wrap_str_format(value) is not None:
            raise SecurityError("'format' of str is out of its reach")

    def call(self, context: Any, function: Any, /, *arguments: Any, **named: Any) -> Any:
        """Call a function, counted."""
        receiver = getattr(function, "__self__", None)
        _before(receiver if isinstance(receiver, str) else "", [*arguments, *named.values()])
        return _after(super().call(context, function, *arguments, **named))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Join and repeat within limits; no powers, no formats."""
        text = isinstance(left, str) or isinstance(right, str)
        if operator == "**" or (operator == "%" and text):
            raise SecurityError(f"{operator!r} is out of its reach")
        if operator == "+":
            _after([left, right] if text or isinstance(left, list) else "")
        elif operator == "*":
            _before(left, (right,))
        return super().call_binop(context, operator, left, right)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
    allowed = {"separators", "sort_keys"}
    if not options.keys() <= allowed:
        raise SecurityError(f"tojson takes {', '.join(sorted(allowed))}, got {sorted(options)}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.datetime.now().strftime(format_)  # local, as transformers does


def render(
    template: jinja2.Template, variables: Mapping[str, Any], make_budget: Callable[[], Budget]
) -> str:
    """Run a template within a budget."""
    token = _BUDGET.set(make_budget())
    try:
        return "".join(template.generate(variables))
    finally:
        _BUDGET.reset(token)


def compile_within(sandbox: Sandbox, source: str, budget: Budget) -> jinja2.Template:
    """Compile a template within a budget: constant parts are computed while it is compiled."""
    token = _BUDGET.set(budget)
    try:
        return sandbox.compile_counted(source)
    finally:
        _BUDGET.reset(token)
