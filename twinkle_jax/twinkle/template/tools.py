"""Twinkle's parsers of tool calls, one a format, over those of `twinkle_jax.data`."""

from typing import Any

from twinkle_jax.data import parse_cline_calls, parse_hermes_calls, parse_react_calls


class ToolCallParser:
    """Finds the tool calls of one format in a text; a subclass says how.

    Attributes:
        name: of the format.
        open_marker: what a call begins with, where that is always the same.
        close_marker: what it ends with, likewise.
    """

    name = ""
    open_marker: str | None = None
    close_marker: str | None = None
    _parse: Any = None

    def detect(self, text: str) -> bool:
        """Whether a text has calls of this format, broken ones included."""
        parsed = self._parse(text)
        return bool(parsed.calls or parsed.errors)

    def parse(self, text: str) -> list[Any]:
        """Return the calls in OpenAI's shape, with dictionaries of arguments."""
        calls: list[Any] = self._parse(text).calls
        return calls

    def clean(self, text: str) -> str:
        """Return the text without its calls."""
        content: str = self._parse(text).content
        return content


class HermesQwenParser(ToolCallParser):
    """`<tool_call>` blocks of the Hermes and Qwen families."""

    name, open_marker, close_marker = "hermes_qwen", "<tool_call>", "</tool_call>"
    _parse = staticmethod(parse_hermes_calls)


class ReActParser(ToolCallParser):
    """Lines `Action: name[input]`."""

    name = "react"
    _parse = staticmethod(parse_react_calls)


class ClineParser(ToolCallParser):
    """A tag for the tool, and in it a tag for each argument."""

    name = "cline"
    _parse = staticmethod(parse_cline_calls)


class ToolCallRegistry:
    """The parsers, in the order in which they are tried."""

    _parsers: list[ToolCallParser] = [HermesQwenParser(), ClineParser(), ReActParser()]  # noqa: RUF012

    @classmethod
    def register(cls, parser: ToolCallParser) -> ToolCallParser:
        """Add a parser at the end, unless there is one of its name; return the one there is."""
        known = next((each for each in cls._parsers if each.name == parser.name), None)
        if known is None:
            cls._parsers.append(parser)
        return known or parser

    @classmethod
    def parsers(cls) -> list[ToolCallParser]:
        """Return the parsers."""
        return list(cls._parsers)

    @classmethod
    def detect_first(cls, text: str) -> ToolCallParser | None:
        """Return the first parser whose format a text has."""
        return next((parser for parser in cls._parsers if text and parser.detect(text)), None)
