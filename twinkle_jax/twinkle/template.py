"""Twinkle's `template`: what encodes conversations, and the parsers of tool calls."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from twinkle_jax.data import (
    InputFeature,
    ParsedToolCalls,
    Tokenizer,
    ToolCall,
    TruncationStrategy,
    message_text,
    parse_cline_calls,
    parse_hermes_calls,
    parse_react_calls,
)
from twinkle_jax.data import Template as BaseTemplate
from twinkle_jax.data.strict_json import parse_json
from twinkle_jax.data.tokenizer import Encoded, locate_tokenizer
from twinkle_jax.twinkle.data_format import user_data_get
from twinkle_jax.twinkle.names import add_submodules, construct, local_id


class Template(BaseTemplate):
    """A [`Template`][twinkle_jax.data.Template] with Twinkle's arguments and keys.

    `chat_template` replaces the tokenizer's; `enable_thinking` and any further options are its
    variables. Features have `attention_mask`, `position_ids` and `length` too. With `key_rounds` in
    `user_data`, only these messages, by their number from 0, have labels.
    """

    def __init__(
        self,
        model_id: str | Path | Tokenizer,
        use_chat_template: bool = True,
        max_length: int | None = 8192,
        truncation_strategy: TruncationStrategy = "raise",
        default_system: str | None = None,
        enable_thinking: bool = True,
        *,
        chat_template: str | None = None,
        **template_variables: Any,
    ) -> None:
        super().__init__(
            local_id(model_id),
            use_chat_template,
            max_length,
            truncation_strategy,
            default_system,
            chat_template=chat_template,
            template_variables={"enable_thinking": enable_thinking, **template_variables},
        )
        self.model_id, self.enable_thinking = model_id, enable_thinking

    def encode_all(
        self, trajectories: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False
    ) -> tuple[list[int], list[InputFeature]]:
        """Encode several conversations, and say which one each feature is of."""
        sources, features = super().encode_all(trajectories, add_generation_prompt)
        for feature in features:
            size = len(feature["input_ids"])
            feature["attention_mask"] = np.ones(size, np.int32)
            feature["position_ids"] = np.arange(size)
            feature["length"] = size
        return sources, features

    def _render_chunk(
        self, trajectories: Sequence[Mapping[str, Any]], prompt: bool
    ) -> list[tuple[Encoded, list[tuple[int, int]]]]:
        """Leave out the spans of messages that are not among `key_rounds` of `user_data`."""
        rendered = super()._render_chunk(trajectories, prompt)
        if prompt or self.chat_template is None:
            return rendered
        kept = []
        for trajectory, (encoded, spans) in zip(trajectories, rendered, strict=True):
            rounds = user_data_get(trajectory.get("user_data"), "key_rounds")
            if isinstance(rounds, list) and rounds:
                roles = [message["role"] for message in trajectory["messages"]]
                turns = [i for i, role in enumerate(roles) if role == "assistant"]
                spans = [span for i, span in zip(turns, spans, strict=True) if i in rounds]
            kept.append((encoded, spans))
        return kept

    def _with_calls(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        have_calls = any(message.get("tool_calls") for message in messages)
        if have_calls and self.tool_formats[0] != "deepseek":  # whose template wants text
            messages = [_decode_calls(message) for message in messages]
        return super()._with_calls(messages)

    def concat_input_feature(
        self, prompt_input_feature: Mapping[str, Any], new_tokens: Sequence[int]
    ) -> InputFeature:
        """Add sampled tokens to a prompt; the new message has its tool calls as `tool_calls`."""
        feature = super().concat_input_feature(prompt_input_feature, new_tokens)
        if "messages" in feature:
            message = feature["messages"][-1]
            text = message_text(message)
            if calls := self.parse_tool_call(text):
                message["content"], message["tool_calls"] = self.clean_tool_call(text), calls
        return feature

    def check(self, trajectory: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return a conversation if it can be encoded, otherwise None."""
        return trajectory if self.accepts(trajectory) else None

    def batch_check(self, trajectories: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Check several."""
        return [self.check(trajectory) for trajectory in trajectories]

    def parse_tool_call(self, decoded: str | None) -> list[ToolCall]:
        """Find tool calls by the first registered parser whose format the text has."""
        parser = ToolCallRegistry.detect_first(decoded or "")
        return parser.parse(decoded or "") if parser else []

    def clean_tool_call(self, decoded: str | None) -> str:
        """Return the text without tool calls and trailing white space."""
        parser = ToolCallRegistry.detect_first(decoded or "")
        return parser.clean(decoded or "") if parser else (decoded or "").rstrip()

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, **options: Any
    ) -> str:
        """Return the text of tokens, with special tokens by default, as in Twinkle."""
        return self.tokenizer.decode(token_ids, skip_special_tokens, **options)

    def batch_decode(self, token_ids: Sequence[Sequence[int]], **options: Any) -> list[str]:
        """Return the texts of several."""
        return [self.decode(ids, **options) for ids in token_ids]


def _decode_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give chat templates the arguments of calls as dictionaries, where a data set has JSON."""
    calls = message.get("tool_calls")
    if isinstance(calls, str):
        calls = parse_json(calls) if calls else []
    decoded = []
    for call in calls or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):  # another call is for the chat template to read
            arguments = function.get("arguments") or {}
            if isinstance(arguments, str):
                with suppress(ValueError):  # broken ones are shown as they are
                    arguments = parse_json(arguments)
            call = {**call, "function": {**function, "arguments": arguments}}
        decoded.append(call)
    return {**message, "tool_calls": decoded} if decoded else message


