"""Conversations to tokens and labels: Twinkle's `Template`, and the chat template inside it."""

import contextlib
import functools
import itertools
import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from twinkle_jax._package import require
from twinkle_jax.data.rows import to_lists
from twinkle_jax.data.strict_json import parse_json
from twinkle_jax.data.tokenizer import ControlTokens, Encoded, Tokenizer, show
from twinkle_jax.data.tool_calls import ANY_FORMAT, TEMPLATE_FORMATS, parse_tool_calls
from twinkle_jax.data.trajectory import (
    IGNORE,
    InputFeature,
    Message,
    ToolCall,
    extend_feature,
    message_text,
)
from twinkle_jax.data.worker_process import WorkerProcess

_ROLE = re.compile("[A-Za-z_]+")
_CHUNK = 64  # conversations rendered at once
_KEPT = ("messages", "tools", "user_data")
_MARK = "\ue0f8"  # around a placeholder of the assistant's last message, to find what follows it
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of thoughts in messages
_TRUSTED = ("assistant", "system")  # may write <think> and the like, but no special token
_EXAMPLE = "an_example"  # a tool
# Of chat templates that write answers of tools only behind calls, what they write after arguments.
_CALL_ENDS = {"harmony": "<|call|>", "gemma": "<tool_call|>"}

TruncationStrategy = Literal["raise", "left", "right", "delete", "split"]
"""What happens to conversations longer than `max_length`."""
_Spans = list[tuple[int, int]]


