"""Environments and tools by name: the user's own from a file or a module."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

from twinkle_jax.reward.by_name import load_module
from twinkle_jax.rollout.adapters import ADAPTERS
from twinkle_jax.rollout.environment import EnvironmentFactory
from twinkle_jax.rollout.openenv import OpenEnvEnvironment
from twinkle_jax.rollout.processes import (
    ProcessLimits,
    environments_in_processes,
    tools_in_processes,
)
from twinkle_jax.rollout.tools import ToolEnvironment, tool_schema

_LIMITS = ProcessLimits()


def find_environment(
    name: str | None,
    tools: str | None = None,
    *,
    tools_in: Literal["process", "thread"] = "process",
    environment_in: Literal["process", "thread"] = "thread",
    limits: ProcessLimits = _LIMITS,
) -> EnvironmentFactory:
    """Find what makes environments, by name.

    Args:
        name: `FILE.py:NAME` or `MODULE:NAME`, of a class or a function without arguments that makes
            an environment; with `trl:` or `gym:` before it, of one that TRL's `environment_factory`
            or gymnasium's interface has; or `openenv:URL` of a server. None: tools alone.
        tools: `FILE.py` or `MODULE`, whose public functions are tools, or `FILE.py:NAME` of one of
            them or of a list; None for none.
        tools_in: `process` runs each call in a process of its own, which begins as the file was
            when it was imported; what a call changes is gone with it. `thread` runs calls here.
        environment_in: `process` runs each episode's environment in a process of its own; one that
            hangs is killed. OpenEnv's servers are processes already.
        limits: of what runs in processes.

    Returns:
        What makes an environment for an episode.

    Raises:
        ValueError: if there is no such thing, or its file cannot be imported.
        TypeError: if it makes no environment.
    """
    factory = None if name is None else _find_factory(name)
    demonstrations = getattr(factory, "demonstrations", None)
    if name is not None and environment_in == "process" and not name.startswith("openenv:"):
        factory = environments_in_processes(name, limits)
    if tools is None and factory is None:
        raise ValueError("environment or tools must be given, got neither")
    if tools is not None:
        place, by_name = _named_tools(tools)
        functions = [function for function, _ in by_name.values()]
        if tools_in == "process":
            functions = tools_in_processes(by_name, place, limits)
        factory = functools.partial(_with_tools, functions, factory)
    assert factory is not None
    if demonstrations is not None and not hasattr(factory, "demonstrations"):
        factory.demonstrations = demonstrations  # type: ignore[attr-defined]
    return factory


def _with_tools(
    functions: Sequence[Callable[..., Any]], factory: EnvironmentFactory | None
) -> ToolEnvironment:
    return ToolEnvironment(functions, None if factory is None else factory())


def _find_factory(name: str) -> EnvironmentFactory:
    kind, colon, rest = name.partition(":")
    if kind == "openenv":
        return functools.partial(OpenEnvEnvironment, rest)
    adapter = ADAPTERS.get(kind) if colon else None
    place, _, attribute = (rest if adapter else name).rpartition(":")
    if not place or not attribute:
        raise ValueError(
            "environment must be FILE.py:NAME or MODULE:NAME, with trl: or gym: before it for "
            f"their interfaces, or openenv:URL, got {name!r}"
        )
    factory = _find(place, attribute, "environment")
    if not callable(factory):
        raise TypeError(f"environment must name a class or a function, got {factory!r:.80}")
    if adapter is not None:
        return functools.partial(_adapted, adapter, factory)
    if isinstance(factory, type):
        for method in ("reset", "step", "close"):
            if not callable(getattr(factory, method, None)):
                raise TypeError(f"environment must have a method {method}, got {name!r} without it")
    return factory


def _adapted(adapter: Callable[[Any], Any], factory: EnvironmentFactory) -> Any:
    return adapter(factory())


def find_tools(name: str) -> list[Callable[..., Any]]:
    """Find functions that a policy may call.

    Args:
        name: `FILE.py` or `MODULE`, whose public functions are taken, those that it imports left
            out; or `FILE.py:NAME` or `MODULE:NAME` of a function or a list of them.

    Raises:
        ValueError: if there are none.
        TypeError: if something is not a function.
    """
    return [function for function, _ in _named_tools(name)[1].values()]


def _named_tools(name: str) -> tuple[str, dict[str, tuple[Callable[..., Any], Sequence[Any]]]]:
    """Find tools: where their file is, and by name each function and its place in the file."""
    tools: list[tuple[Callable[..., Any], Sequence[Any]]]
    place, _, attribute = name.rpartition(":")
    if place and not attribute.endswith(".py"):
        value = _find(place, attribute, "tools")
        if isinstance(value, list | tuple):
            tools = [(tool, (attribute, i)) for i, tool in enumerate(value)]
        else:
            tools = [(value, (attribute,))]
    else:
        place, module = name, load_module(name, "tools")
        tools = [
            (value, (key,))
            for key, value in vars(module).items()
            if inspect.isfunction(value)
            and value.__module__ == module.__name__
            and not key.startswith("_")
        ]
    if not tools:
        raise ValueError(f"tools must name functions, got none in {name!r}")
    for tool, _ in tools:
        if not callable(tool):
            raise TypeError(f"tools must be functions, got {tool!r:.80}")
    ToolEnvironment([tool for tool, _ in tools])  # fail before a run begins
    return place, {tool_schema(tool)["function"]["name"]: (tool, key) for tool, key in tools}


def _find(place: str, attribute: str, argument: str) -> Any:
    module = load_module(place, argument)
    if not hasattr(module, attribute):
        names = [n for n, x in vars(module).items() if callable(x) and not n.startswith("_")]
        raise ValueError(
            f"{argument} must name something in {place}, which has {', '.join(names)}; "
            f"got {attribute!r}"
        )
    return getattr(module, attribute)
