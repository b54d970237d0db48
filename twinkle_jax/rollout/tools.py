"""Tools: functions that a policy may call, what calls them, and Python in a sandbox."""

import contextlib
import functools
import inspect
import json
import os
import re
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from twinkle_jax.data import Message, Tool
from twinkle_jax.rollout.environment import (
    MOST_MESSAGES,
    Action,
    Observation,
    ProcessFailedError,
    ToolRaisedError,
)
from twinkle_jax.sampler.sizes import check_count

_SANDBOX_WORKER = Path(__file__).with_name("sandbox_worker.py")
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
_ARGUMENT = re.compile(r"\s*(\*{0,2}\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


class SandboxUnavailableError(OSError):
    """The system does not allow the sandbox; the program was not run."""


_FAILURES = (  # not the policy's fault: the episode fails
    TimeoutError,
    ConnectionError,
    EOFError,
    MemoryError,
    ProcessFailedError,
    SandboxUnavailableError,
)


def tool_schema(function: Callable[..., Any]) -> Tool:
    """Describe a function as a tool, in OpenAI's format, from its signature and docstring.

    Args:
        function: with type hints, and a docstring in Google's style whose `Args:` describe the
            parameters. Parameters without a default are required. A `functools.partial` has the
            name and the docstring of its function, without the arguments that it sets by name.

    Returns:
        The description that chat templates show to the policy.

    Raises:
        TypeError: if it is no function with a name and a signature, a parameter cannot be passed by
            name, or the function is a generator, which has no result to show to the policy.

    Example:
        >>> def add(x: int, y: int = 1) -> int:
        ...     '''Add two numbers.
        ...
        ...     Args:
        ...         x: the first.
        ...     '''
        ...     return x + y
        >>> tool_schema(add)["function"]["parameters"]["properties"]
        {'x': {'type': 'integer', 'description': 'the first.'}, 'y': {'type': 'integer'}}
        >>> tool_schema(add)["function"]["parameters"]["required"]
        ['x']
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"tools must return their result, got {function!r}, which has a yield")
    named: Any = function
    given: set[str] = set()  # by a partial, not by the policy
    while isinstance(named, functools.partial):
        given |= named.keywords.keys()
        named = named.func
    name_of_tool = getattr(named, "__name__", type(named).__name__)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # text, or a builtin
        raise TypeError(f"tools must be functions with a signature, got {function!r}") from None
    summary, descriptions = _read_docstring(inspect.getdoc(named) or "")
    try:
        hints = get_type_hints(named if hasattr(named, "__name__") else type(named).__call__)
    except (NameError, TypeError):  # types that exist for type checkers only
        hints = {}
    properties, required = {}, []
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise TypeError(f"tools must take arguments by name, got {name} of {function!r}")
        if parameter.kind == parameter.VAR_KEYWORD or name in given:
            continue
        properties[name] = _json_schema(hints.get(name, Any))
        if name in descriptions:
            properties[name]["description"] = descriptions[name]
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    if name_of_tool == "<lambda>":
        raise TypeError(f"tools must have a name, got {function!r}: write it with def")
    return Tool(
        type="function",
        function={"name": name_of_tool, "description": summary, "parameters": parameters},
    )


def _json_schema(hint: Any) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if arguments and (origin is Union or type(None) in arguments):
        return _json_schema(next(x for x in arguments if x is not type(None)))
    if origin in (list, Sequence) or hint is list:
        return {"type": "array"} | ({"items": _json_schema(arguments[0])} if arguments else {})
    if origin in (dict, Mapping) or hint is dict:
        return {"type": "object"}
    return {}


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring in Google's style into its description and those of its parameters."""
    head, _, rest = text.partition("\nArgs:")
    descriptions: dict[str, str] = {}
    name, indent = "", None
    for line in rest.split("\n"):
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        indent = depth if indent is None else indent
        if depth == 0:
            break
        match = _ARGUMENT.fullmatch(line) if depth <= indent else None
        if match:
            name = match[1].lstrip("*")
            descriptions[name] = match[2].strip()
        elif name:
            descriptions[name] = f"{descriptions[name]} {line.strip()}".strip()
    return re.split(r"\n(?:Returns|Raises|Example):", head)[0].strip(), descriptions


class ToolEnvironment:
    """Runs tool calls, and passes actions without one to another environment.

    An action that calls one of that environment's own `tools` is passed on too, with all its calls.

    The result of a call becomes a message of the role `tool`: text as it is, anything else as JSON.
    If the function raises an error, the policy reads `Error: …`, since wrong arguments are the
    policy's fault. After a lost connection, a timeout, a lack of memory, or where `python_tool` has
    no sandbox, the episode fails.

    Args:
        functions: tools; functions or methods, may be `async`.
        environment: for actions without a tool call, or that call its own tools; None: an action
            without a call ends the episode.

    Raises:
        ValueError: if two tools have the same name.

    Example:
        >>> def double(x: int) -> int:
        ...     return 2 * x
        >>> call = '<tool_call>{"name": "double", "arguments": {"x": 21}}</tool_call>'
        >>> ToolEnvironment([double]).step(Action(call))[0]
        [{'role': 'tool', 'content': '42', 'name': 'double'}]
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], environment: Any = None) -> None:
        schemas = [tool_schema(function) for function in functions]
        names = [schema["function"]["name"] for schema in schemas]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"tools must have different names, got {name!r} twice")
        self._functions = dict(zip(names, functions, strict=True))
        self._environment = environment
        self._schemas = schemas
        if hasattr(environment, "final_reward"):
            self.final_reward = environment.final_reward

    @property
    def tools(self) -> list[Any]:
        """Descriptions of the functions, and of the environment's tools."""
        return [*self._schemas, *(getattr(self._environment, "tools", None) or [])]

    @property
    def _names(self) -> list[str]:
        """The names of all tools; an environment may describe its own in forms of its own."""
        functions = [x.get("function") for x in self.tools if isinstance(x, Mapping)]
        names = [x.get("name") for x in functions if isinstance(x, Mapping)]
        return [name for name in names if isinstance(name, str)]

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        """Start an episode."""
        return None if self._environment is None else self._environment.reset(row, seed)

    def step(self, action: Action) -> Any:
        """Run the tool calls of an action, or pass it to the environment."""
        if not action.calls and not action.errors:
            if self._environment is None:
                return None, 0.0, True, {}
            return self._environment.step(action)
        called = {call["function"]["name"] for call in action.calls}
        if called & ({*self._names} - {*self._functions}):
            return self._environment.step(action)
        results: list[tuple[str, Any]] = []
        count = len(action.calls) + len(action.errors)
        if count > MOST_MESSAGES:  # the policy's fault, not a failure of the environment
            error = _ToolError(f"a turn may have at most {MOST_MESSAGES} tool calls, got {count}")
            return *_tool_reply([("", error)])[:3], {"tool_errors": float(count)}
        for call in action.calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            assert isinstance(arguments, dict)
            results.append((name, self._start(name, arguments)))
        results += [("", _ToolError(error.reason)) for error in action.errors]
        if any(inspect.isawaitable(result) for _, result in results):
            return _wait_for(results)
        return _tool_reply(results)

    def close(self) -> Any:
        """Close the environment."""
        return None if self._environment is None else self._environment.close()

    def _start(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a tool; return its result, an awaitable of it, or an error."""
        function = self._functions.get(name)
        if function is None:
            known = ", ".join(self._names)
            return _ToolError(f"there is no tool {name!r:.80}; there are {known}")
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            return _ToolError(f"{name}: {error}")
        try:
            return function(**arguments)
        except _FAILURES:
            raise
        except ToolRaisedError as error:
            return _ToolError(str(error))
        except Exception as error:
            return _ToolError(f"{type(error).__name__}: {error}")


class _ToolError:
    """The error of a call, which is shown to the policy."""

    def __init__(self, text: str) -> None:
        self.text = text


async def _wait_for(results: Sequence[tuple[str, Any]]) -> Any:
    finished = []
    for name, result in results:
        finished.append((name, await _value(result) if inspect.isawaitable(result) else result))
    return _tool_reply(finished)


async def _value(result: Awaitable[Any]) -> Any:
    try:
        return await result
    except _FAILURES:
        raise
    except Exception as error:
        return _ToolError(f"{type(error).__name__}: {error}")


def _tool_reply(results: Sequence[tuple[str, Any]]) -> tuple[Observation, float, bool, Any]:
    messages = []
    for name, result in results:
        if isinstance(result, _ToolError):
            text = f"Error: {result.text}"
        elif isinstance(result, str | bytes):
            text = result if isinstance(result, str) else result.decode("utf-8", "replace")
        else:
            try:
                # Arrays and numbers of NumPy have `tolist`.
                text = json.dumps(result, ensure_ascii=False, default=methodcaller("tolist"))
            except (AttributeError, TypeError, ValueError):
                text = str(result)
        message: Any = Message(role="tool", content=text)
        messages.append(message | ({"name": name} if name else {}))
    errors = sum(isinstance(result, _ToolError) for _, result in results)
    return messages, 0.0, False, {"tool_errors": float(errors)}


# A tool that runs untrusted Python in a sandbox, on Linux.


def python_tool(
    *, seconds: int = 5, megabytes: int = 256, characters: int = 4096
) -> Callable[[str], str]:
    """Make a tool that runs a Python program in a sandbox, and returns what it prints.

    It prevents: reading and writing files (an empty root directory), network access (an empty
    network namespace), seeing, signalling and starting processes (a PID namespace, no fork), use of
    the trainer's privileges, endless loops, high memory use, floods of output. It does not prevent
    attacks on the Linux kernel. Modules of the standard library that compute, such as `math` and
    `itertools`, can be imported; others cannot, since there are no files.

    Args:
        seconds: of CPU time for a program; one that sleeps is killed a few seconds later.
        megabytes: of memory.
        characters: of output; the rest is cut off. A program that prints more than four times as
            many bytes is killed.

    Returns:
        The tool, `python(code)`.

    Raises:
        ValueError: if a limit is less than 1.
        SandboxUnavailableError: by a call of the tool, if the system does not allow namespaces
            (some distributions allow them to root only), or another process or open file. The
            program is not run then.

    Example:
        >>> tool = python_tool(seconds=2)  # tool("print(6 * 7)") gives "42"
        >>> tool.__name__
        'python'
    """
    for name, limit in (("seconds", seconds), ("megabytes", megabytes), ("characters", characters)):
        check_count(name, limit)

    def python(code: str) -> str:
        """Run a Python program, and return what it prints.

        Args:
            code: the program; only what it prints comes back.
        """
        return _run_in_sandbox(code, seconds, megabytes, characters)

    return python


def _run_in_sandbox(code: str, seconds: int, megabytes: int, characters: int) -> str:
    try:
        output, errors, ended, status = _start(code, seconds, megabytes, 4 * characters)
    except OSError as error:  # too many processes or open files, or a full disk
        raise SandboxUnavailableError(f"the sandbox cannot be started: {error}") from error
    if not output.startswith(b"\0"):
        last = errors.decode("utf-8", "replace").strip().split("\n")[-1]
        raise SandboxUnavailableError(f"the sandbox is not available on this system: {last}")
    text = output[1:].decode("utf-8", "replace")[:characters].rstrip("\n")
    if not ended:
        return f"{text}\nError: it did not end within {seconds} s, or printed too much".lstrip("\n")
    if status:
        return f"{text}\nError: it took more than {seconds} s or {megabytes} MB".lstrip("\n")
    return text


def _start(
    code: str, seconds: int, megabytes: int, limit: int
) -> tuple[bytes, bytes, bool, int | None]:
    """Run a program; return its output, errors, whether it has ended, and its exit status."""
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o555)  # noqa: S103  (empty and read-only)
        with subprocess.Popen(  # noqa: S603  (our own script)
            [sys.executable, "-I", "-S", str(_SANDBOX_WORKER), root, str(seconds), str(megabytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            start_new_session=True,
        ) as process:
            try:
                result = _communicate(process, code, seconds + 5.0, limit)
            finally:
                process.kill()  # its forks die with it
    return *result, process.returncode


def _communicate(
    process: "subprocess.Popen[bytes]", code: str, seconds: float, limit: int
) -> tuple[bytes, bytes, bool]:
    """Send the program, and read output and errors until a limit; return whether it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, and said why
        process.stdin.write(code.encode("utf-8", "replace"))
        process.stdin.close()
    read: dict[Any, bytes] = {process.stdout: b"", process.stderr: b""}
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as pipes:  # `select` takes no descriptor above 1023
        for pipe in read:
            pipes.register(pipe, selectors.EVENT_READ)
        while pipes.get_map():
            ready = pipes.select(max(deadline - time.monotonic(), 0))
            if not ready or max(map(len, read.values())) > limit:
                return read[process.stdout], read[process.stderr], False
            for key, _ in ready:
                chunk = os.read(key.fd, 65536)
                read[key.fileobj] += chunk
                if not chunk:
                    pipes.unregister(key.fileobj)
    process.wait(max(deadline - time.monotonic(), 1))
    return read[process.stdout], read[process.stderr], True
