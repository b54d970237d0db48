"""Messages and tools."""

from twinkle_jax.data import Message, Tool, ToolCall

__all__ = ["Message", "Tool", "ToolCall"]