def make_template(kind: Any, checkpoint: Any, called: str = "model_id", /, **options: Any) -> Any:
    """Make a template as `construct` does, of this checkpoint unless options have a `model_id`.

    Errors call the checkpoint, that of the model or sampler which the template is for, `called`.
    """
    of_class = isinstance(kind, str) or (isinstance(kind, type) and issubclass(kind, Template))
    if of_class and checkpoint is not None and "model_id" not in options:
        if called != "model_id":
            locate_tokenizer(checkpoint, called)
        options["model_id"] = checkpoint
    return construct(kind, "template", **options)


class Qwen3_5Template(Template):  # noqa: N801  (Twinkle's name)
    """The template of Qwen3.5 and Qwen3 checkpoints: text only."""


class ToolCallParser:
    """Finds the tool calls of one format in a text."""

    name = ""
    open_marker: str | None = None
    close_marker: str | None = None
    _parse: Callable[[str], ParsedToolCalls]

    def detect(self, text: str) -> bool:
        """Whether a text has calls of this format, broken ones included."""
        parsed = self._parse(text)
        return bool(parsed.calls or parsed.errors)

    def parse(self, text: str) -> list[ToolCall]:
        """Return the calls in OpenAI's shape, with dictionaries of arguments."""
        return self._parse(text).calls

    def clean(self, text: str) -> str:
        """Return the text without its calls."""
        return self._parse(text).content


class HermesQwenParser(ToolCallParser):
    """`<tool_call>` blocks of the Hermes and Qwen families."""

    name, open_marker, close_marker = "hermes_qwen", "<tool_call>", "</tool_call>"
    _parse = staticmethod(parse_hermes_calls)


class ReActParser(ToolCallParser):
    """Lines `Action: name[input]`."""

    name, _parse = "react", staticmethod(parse_react_calls)


class ClineParser(ToolCallParser):
    """A tag for the tool, and in it a tag for each argument."""

    name, _parse = "cline", staticmethod(parse_cline_calls)


class ToolCallRegistry:
    """The parsers, in the order in which they are tried."""

    _parsers: ClassVar[list[ToolCallParser]] = [HermesQwenParser(), ClineParser(), ReActParser()]

    @classmethod
    def register(cls, parser: ToolCallParser) -> ToolCallParser:
        """Add a parser; return the registered parser of its name, the older one if there is one."""
        known = next((x for x in cls._parsers if x.name == parser.name), None)
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


add_submodules(__name__, "base", "tools", "tools.base", "tools.cline", "tools.qwen", "tools.react")
