"""`twinkle_agentic.tools.base`."""

from abc import ABC, abstractmethod
from typing import Any

from twinkle_jax.data import Tool as ToolInfo


class Tool(ABC):
    """What a policy may call."""

    @abstractmethod
    def __call__(self, tool_name: str, arguments: dict[str, Any]) -> str:
        """Do it, and say what came of it."""

    @abstractmethod
    def tool_info(self) -> ToolInfo:
        """Describe it, in OpenAI's shape."""
