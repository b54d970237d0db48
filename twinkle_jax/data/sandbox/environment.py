"""Where chat templates run: they are programs of strangers, so they see little and end soon.

Jinja's immutable sandbox refuses to leave the template's own values. What it does not bound is
bounded by a budget: every loop step, call, filter and joined text is counted while it runs.
"""

import datetime
import json
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from twinkle_jax.data.sandbox.budget import (
    Budget,
    check_after,
    check_before,
    count_shown,
    counted,
    each,
    joined,
    within,
)

_REFUSED = ("format", "urlize", "wordwrap", "xmlattr", "pprint", "random", "striptags")


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
            finalize=count_shown,
        )
        for name in _REFUSED:
            del self.filters[name]
        self.filters["tojson"] = _tojson
        self.filters = {name: counted(filter_) for name, filter_ in self.filters.items()}
        self.filters |= {"_each": each, "_joined": joined}
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
        check_before(receiver if isinstance(receiver, str) else "", [*arguments, *named.values()])
        return check_after(super().call(context, function, *arguments, **named))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Join and repeat within limits; no powers, no formats."""
        text = isinstance(left, str) or isinstance(right, str)
        if operator == "**" or (operator == "%" and text):
            raise SecurityError(f"{operator!r} is out of its reach")
        if operator == "+":
            check_after([left, right] if text or isinstance(left, list) else "")
        elif operator == "*":
            check_before(left, (right,))
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
    with within(make_budget()):
        return "".join(template.generate(variables))


def compile_within(sandbox: Sandbox, source: str, budget: Budget) -> jinja2.Template:
    """Compile a template within a budget: constant parts are computed while it is compiled."""
    with within(budget):
        return sandbox.compile_counted(source)
