"""Twinkle's `template`: what encodes conversations, by name, and the parsers of tool calls."""

from twinkle_jax.twinkle.template.base import Qwen3_5Template, Template
from twinkle_jax.twinkle.template.tools import (
    ClineParser,
    HermesQwenParser,
    ReActParser,
    ToolCallParser,
    ToolCallRegistry,
)

__all__ = [
    "ClineParser",
    "HermesQwenParser",
    "Qwen3_5Template",
    "ReActParser",
    "Template",
    "ToolCallParser",
    "ToolCallRegistry",
]