class Template:
    """Encodes conversations with the chat template of a tokenizer.

    Text never becomes a control token, so no message can forge a role. Tokens that were sampled
    stay as they are, over any number of turns: they are not decoded and encoded again.

    Args:
        model_id: a tokenizer, or what `Tokenizer.from_pretrained` takes: a directory or a hub id.
        use_chat_template: False encodes a conversation of one message as plain text, with what
            the tokenizer adds to a text, such as `<bos>`.
        max_length: maximum tokens of a conversation; None for no limit.
        truncation_strategy: for longer ones: `'raise'` an error, cut `'left'` or
            `'right'`, `'delete'` them, or `'split'` them into several.
        default_system: a system message for conversations without one.
        chat_template: another chat template than the tokenizer's.
        template_variables: further variables of the chat template, such as `enable_thinking`.

    Raises:
        ValueError: if there is no chat template, or an argument is out of range.

    Example:
        >>> from twinkle_jax.data import small_tokenizer
        >>> template = Template(small_tokenizer())
        >>> feature = template.encode({"messages": [{"role": "user", "content": "2+2="}]},
        ...                           add_generation_prompt=True)
        >>> template.tokenizer.decode(feature["input_ids"], skip_special_tokens=False)
        '<|user|>2+2=<|end|><|assistant|>'
    """

    def __init__(
        self,
        model_id: str | Path | Tokenizer,
        use_chat_template: bool = True,
        max_length: int | None = 8192,
        truncation_strategy: TruncationStrategy = "raise",
        default_system: str | None = None,
        *,
        chat_template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> None:
        if truncation_strategy not in get_args(TruncationStrategy):
            names = ", ".join(map(repr, get_args(TruncationStrategy)))
            raise ValueError(
                f"truncation_strategy must be one of {names}, got {truncation_strategy!r}"
            )
        if max_length is not None and (not isinstance(max_length, int) or max_length < 1):
            raise ValueError(f"max_length must be None or a positive int, got {max_length!r}")
        self.tokenizer = (
            model_id
            if isinstance(model_id, Tokenizer)
            else Tokenizer.from_pretrained(model_id, argument="model_id")
        )
        source = chat_template or self.tokenizer.chat_template
        if use_chat_template and source is None:
            raise ValueError("the tokenizer must have a chat_template, got none: pass one")
        self.chat_template = ChatTemplate(source) if use_chat_template and source else None
        self._control = self.tokenizer.control
        if source != self.tokenizer.chat_template:  # this one may write other tokens
            self._control = ControlTokens(self.tokenizer.backend, source)
        self.max_length, self.truncation_strategy = max_length, truncation_strategy
        self.default_system = default_system
        self._template_variables = dict(template_variables or {})

    def encode(
        self, trajectory: Mapping[str, Any], add_generation_prompt: bool = False
    ) -> InputFeature:
        """Encode a conversation.

        Args:
            trajectory: with `messages`, and optionally `tools` and `user_data`. Tools may be the
                JSON text of a list, as in data sets for TRL; other text is not shown.
            add_generation_prompt: True ends with the start of an assistant turn, without labels;
                False labels the assistant's turns, including the tokens that end them, but for
                messages with a `weight` of 0, as OpenAI's format has it.

        Returns:
            `input_ids` and `labels`, with the keys of the trajectory.

        Raises:
            ValueError: if a message has no role, another `weight`, or parts that are not text; if
                the template refuses the conversation; or if that is too long and the strategy is
                `'raise'`, `'delete'` or `'split'`.
            TypeError: if the trajectory is not a dictionary.
        """
        features = self.batch_encode([trajectory], add_generation_prompt)
        if len(features) != 1:
            raise ValueError(
                f"a trajectory must have at most max_length={self.max_length} tokens, got more: "
                f"truncation_strategy={self.truncation_strategy!r} gives {len(features)} features, "
                "which batch_encode returns"
            )
        return features[0]

    def batch_encode(
        self, trajectories: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False
    ) -> list[InputFeature]:
        """Encode several conversations, which is faster than one after the other.

        Args:
            trajectories: as for `encode`.
            add_generation_prompt: as for `encode`.

        Returns:
            A feature for each; none or several for one that is too long, if the truncation
            strategy is `'delete'` or `'split'`.

        Raises:
            ValueError: as `encode`, except for conversations that are deleted or split.
        """
        return self.encode_all(trajectories, add_generation_prompt)[1]

    def encode_all(
        self, trajectories: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False
    ) -> tuple[list[int], list[InputFeature]]:
        """Encode several conversations; return the index of each feature's trajectory, too."""
        sources: list[int] = []
        features: list[InputFeature] = []
        for start in range(0, len(trajectories), _CHUNK):
            chunk = [self._prepare(x) for x in trajectories[start : start + _CHUNK]]
            rendered = self._render_chunk(chunk, add_generation_prompt)
            for i, (encoded, spans) in enumerate(rendered):
                made = self._features(chunk[i], encoded, spans)
                sources += [start + i] * len(made)
                features += made
        return sources, features

    def encode_rows(
        self, rows: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False
    ) -> list[dict[str, Any]]:
        """Encode rows of a data set: `rows.map_rows(template.encode_rows)`.

        Args:
            rows: with `messages`, or with columns of conversations such as `chosen` and `rejected`,
                dictionaries with `messages`. The first row decides.
            add_generation_prompt: as for `encode`.

        Returns:
            The rows, with the columns of their features added, or with features in place of the
            conversations, as lists; other columns stay. A row is left out if one of its
            conversations is too long and `truncation_strategy` is `'delete'`.

        Raises:
            ValueError: as `batch_encode`; also where `'split'` cuts a conversation in a column.

        Example:
            >>> from twinkle_jax.data import Rows, small_tokenizer
            >>> rows = Rows([{"messages": [{"role": "user", "content": "2+2="}], "level": 1}])
            >>> rows.map_rows(Template(small_tokenizer()).encode_rows)[0].keys()
            dict_keys(['messages', 'level', 'input_ids', 'labels'])
        """
        first = rows[0] if rows else {}
        nested = [k for k, x in first.items() if isinstance(x, Mapping) and "messages" in x]
        if not nested:
            kept, features = self.encode_all(rows, add_generation_prompt)
            return [{**rows[i], **to_lists(x)} for i, x in zip(kept, features, strict=True)]
        columns = {}
        for key in nested:
            kept, features = self.encode_all([row[key] for row in rows], add_generation_prompt)
            if len(set(kept)) < len(kept):
                raise ValueError(
                    f"{key} must have at most max_length={self.max_length} tokens, got more: "
                    "truncation_strategy='split' splits rows of one conversation, in 'messages'"
                )
            columns[key] = dict(zip(kept, map(to_lists, features), strict=True))
        complete = [i for i in range(len(rows)) if all(i in x for x in columns.values())]
        return [{**rows[i], **{key: columns[key][i] for key in nested}} for i in complete]

    def accepts(self, row: Mapping[str, Any]) -> bool:
        """Whether a row can be encoded: `rows.filter(template.accepts)` keeps these rows.

        False where `encode_rows` would raise a ValueError, or leave the row out.
        """
        try:
            return bool(self.encode_rows([row]))
        except ValueError:
            return False

    def concat_input_feature(
        self, prompt_input_feature: Mapping[str, Any], new_tokens: Sequence[int]
    ) -> InputFeature:
        """Add sampled tokens to a prompt, with labels, as a message of the assistant.

        Args:
            prompt_input_feature: the prompt.
            new_tokens: the sampled tokens, with the one that ended the completion.

        Returns:
            A new feature: ids and labels so far unchanged, then the new ones.
        """
        tokens = [int(token) for token in new_tokens]
        feature = extend_feature(prompt_input_feature, tokens, labelled=True)
        if "messages" in feature:
            message = Message(role="assistant", content=self.tokenizer.decode(tokens))
            feature["messages"] = [*feature["messages"], message]
        return feature

    def extend_input_feature(
        self, feature: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
    ) -> InputFeature:
        """Append messages of the user or a tool after sampled tokens, for the next assistant turn.

        Args:
            feature: ends with a message of the assistant, as `concat_input_feature` returns it.
            messages: of the user or a tool.

        Returns:
            A new feature: the ids so far unchanged, then the new ones, without labels.

        Raises:
            ValueError: if the feature's last message is not the assistant's, the template leaves it
                out, or a message has no role.
        """
        before = list(feature.get("messages") or ())
        last = int(np.asarray(feature["input_ids"])[-1])
        turn = {**feature, "messages": before, "new": list(messages), "last": last}
        (tokens,) = self.continuations([turn])
        longer = extend_feature(feature, tokens, labelled=False)
        longer["messages"] = [*before, *messages]  # type: ignore[list-item]
        return longer

    def continuations(self, turns: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """Encode the messages after the assistant's last turn, for several conversations at once.

        They are appended to the sampled tokens, which stay even where the chat template would now
        render them otherwise (some strip earlier thoughts). They begin with the token that ends
        the assistant's turn, unless the policy has sampled it, or another token that ends a turn.

        Args:
            turns: for each, `messages` that end with the assistant's, `new` messages of the user
                or a tool, and maybe the token that was sampled `last`, and `tools`.

        Returns:
            Tokens for each, to the start of the next assistant turn.

        Raises:
            ValueError: if the last message is not the assistant's, or the template leaves it out.
        """
        tokens = self._after_last_message(turns, prompt=True)
        return [self._unless_sampled(x, turn) for x, turn in zip(tokens, turns, strict=True)]

    def _after_last_message(
        self, turns: Sequence[Mapping[str, Any]], *, prompt: bool
    ) -> list[list[int]]:
        """Encode what the template writes after the words of the assistant's last message."""
        conversations, marks, ends = [], [], []
        for turn in turns:
            before = turn["messages"]
            if self.chat_template is None or not before or before[-1].get("role") != "assistant":
                raise ValueError("feature must end with a message of the assistant, to continue")
            answered = [*before, *turn["new"]]
            _check_messages(answered)
            answered = self._with_calls(answered)
            hidden = [self._hide(message) for message in answered]
            number, text = 0, repr(hidden)
            while f"\\ue0f8{number}\\ue0f8" in text:  # no message contains the mark
                number += 1
            marks.append(f"{_MARK}{number}{_MARK}")
            calls = hidden[len(before) - 1].get("tool_calls")
            end = _CALL_ENDS.get(self.tool_formats[0], "") if calls else ""
            hidden[len(before) - 1] = self._marked(marks[-1], calls if end else None)
            ends.append(end)
            conversations.append(self._variables(hidden, turn.get("tools"), prompt))
        tokens = []
        template = self.chat_template
        texts = template.render_all(conversations) if template and conversations else []
        for text, mark, end in zip(texts, marks, ends, strict=True):
            _, separator, after = text.rpartition(mark)
            if not separator:
                raise ValueError("chat_template must render the assistant's last message")
            if end:
                after = after.partition(end)[2]
            tokens.append(self._control.encode(after).ids)
        return tokens

    def _marked(self, mark: str, calls: Any) -> dict[str, Any]:
        """Return a message of the assistant with a mark as its content, or as its calls' arguments.

        The sampled tokens spell its thoughts and calls already. Some templates write one call only.
        """
        if not calls:
            return {"role": "assistant", "content": mark}
        marked = [
            {**call, "function": {"name": call["function"]["name"], "arguments": {"x": mark}}}
            for call in calls
        ]
        return {"role": "assistant", "content": self._example_call[1], "tool_calls": marked}

    def _unless_sampled(self, tokens: list[int], turn: Mapping[str, Any]) -> list[int]:
        """Leave out the template's end of the assistant's turn if the policy has sampled one."""
        last, end = turn.get("last"), self._leading_special(tokens)
        if end is None:
            return tokens[1:] if tokens and tokens[0] == last else tokens
        ended = tokens[end] == last
        if not ended and last in self.tokenizer.stop_token_ids:
            # Another token than the template's, such as <|eom_id|>.
            ended = tokens[end] in self._ends_of_turns(turn)
        return tokens[end + 1 :] if ended else tokens

    def _ends_of_turns(self, turn: Mapping[str, Any]) -> list[int]:
        """Find the tokens that end a turn: gpt-oss has one for the last, and one for earlier ones.

        Empty if nothing ends a turn: in some templates the first special token behind it begins
        the next message.
        """
        ends: list[int] = []
        with contextlib.suppress(ValueError):  # the template refuses this
            for prompt in (False, True):
                (alone,) = self._after_last_message([{**turn, "new": []}], prompt=prompt)
                place = self._leading_special(alone)
                if place is None:
                    break
                ends.append(alone[place])
        return ends

    def _leading_special(self, tokens: list[int]) -> int | None:
        """Find the special token that these begin with, maybe after white space."""
        special = self._control.special_ids
        place = next((i for i, id_ in enumerate(tokens) if id_ in special), None)
        is_first = place is not None and not self.tokenizer.decode(tokens[:place]).strip()
        return place if is_first else None

    def parse_tool_call(self, decoded: str | None) -> list[ToolCall]:
        """Find the tool calls in the assistant's text.

        Args:
            decoded: any text.

        Returns:
            Calls in OpenAI's shape, with dictionaries of arguments; broken ones are left out, see
            `parse_tool_calls` for them.

        Example:
            >>> from twinkle_jax.data import small_tokenizer
            >>> Template(small_tokenizer()).parse_tool_call("Action: search[JAX]")
            [{'type': 'function', 'function': {'name': 'search', 'arguments': {'input': 'JAX'}}}]
        """
        return parse_tool_calls(decoded or "", self.tool_formats).calls

    def clean_tool_call(self, decoded: str | None) -> str:
        """The assistant's text without tool calls and trailing white space."""
        return parse_tool_calls(decoded or "", self.tool_formats).content

    @functools.cached_property
    def tool_formats(self) -> tuple[str, ...]:
        """The formats of tool calls that a completion may have, for `parse_tool_calls`.

        The format in which the chat template writes a call comes first, if it is `llama`,
        `mistral`, `deepseek`, `harmony`, `gemma` or `glm`; then those of any policy.
        """
        text = self.example_call
        written = [name for name in TEMPLATE_FORMATS if _has_example(text, name)]
        return (*written[:1], *ANY_FORMAT)

    @property
    def example_call(self) -> str:
        """A conversation in which the chat template writes a call; empty if it writes none."""
        return self._example_call[0]

    @functools.cached_property
    def _example_call(self) -> tuple[str, str | None]:
        """Return an example, and the content of an empty message with which its calls are written.

        DeepSeek's templates want arguments as text; that of R1-Distill leaves out the calls of a
        message whose content is text, even if it is empty.
        """
        if self.chat_template is None:
            return "", ""
        for arguments, content in itertools.product(({"x": 1}, '{"x": 1}'), ("", None)):
            function = {"name": _EXAMPLE, "arguments": arguments}
            call = {"type": "function", "id": "call00000", "function": function}
            messages = [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": content, "tool_calls": [call]},
            ]
            with contextlib.suppress(ValueError):  # the template refuses this
                (text,) = self.chat_template.render_all([self._variables(messages, None, False)])
                if _EXAMPLE in text:
                    return text, content
        return "", ""

    def _with_calls(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Write calls and their ids into messages, where chat templates need them.

        Those of Mistral, gpt-oss and Gemma 4 refuse an answer of a tool, or leave it out, if the
        assistant's message before it has no calls, or the answer no id of a call. Missing ids are
        made up. That of gpt-oss refuses channels in `content`.
        """
        form = self.tool_formats[0]
        answered = any(message["role"] == "tool" for message in messages)
        if form != "harmony" and not (answered and form in ("mistral", *_CALL_ENDS)):
            return list(messages)
        written: list[Mapping[str, Any]] = []
        ids: list[str] = []
        count = 0
        for message, following in itertools.zip_longest(messages, messages[1:]):
            calls = message.get("tool_calls") or []
            if message["role"] == "assistant" and following and following["role"] == "tool":
                content = message_text(message)
                if not calls:
                    calls, errors, rest = parse_tool_calls(content, self.tool_formats)
                    broken = [(error.name, error.text) for error in errors]
                    if not calls and not broken:
                        broken = [("", content)]
                    functions = [{"name": name, "arguments": {"text": x}} for name, x in broken]
                    calls, content = [*calls, *({"function": x} for x in functions)], rest
                message = {**message, "content": content}
            if calls:
                ids = [x.get("id") or f"call{count + i:05}" for i, x in enumerate(calls)]
                calls = [{**call, "id": id_} for call, id_ in zip(calls, ids, strict=True)]
                count += len(calls)
                message = {**message, "tool_calls": calls}
            if message["role"] == "tool" and not message.get("tool_call_id"):
                message = {**message, "tool_call_id": ids.pop(0) if ids else f"call{count:05}"}
            if message["role"] == "assistant" and form == "harmony":
                message = _without_channels(message)
            written.append(message)
        return written

    def _prepare(self, trajectory: Mapping[str, Any]) -> dict[str, Any]:
        """Check the messages of a trajectory, and copy the keys that its feature keeps."""
        if not isinstance(trajectory, Mapping):
            raise TypeError(
                f"a trajectory must be a dictionary with 'messages', got {trajectory!r:.80}"
            )
        messages = trajectory.get("messages")
        if not isinstance(messages, list | tuple) or not messages:
            raise ValueError(f"messages must be a list that is not empty, got {messages!r}")
        _check_messages(messages)
        prepared = {key: trajectory[key] for key in _KEPT if trajectory.get(key) is not None}
        prepared["messages"] = list(messages)
        if self.default_system and messages[0]["role"] != "system":
            system = Message(role="system", content=self.default_system)
            prepared["messages"] = [system, *messages]
        return prepared

    def _render_chunk(
        self, trajectories: Sequence[Mapping[str, Any]], prompt: bool
    ) -> list[tuple[Encoded, _Spans]]:
        """Encode each trajectory, and find the spans of the assistant's words in its text."""
        if self.chat_template is None:
            before, after = self.tokenizer.around_text
            rendered = []
            for trajectory in trajectories:
                ids, starts, text = self._control.encode(self._control.hide(_only_text(trajectory)))
                ids, starts = [*before, *ids], [0] * len(before) + starts
                if not prompt:
                    ids, starts = [*ids, *after], starts + [len(text)] * len(after)
                spans = [] if prompt else [(0, len(text) + 1)]
                rendered.append((Encoded(ids, starts, text), spans))
            return rendered
        hidden = [[self._hide(m) for m in self._with_calls(x["messages"])] for x in trajectories]
        conversations = []
        for trajectory, messages in zip(trajectories, hidden, strict=True):
            tools = trajectory.get("tools")
            conversations.append(self._variables(messages, tools, prompt))
            for i, message in enumerate(messages):
                if _is_learned(message) and not prompt:
                    # Texts that end before and after its words.
                    conversations.append(self._variables(messages[:i], tools, True))
                    conversations.append(self._variables(messages[: i + 1], tools, False))
        texts = iter(self.chat_template.render_all(conversations))
        rendered = []
        for messages in hidden:
            text, spans = next(texts), []
            for i, message in enumerate(messages):
                if _is_learned(message) and not prompt:
                    spans.append(self._span(i, text, next(texts), next(texts)))
            rendered.append((self._control.encode(text), spans))
        return rendered

    def _span(self, index: int, text: str, before: str, until: str) -> tuple[int, int]:
        """Find the assistant's words in a text, with the special token that ends its turn."""
        if not (until.startswith(before) and text.startswith(until)):
            raise ValueError(
                f"messages[{index}] must be rendered in the same way whatever follows it, and "
                "after the generation prompt, which this chat_template does not: give it a weight "
                "of 0, which has no labels, encode turns separately, or add sampled tokens by "
                "concat_input_feature"
            )
        trimmed = until.rstrip()  # white space after a special token is the template's
        if self._control.ends_with_special(trimmed):
            return len(show(before)), len(show(trimmed))
        # In GLM-4's template the token that ends a turn is the first one of the next message.
        follows = self._control.first_token(text[len(until) :])
        return len(show(before)), len(show(until)) + (follows in self.tokenizer.stop_token_ids)

    @functools.cached_property
    def _missing_ends(self) -> dict[str, int | None]:
        """Tokens that end turns which the template leaves open, by the role that would follow."""
        messages = [{"role": role, "content": "a"} for role in ("user", "assistant")]
        ends = {}
        for role in ("user", "tool"):
            following: list[int] = []
            with contextlib.suppress(ValueError):  # the template refuses this
                turn = {"messages": messages, "new": [{"role": role, "content": "a"}]}
                (following,) = self._after_last_message([turn], prompt=False)
            is_end = following and following[0] in self.tokenizer.stop_token_ids
            ends[role] = following[0] if is_end else self.tokenizer.eos_token_id
        return ends

    def with_last_end(self, feature: InputFeature) -> InputFeature:
        """Add the token that ends a completion to a turn that the chat template leaves open.

        GLM-4's has no such token after the last turn of a conversation. Without it, a policy that
        learns from conversations of one turn does not learn to stop.

        Args:
            feature: of `encode`, with labels.

        Returns:
            The feature, if its last token is special or has no label; else a longer one.
        """
        ids, labels = feature["input_ids"], feature["labels"]
        is_open = len(ids) > 1 and labels[-2] != IGNORE and ids[-1] not in self._control.special_ids
        if not is_open:
            return feature
        end = self._missing_ends["tool" if feature["messages"][-1].get("tool_calls") else "user"]
        return feature if end is None else extend_feature(feature, [end], labelled=True)

    def _hide(self, message: Mapping[str, Any]) -> dict[str, Any]:
        # Rows of Parquet files have every key in every message, None where there is nothing.
        present = {key: value for key, value in message.items() if value is not None}
        plain: dict[str, Any] = {**present, "content": message_text(message)}
        if present.get("tool_calls") and not plain["content"]:
            plain["content"] = self._example_call[1]
        thoughts = [present[name] for name in _REASONING if name in present]
        if thoughts:  # as transformers does: data sets have one name, templates read another
            plain = {"thinking": thoughts[0], **plain, "reasoning_content": thoughts[0]}
        trusted = message["role"] in _TRUSTED and self.tool_formats[0] != "harmony"
        return dict(self._control.hide(plain, trusted=trusted))

    def _variables(self, messages: Any, tools: Any, prompt: bool) -> dict[str, Any]:
        """Return the chat template's variables for a conversation."""
        return {
            "messages": messages,
            "tools": self._control.hide(_read_tools(tools)) or None,
            "documents": None,
            "add_generation_prompt": prompt,
            **self.tokenizer.special_tokens,
            **self._template_variables,
        }

    def _features(
        self, trajectory: Mapping[str, Any], encoded: Encoded, spans: _Spans
    ) -> list[InputFeature]:
        ids, starts = np.asarray(encoded.ids, np.int32), np.asarray(encoded.starts)
        if not ids.size:
            raise ValueError("a trajectory must give at least one token, got none")
        by_assistant = np.zeros(ids.shape, bool)
        for begin, end in spans:
            by_assistant |= (begin <= starts) & (starts < end)
        features: list[Any] = []
        for columns in self._cuts(ids.size):
            learned = np.where(by_assistant, ids, IGNORE)[columns]
            # The label of a position is the token that follows it.
            labels = np.append(learned[1:], IGNORE).astype(np.int32)
            features.append({"input_ids": ids[columns], "labels": labels, **trajectory})
        return features

    def _cuts(self, length: int) -> list[slice]:
        """Return the slices of tokens to keep: none if deleted, several if split."""
        limit, strategy = self.max_length, self.truncation_strategy
        if limit is None or length <= limit:
            return [slice(None)]
        if strategy == "raise":
            raise ValueError(
                f"a trajectory must have at most max_length={limit} tokens, got {length}"
            )
        if strategy == "delete":
            return []
        if strategy == "split":
            return [slice(start, start + limit) for start in range(0, length, limit)]
        return [slice(length - limit, None) if strategy == "left" else slice(limit)]


def _check_messages(messages: Sequence[Any]) -> None:
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise ValueError(f"messages[{i}] must have a role, a word, got {message!r}")
        if message.get("weight") not in (None, 0, 1):
            raise ValueError(f"messages[{i}] must have a weight of 0 or 1, got {message!r:.80}")


def _is_learned(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and message.get("weight") != 0


def _without_channels(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Move the analysis of gpt-oss from `content` to `thinking`, and with a call all of it."""
    content = message_text(message)
    if "<|message|>" not in content:
        return message
    thoughts: list[str] = []
    words: list[str] = []
    for part in content.split("<|start|>"):
        header, _, text = part.partition("<|message|>")
        is_thought = "analysis" in header or message.get("tool_calls")
        (thoughts if is_thought else words).append(text)
    thinking = "\n".join(thoughts)
    return {**({"thinking": thinking} if thinking else {}), **message, "content": "\n".join(words)}


def _has_example(text: str, tool_format: str) -> bool:
    """Whether a call of `an_example` is read in a text."""
    calls = parse_tool_calls(text, tool_format).calls
    return any(call["function"]["name"] == _EXAMPLE for call in calls)


def _read_tools(tools: Any) -> Any:
    """Read the JSON text of a list of tools, of which a template would show each character."""
    if not isinstance(tools, str):
        return tools
    try:
        parsed = parse_json(tools)
    except ValueError:
        return None
    return parsed if isinstance(parsed, list) else None


def _only_text(trajectory: Mapping[str, Any]) -> str:
    messages = trajectory["messages"]
    if len(messages) != 1:
        raise ValueError(f"messages must be one with use_chat_template=False, got {len(messages)}")
    return message_text(messages[0])


# The chat template: an untrusted program, run in a separate process.

_WORKER = Path(__file__).with_name("chat_template_worker.py")
_ERRORS = {
    "limits": "chat_template must stay within its sandbox and limits",
    "syntax": "chat_template must be a Jinja template",
    "messages": "messages must suit the chat template",
    "template": "chat_template must suit the messages",
}


class ChatTemplate:
    """A chat template, run in a sandbox.

    It runs in Jinja's immutable sandbox, in a worker process that all chat templates share, and
    sees only messages and variables. A template that takes too long, needs more than 1 GiB (on
    Linux) or writes more than 10 million characters is an error.

    The process is started, not forked, when the first template is made, and does not import the
    caller's script, which needs no `if __name__ == "__main__"`. Any thread may render, and so may
    processes forked from this one.

    Args:
        source: the Jinja template of a tokenizer.
        timeout: seconds for one conversation.

    Raises:
        ValueError: if the source cannot be parsed, or the timeout is not positive.
        ImportError: if jinja2 is not installed.

    Example:
        >>> source = "{% for m in messages %}{{ m.role }}={{ m.content }}{% endfor %}"
        >>> template = ChatTemplate(source)
        >>> template.render([{"role": "user", "content": "Hello"}])
        'user=Hello'
    """

    def __init__(self, source: str, *, timeout: float = 10.0) -> None:
        require("jinja2", "data")
        if not timeout > 0:
            raise ValueError(f"timeout must be positive, got {timeout!r}")
        self.source, self.timeout = source, timeout
        _process.render(source, [], timeout)  # raises for a syntax error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Render a conversation.

        Args:
            messages: dictionaries with `role` and `content`, of JSON's types.
            tools: what may be called.
            add_generation_prompt: whether to end with the start of an assistant turn.
            variables: further variables of the template, such as `enable_thinking`.

        Returns:
            The text, control tokens included.

        Raises:
            ValueError: if the template refuses the messages, accesses something unsafe, or
                exceeds its limits.
            TypeError: if something is not of JSON's types.
        """
        conversation = {
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        return self.render_all([conversation])[0]

    def render_all(self, conversations: Sequence[Mapping[str, Any]]) -> list[str]:
        """Render several conversations, which is faster than one after the other.

        Args:
            conversations: variables of the template for each, `messages` among them.

        Returns:
            A text for each.

        Raises:
            ValueError: as `render`.
            TypeError: as `render`.
        """
        return _process.render(self.source, conversations, self.timeout)


class _Process:
    """The worker process; started at the first request, and again if it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.worker = WorkerProcess(_WORKER)
        self._templates: dict[str, int] = {}  # those that the process has compiled

    def render(
        self, source: str, conversations: Sequence[Mapping[str, Any]], timeout: float
    ) -> list[str]:
        """Compile a template, unless that is done, and render it for each conversation."""
        with self._lock:
            if self.worker.process is None or self.worker.process.poll() is not None:
                self._start()
            if source not in self._templates:
                compiled = self._ask({"source": source, "seconds": timeout})
                self._templates[source] = compiled["template"]
            request = {"template": self._templates[source], "seconds": timeout}
            return list(self._ask({**request, "conversations": conversations})["texts"])

    def _ask(self, request: dict[str, Any]) -> Any:
        process = self.worker.process
        assert process is not None
        answer = self.worker.ask(json.dumps(request, default=_plain))
        if not answer:
            self.worker.end()
            raise ValueError(
                f"{_ERRORS['limits']}, got no answer within {request['seconds']} s and 1 GiB "
                f"(exit status {process.returncode})"
            )
        decoded = json.loads(answer)
        if "error" in decoded:
            raise ValueError(f"{_ERRORS[decoded['error']]}, got {decoded['cause']}")
        return decoded

    def _start(self) -> None:
        self._templates = {}
        self.worker.start()
        if not self.worker.read_line():
            raise RuntimeError(f"{_WORKER} must start, its process ended: {self.worker.end()}")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"messages must be of JSON's types, got {type(value).__name__}")


_process = _Process()


def _after_fork() -> None:
    """Leave the worker to the parent process: two readers of one pipe would mix up answers."""
    global _process
    _process.worker.leave_to_parent()
    _process = _Process()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
