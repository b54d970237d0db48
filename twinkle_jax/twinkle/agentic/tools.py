"""`twinkle_agentic.tools`: tools, and a manager that calls them by name."""

import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from twinkle_jax.data import Tool as ToolInfo
from twinkle_jax.twinkle.names import add_submodules


class Tool(ABC):
    """A tool that a policy may call."""

    @abstractmethod
    def __call__(self, tool_name: str, arguments: dict[str, Any]) -> str:
        """Run it, and return its result as text."""

    @abstractmethod
    def tool_info(self) -> ToolInfo:
        """Describe it, in OpenAI's shape."""


class ToolManager:
    """Calls tools by name; the policy gets errors as text, `Error: …`.

    `tools` is a dictionary, or a list of tools whose `tool_info` has their name.
    """

    def __init__(self, tools: Any = None) -> None:
        self._tools: dict[str, Any] = {}
        if isinstance(tools, dict):
            self._tools |= tools
        elif isinstance(tools, list | tuple):
            for tool in tools:
                self.register(tool)
        elif tools is not None:
            raise TypeError(
                f"ToolManager expects dict | Iterable[Tool] | None, got {type(tools).__name__}"
            )

    def register(self, tool: Any) -> None:
        """Add a tool under its own name; a warning says that it replaces another."""
        name = _extract_name(tool.tool_info() if hasattr(tool, "tool_info") else None)
        if name is None:
            raise ValueError(
                "a tool must have a tool_info with a non-empty function.name, got "
                f"{type(tool).__name__}"
            )
        if self._tools.get(name, tool) is not tool:
            message = f"two tools are called {name!r}: the one registered later replaces the other"
            warnings.warn(message, stacklevel=2)
        self._tools[name] = tool

    def unregister(self, name: str) -> Any:
        """Remove a tool and return it; None if there is none of this name."""
        return self._tools.pop(name, None)

    def names(self) -> list[str]:
        """Return the names of the tools."""
        return list(self._tools)

    def copy(self) -> "ToolManager":
        """Return a manager of the same tools."""
        return ToolManager(self._tools)

    def tool_infos(self) -> list[ToolInfo]:
        """Describe the tools."""
        return [tool.tool_info() for tool in self._tools.values()]

    def __call__(self, tool_call: Any) -> str:
        """Run a call in OpenAI's shape; return the tool's result or an error as text."""
        if not isinstance(tool_call, Mapping):
            return f"Error: tool_call must be an object, got {type(tool_call).__name__}"
        function = tool_call.get("function")
        if not isinstance(function, Mapping):
            return 'Error: tool_call is missing "function"'
        name, arguments = function.get("name"), function.get("arguments")
        if not name:
            return 'Error: tool_call is missing "function.name"'
        if not isinstance(name, str) or name not in self._tools:
            known = ", ".join(sorted(self._tools)) or "none"
            return f"Error: unknown tool {name!r}. Available: {known}"
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else None
            except (ValueError, RecursionError) as error:
                return f"Error: invalid JSON in arguments: {error}"
        if not isinstance(arguments, dict | None):
            kind = type(arguments).__name__
            return f'Error: "arguments" must be a JSON string or object, got {kind}'
        try:
            return str(self._tools[name](name, arguments or {}))
        except Exception as error:
            return f"Error: tool {name!r} raised {type(error).__name__}: {error}"


def _extract_name(info: Any) -> str | None:
    """Read the name in a tool's description."""
    function = info.get("function") if isinstance(info, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) and name else None


add_submodules(__name__, "base", "tool_manager")
