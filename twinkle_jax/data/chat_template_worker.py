"""The process in which chat templates run, since they are untrusted programs.

It is started as a script, answers a line of JSON with a line of JSON, and ends when a template
takes too long or too much memory. Jinja's immutable sandbox restricts what templates may access. An
audit hook is the second line of defence: no processes, no connections, no writing of files.
"""

import contextlib
import datetime
import faulthandler
import json
import os
import signal
import sys
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_CHARACTERS = 10_000_000  # of a rendered text
_GIGABYTES = 1  # of address space, the interpreter's included
_REFUSED = ("os.", "subprocess.", "socket.", "shutil.", "ctypes.", "pty.")


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part in some templates, and changes nothing here."""

    tags = {"generation"}  # noqa: RUF012  (jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Raise at once; Jinja would give a value that raises when it is used."""
        raise SecurityError(f"{attribute!r} of {type(obj).__name__} must not be accessed")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers does, without Jinja's escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.datetime.now().strftime(format_)  # local, as transformers does


def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _end_after(seconds: float) -> None:
    """End this process after some seconds, even in the middle of C code; 0 cancels that."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)  # the default action of SIGALRM
    elif seconds:  # Windows
        faulthandler.dump_traceback_later(seconds, exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # only Linux keeps to it
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_GIGABYTES << 30, _GIGABYTES << 30))


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or event.startswith(_REFUSED):
        raise PermissionError(f"{event} is not allowed")


def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    parts, characters = [], 0
    for part in template.generate(variables):
        parts.append(part)
        characters += len(part)
        if characters > _CHARACTERS:
            raise SecurityError(f"more than {_CHARACTERS} characters")
    return "".join(parts)


def _answer(templates: list[jinja2.Template], request: dict[str, Any]) -> dict[str, Any]:
    """Compile a template, or render one for each conversation."""
    try:
        if "source" in request:
            templates.append(_environment().from_string(request["source"]))
            return {"template": len(templates) - 1}
        texts = []
        for variables in request["conversations"]:
            _end_after(request["seconds"])
            texts.append(_render(templates[request["template"]], variables))
        return {"texts": texts}
    except (SecurityError, MemoryError, RecursionError) as error:
        return _error("limits", error)
    except jinja2.TemplateSyntaxError as error:
        return _error("syntax", error)
    except jinja2.TemplateError as error:
        return _error("messages", error)
    except Exception as error:  # whatever an untrusted template raises
        return _error("template", error)


def _error(kind: str, error: Exception) -> dict[str, Any]:
    return {"error": kind, "cause": f"{type(error).__name__}: {error!s:.500}"}


def _serve() -> None:
    for name in ("SIGINT", "SIGTERM"):  # the parent process handles these
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    for name in set(os.environ) - {"TZ"}:
        del os.environ[name]  # no API keys and tokens for untrusted code
    with contextlib.suppress(jinja2.TemplateError):  # triggers lazy imports
        _environment().from_string("{{ strftime_now('%d') }}{{ [1]|tojson }}{{ x.y }}").render()
    _limit_memory()
    sys.addaudithook(_refuse)
    templates: list[jinja2.Template] = []
    print("ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        request = json.loads(line)
        _end_after(request["seconds"])
        answer = json.dumps(_answer(templates, request))
        _end_after(0)
        print(answer, flush=True)  # noqa: T201


if __name__ == "__main__":
    _serve()
