"""Tool calls in the text of a model.

Formats: Hermes and Qwen, Cline, ReAct, Llama 3, Mistral, DeepSeek, gpt-oss, Gemma 4, GLM-4.5.

The text is untrusted: parsing takes time linear in its length, and no text raises an error. A
broken call is returned as a `ToolCallError`, anything else as text.
"""

import itertools
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from twinkle_jax.data.strict_json import parse_json, parse_json_at
from twinkle_jax.data.trajectory import FunctionCall, ToolCall

_DEPTH = 64  # of lists and dictionaries in arguments, which callers may walk recursively
_EXCERPT = 200  # characters of a broken call in its error
_BROKEN = 64  # calls of a chat template's form in a text; each may cost as much as the whole text

# Tags that are no tools of Cline: those of thinking, of other formats and of HTML.
_NOT_TOOLS = re.compile(
    "think|answer|reasoning_content|content|response|output|role|messages?|system|user|assistant|"
    "tools?|tool_call|tool_response|function|parameters?|"
    "p|a|b|i|em|strong|div|span|pre|code|br|hr|ul|ol|li|h[1-6]|table|thead|tbody|tr|td|th|"
    "img|video|audio"
)
_CLOSED_CALL = r"<tool_call>(?:(?!</?tool_call>).)*</tool_call>"
_TAG = re.compile(r"<(/?)([a-z][a-z0-9_]*)>")
_ACTION = re.compile(r"\s*Action\s*:\s*([\w\-./]+)\s*(?:\[(.*)\]\s*)?")
_ACTION_INPUT = re.compile(r"\s*Action Input\s*:(.*)", re.DOTALL)
_REACT_LINE = re.compile(r"\s*(?:Thought|Action|Observation|Final Answer)\s*:")
_ID = re.compile("[A-Za-z0-9]{9}")  # of a call, as Mistral's templates want it
_GEMMA_MARK = re.compile(r'<\|"\|>|<tool_call\|>')
_GEMMA_KEY = re.compile(r'([{,]\s*)([^\s"{}\[\],:]+)(?=\s*:)')
_GEMMA_NONE = re.compile(r"([:\[,]\s*)None(?=\s*[,}\]])")
_THINKING = "|".join(
    rf"{opening}.*?(?:{closing}|\Z)"
    for opening, closing in (
        ("<think>", "</think>"),
        ("<seed:think>", "</seed:think>"),
        (r"<\|channel>", r"<channel\|>"),
        (r"<\|channel\|>analysis\s*<\|message\|>", r"(?=<\|start\|>)"),
    )
)


class ToolCallError(NamedTuple):
    """Text that is marked as a tool call and cannot be read as one.

    Attributes:
        reason: what is wrong, for the model or a log.
        text: the beginning of the call.
        name: of the function; empty if it cannot be read.
    """

    reason: str
    text: str
    name: str = ""


class ParsedToolCalls(NamedTuple):
    """What a text holds in one format.

    Attributes:
        calls: in order; `arguments` of each is a dictionary.
        errors: calls that are broken, in order.
        content: the text around calls and errors, without white space at its end.
    """

    calls: list[ToolCall]
    errors: list[ToolCallError]
    content: str


class _Block(NamedTuple):
    """A part of a text between two markers."""

    start: int  # of the opening marker
    body: str
    end: int  # behind the closing marker
    closed: bool


class _Form(NamedTuple):
    """A call that is JSON after a marker.

    If that has a group `name` or `function`, the JSON is the arguments of this function; otherwise
    it is a call with its name, or a list of calls.
    """

    opening: str  # the marker
    closing: str = ""  # what must follow the JSON
    end: str = r"\Z"  # of a call whose JSON is broken
    arguments: tuple[str, ...] = ("arguments",)  # their names in a call
    read: Callable[[str, int], tuple[Any, int]] = parse_json_at  # the JSON at a place, and its end


def _read_gemma(text: str, start: int) -> tuple[Any, int]:
    """Read arguments of Gemma 4: its JSON has `<|"|>` around texts, and nothing around keys."""
    pieces: list[str] = []
    at, in_text = start, False
    for mark in _GEMMA_MARK.finditer(text, start):
        is_quote = mark[0] == '<|"|>'
        if in_text and not is_quote:
            continue
        piece = text[at : mark.start()]
        if in_text:
            pieces.append(json.dumps(piece))
        else:
            pieces.append(_GEMMA_NONE.sub(r"\1null", _GEMMA_KEY.sub(r'\1"\2"', piece)))
        if not is_quote:
            return parse_json("".join(pieces)), mark.start()
        at, in_text = mark.end(), not in_text
    raise ValueError("a call must end with <tool_call|>")


_FORMS = {
    "llama": _Form(
        r"(?:<\|python_tag\|>\s*|(?="
        r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"\\]*"\s*,\s*"parameters"\s*:))',
        closing=r"(?:\s*;)?",
        arguments=("parameters", "arguments"),
    ),
    "mistral": _Form(
        r'\[TOOL_CALLS\]\s*(?:(?P<name>[^\s\[\]{}"<>]+)\s*'
        r"(?:\[CALL_ID\]\s*(?P<id>\w*)\s*)?(?:\[ARGS\]\s*)?)?"
    ),
    "deepseek": _Form(
        r"(?:<｜tool▁calls▁begin｜>\s*|(?=<｜tool▁call▁begin｜>))(?:<｜tool▁call▁begin｜>(?:"
        r"\w*<｜tool▁sep｜>(?P<name>[^\n<]*)\n\s*```(?:json)?\s*|(?P<function>[^\n<]*)<｜tool▁sep｜>\s*))?",
        closing=r"\s*(?:```\s*)?(?:<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?|\Z)",
        end=r"<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?|\Z",
    ),
    "harmony": _Form(
        # A message to a tool: the recipient stands before or behind the channel.
        r"(?:\A|<\|start\|>)[^<]{0,64}?(?:<\|channel\|>[^<]{0,64}?)?"
        r"\bto=(?:functions\.)?(?P<name>[\w.\-]+)[^<]{0,64}(?:<\|channel\|>[^<]{0,64})?"
        r"(?:<\|constrain\|>[^<]{0,64})?<\|message\|>\s*",
        closing=r"\s*(?:<\|call\|>|(?=<\|start\|>)|\Z)",
        end=r"<\|call\|>|(?=<\|start\|>)|\Z",
    ),
    "gemma": _Form(
        r'<\|tool_call>\s*call:(?P<name>[^\s{}\[\]<"]+)\s*',
        closing=r"<tool_call\|>",
        end=r"<tool_call\|>|\Z",
        read=_read_gemma,
    ),
}


def parse_tool_calls(
    text: str, tool_format: str | Sequence[str] = "any", *, thinking: bool = False
) -> ParsedToolCalls:
    """Parse tool calls in the first of the formats that a text has.

    Nothing between `<think>` and `</think>` is a call, nor anything after `<think>` if it is never
    closed; the same holds for thinking as Gemma 4, Seed-OSS and gpt-oss mark it. If the text has
    `</think>` first, it has been thinking from its beginning: many chat templates write `<think>`
    into the prompt. The parsers of single formats know no thinking.

    Args:
        text: what the assistant wrote.
        tool_format: the name of a format, several, or `"any"` for `hermes_qwen`, `cline` and
            `react`. `llama`, `mistral`, `deepseek`, `harmony` (gpt-oss), `gemma` (Gemma 4) and
            `glm` (GLM-4.5 and later) are for policies whose chat template writes them, as
            [`Template.tool_formats`][twinkle_jax.data.Template.tool_formats] says: in another
            policy's text they may be anything, such as an answer in JSON.
        thinking: whether the text begins inside thinking that the prompt has opened.

    Returns:
        Calls, errors and the text around them, thinking included. Formats are tried in their
        order; the first with a call or an error takes all of the text, so no call is found inside
        another one's arguments.

    Raises:
        ValueError: for an unknown `tool_format`; whatever the text is, it raises nothing.

    Example:
        >>> text = 'Let me see. <tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
        >>> parse_tool_calls(text).calls
        [{'type': 'function', 'function': {'name': 'add', 'arguments': {'x': 1}}}]
        >>> parse_tool_calls(f"<think>{text}</think>").calls
        []
    """
    names = [tool_format] if isinstance(tool_format, str) else tool_format
    for name in ANY_FORMAT if tool_format == "any" else names:
        parse = TOOL_CALL_FORMATS.get(name)
        if parse is None:
            known = ", ".join(["any", *TOOL_CALL_FORMATS])
            raise ValueError(f"tool_format must be of {known}, got {name!r}")
        parts = _split_thinking(text, thinking, _FORMS.get(name))
        parsed = [
            ParsedToolCalls([], [], part) if is_thought else parse(part)
            for is_thought, part in parts
        ]
        calls = [call for x in parsed for call in x.calls]
        errors = [error for x in parsed for error in x.errors]
        if calls or errors:
            return ParsedToolCalls(calls, errors, "".join(x.content for x in parsed).rstrip())
    return ParsedToolCalls([], [], text.rstrip())


def _split_thinking(text: str, thinking: bool, form: _Form | None) -> list[tuple[bool, str]]:
    """Split a text into parts that are thinking (True) and parts that are not.

    Thinking tags in the arguments of a call do not count. Without a form, calls are `<tool_call>`
    blocks.
    """
    call = form.opening if form else _CLOSED_CALL
    marks = re.compile(rf"{_THINKING}|</think>|(?P<call>{call})", re.DOTALL)
    ends = [0]  # of parts; thinking and the rest alternate
    if thinking:
        closing = text.find("</think>")
        ends += [0, len(text) if closing < 0 else closing + len("</think>")]
    at, broken = ends[-1], 0
    while match := marks.search(text, at):
        at = match.end()
        if match["call"] is not None:
            at = max(at, match.start() + 1)
            if form and broken < _BROKEN:
                try:
                    at = form.read(text, match.end())[1]
                except ValueError:  # what is broken has no arguments
                    broken += 1
            continue
        is_orphan = match[0] == "</think>"
        if not (is_orphan and len(ends) > 1):
            ends += [0 if is_orphan else match.start(), match.end()]
    parts = itertools.pairwise([*ends, len(text)])
    return [(number % 2 == 1, text[start:end]) for number, (start, end) in enumerate(parts)]


def parse_hermes_calls(text: str) -> ParsedToolCalls:
    r"""Parse `<tool_call>` blocks, as models of the Hermes and Qwen families write them.

    A block holds JSON, `{"name": …, "arguments": {…}}`, or the form of Qwen3-Coder,
    `<function=name><parameter=key>value</parameter></function>`, which is also read where there is
    no `<tool_call>` around it. A value of that form is JSON if it can be, otherwise text, without
    one line break at its beginning and one at its end. In place of parameters it may hold a JSON
    object, as Llama 3.1 writes it. The last block may be unclosed if its call is complete.

    Args:
        text: what the assistant wrote.

    Returns:
        Calls, errors and the text around them. Duplicate keys, unknown forms, broken JSON and
        arguments nested more than 64 levels deep are errors.

    Example:
        >>> text = "<tool_call><function=add><parameter=x>1</parameter></function></tool_call>"
        >>> parse_hermes_calls(text).calls
        [{'type': 'function', 'function': {'name': 'add', 'arguments': {'x': 1}}}]
        >>> parse_hermes_calls('<tool_call>{"name": "add"').errors[0].text
        '<tool_call>{"name": "add"'
    """
    calls: list[ToolCall] = []
    errors: list[ToolCallError] = []
    blocks = _blocks(text, "<tool_call>", "</tool_call>")
    bare = not blocks
    if bare:
        blocks = _blocks(text, "<function=", "</function>")
    for block in blocks:
        as_json = not bare and (
            block.body.lstrip().startswith("{") or "<function=" not in block.body
        )
        nested = not bare and not as_json
        parts = _blocks(block.body, "<function=", "</function>") if nested else [block]
        for part in parts:
            try:
                body = part.body
                calls.append(
                    _read_call(parse_json(body.strip()))
                    if as_json
                    else _function(body, part.closed)
                )
            except ValueError as error:
                errors.append(_error(error, text, block))
    return ParsedToolCalls(calls, errors, _without(text, blocks))


def parse_glm_calls(text: str) -> ParsedToolCalls:
    r"""Parse `<tool_call>` blocks of GLM-4.5: a name, and keys and values of its arguments in tags.

    A value is JSON if it can be, otherwise text, as it stands. Without arguments a block holds a
    name alone. Errors are duplicate keys, anything but white space between tags, and a block that
    is not closed: it may lack arguments.

    Example:
        >>> text = "<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
        >>> parse_glm_calls(text).calls
        [{'type': 'function', 'function': {'name': 'add', 'arguments': {'x': 1}}}]
    """
    calls: list[ToolCall] = []
    errors: list[ToolCallError] = []
    blocks = _blocks(text, "<tool_call>", "</tool_call>")
    for block in blocks:
        try:
            if not block.closed:
                raise ValueError("a call must end with </tool_call>")
            calls.append(_glm_call(block.body))
        except ValueError as error:
            errors.append(_error(error, text, block))
    return ParsedToolCalls(calls, errors, _without(text, blocks))


def _glm_call(body: str) -> ToolCall:
    name, found, rest = body.partition("<arg_key>")
    arguments: list[tuple[str, Any]] = []
    while found:
        key, closed, rest = rest.partition("</arg_key>")
        between, opened, rest = rest.partition("<arg_value>")
        value, ended, rest = rest.partition("</arg_value>")
        if not (closed and opened and ended) or between.strip():
            raise ValueError(f"the argument {key.strip()!r:.80} must have a value in <arg_value>")
        arguments.append((key.strip(), _value(value)))
        between, found, rest = rest.partition("<arg_key>")
        if between.strip():
            raise ValueError(f"arguments must be in tags, got {between.strip()!r:.80}")
    if not re.fullmatch(r"[\w.\-]+", name.strip()):
        raise ValueError(f"a call must begin with a name, got {name.strip()!r:.80}")
    return _call(name.strip(), _unique(arguments))


def parse_cline_calls(text: str) -> ParsedToolCalls:
    """Parse calls of Cline: a tag for the tool, and in it a tag for each argument.

    `<read_file><path>a.py</path></read_file>` is one. Any tag in lower case may be a tool, if there
    is a closed tag in it; except those of HTML, of thinking and of other formats. Values are text
    without white space around it.

    Args:
        text: what the assistant wrote.

    Returns:
        Calls, errors and the text around them. A duplicate argument is an error; a tag that is
        not closed is text.

    Example:
        >>> parse_cline_calls("<read_file><path>a.py</path></read_file>").calls
        [{'type': 'function', 'function': {'name': 'read_file', 'arguments': {'path': 'a.py'}}}]
    """
    tags = list(_TAG.finditer(text))
    closing: dict[str, list[int]] = {}  # numbers of the closing tags, by name
    for number, tag in enumerate(tags):
        if tag[1]:
            closing.setdefault(tag[2], []).append(number)

    def closed_by(number: int) -> int:
        numbers = closing.get(tags[number][2], [])
        place = bisect_left(numbers, number)
        return numbers[place] if place < len(numbers) else len(tags)

    calls: list[ToolCall] = []
    errors: list[ToolCallError] = []
    blocks: list[_Block] = []
    number = 0
    while number < len(tags):
        end = len(tags) if tags[number][1] else closed_by(number)
        if end == len(tags):
            number += 1  # a closing tag, or one that is never closed
            continue
        name, body = tags[number][2], text[tags[number].end() : tags[end].start()]
        arguments: list[tuple[str, str]] = []
        inner = number + 1
        while inner < end and not _NOT_TOOLS.fullmatch(name):
            inner_end = end if tags[inner][1] else closed_by(inner)
            if inner_end < end:
                value = text[tags[inner].end() : tags[inner_end].start()].strip()
                arguments.append((tags[inner][2], value))
                inner = inner_end
            inner += 1
        if arguments:
            blocks.append(_Block(tags[number].start(), body, tags[end].end(), True))
            try:
                calls.append(_call(name, _unique(arguments)))
            except ValueError as error:
                errors.append(_error(error, text, blocks[-1]))
        number = end + 1
    return ParsedToolCalls(calls, errors, _without(text, blocks))


def parse_react_calls(text: str) -> ParsedToolCalls:
    r"""Parse lines `Action: name[input]`, or `Action: name` and `Action Input:` after it.

    Args:
        text: what the assistant wrote.

    Returns:
        Calls, no errors, and the text around the calls. The input in brackets is the argument
        `input`. `Action Input:` may have several lines; a JSON object there is the arguments,
        anything else the argument `input`.

    Example:
        >>> parse_react_calls("Thought: I need to look it up.\nAction: search[JAX]").calls
        [{'type': 'function', 'function': {'name': 'search', 'arguments': {'input': 'JAX'}}}]
    """
    calls: list[ToolCall] = []
    rest: list[str] = []
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        action = _ACTION.fullmatch(lines[number])
        following = lines[number + 1] if number + 1 < len(lines) else ""
        action_input = _ACTION_INPUT.fullmatch(following)
        if action is None or (action[2] is None and action_input is None):
            rest.append(lines[number])
            number += 1
        elif action[2] is not None:
            calls.append(_call(action[1], {"input": action[2]}))
            number += 1
        else:
            assert action_input is not None
            end = number + 2
            while end < len(lines) and not _REACT_LINE.match(lines[end]):
                end += 1
            value = "\n".join([action_input[1], *lines[number + 2 : end]]).strip()
            parsed = _value(value)
            arguments = parsed if isinstance(parsed, dict) else {"input": value}
            calls.append(_call(action[1], arguments))
            number = end
    return ParsedToolCalls(calls, [], "\n".join(rest).rstrip())


def _parse_form(text: str, form: _Form) -> ParsedToolCalls:
    """Parse calls that are JSON after a marker; after too many broken ones, the rest is text."""
    opening, closing, end = (re.compile(x) for x in (form.opening, form.closing, form.end))
    calls: list[ToolCall] = []
    errors: list[ToolCallError] = []
    blocks: list[_Block] = []
    at = 0
    while len(errors) < _BROKEN and (match := opening.search(text, at)):
        found_calls: list[Any] = []
        problems: list[ValueError] = []
        try:
            value, at = form.read(text, match.end())
            closed = closing.match(text, at)
            if closed is None:
                raise ValueError("a call must end after its arguments")
            at, found_calls = closed.end(), _calls_of(value, match)
        except ValueError as error:
            problems.append(error)
            ended = end.search(text, match.end())
            at = ended.end() if ended else len(text)
        blocks.append(_Block(match.start(), "", at, True))
        for call in found_calls:
            try:
                calls.append(_read_call(call, form.arguments))
            except ValueError as error:
                problems.append(error)
                continue
            if isinstance(call.get("id"), str) and _ID.fullmatch(call["id"]):
                calls[-1]["id"] = call["id"]
        errors += [_error(x, text, blocks[-1])._replace(name=_name(match)) for x in problems]
    return ParsedToolCalls(calls, errors, _without(text, blocks))


def _calls_of(value: Any, opening: re.Match[str]) -> list[Any]:
    """Return the calls, with their names, that stand as JSON after a marker."""
    if name := _name(opening):
        return [{"name": name, "arguments": value, "id": opening.groupdict().get("id")}]
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise ValueError("a list of calls must not be empty")
    return calls


def _name(opening: re.Match[str]) -> str:
    """Return the name of the function before its arguments; empty if there is none."""
    groups = opening.groupdict()
    return (groups.get("name") or groups.get("function") or "").strip()


TEMPLATE_FORMATS = (*_FORMS, "glm")
"""The formats that are tried only where the chat template writes them."""

ANY_FORMAT = ("hermes_qwen", "cline", "react")
"""The formats that are tried whatever the chat template is, in this order; Twinkle's names."""

TOOL_CALL_FORMATS: Mapping[str, Callable[[str], ParsedToolCalls]] = {
    "hermes_qwen": parse_hermes_calls,
    "cline": parse_cline_calls,
    "react": parse_react_calls,
    "glm": parse_glm_calls,
    **{name: partial(_parse_form, form=form) for name, form in _FORMS.items()},
}
"""All formats by their names."""


def _blocks(text: str, opening: str, closing: str) -> list[_Block]:
    """Find parts between markers; the last one may lack its end, if no other closes after it."""
    blocks = []
    start = text.find(opening)
    while start >= 0:
        body = start + len(opening)
        end = text.find(closing, body)
        if end < 0:
            blocks.append(_Block(start, text[body:], len(text), False))
            break
        blocks.append(_Block(start, text[body:end], end + len(closing), True))
        start = text.find(opening, end + len(closing))
    return blocks


def _without(text: str, blocks: list[_Block]) -> str:
    ends = [0, *(block.end for block in blocks)]
    starts = [*(block.start for block in blocks), len(text)]
    return "".join(text[a:b] for a, b in zip(ends, starts, strict=True)).rstrip()


def _error(error: ValueError, text: str, block: _Block) -> ToolCallError:
    excerpt = text[block.start : min(block.end, block.start + _EXCERPT)]
    return ToolCallError(f"{error!s:.{_EXCERPT}}", excerpt)


def _read_call(call: Any, argument_keys: Sequence[str] = ("arguments",)) -> ToolCall:
    if not isinstance(call, dict):
        raise ValueError(f"a call must be a JSON object, got {type(call).__name__}")
    others = [key for key in call if key not in ("name", "tool_name", "id", "type")]
    key = next((key for key in argument_keys if key in call), None)
    if others and key is None:
        expected = argument_keys[0]
        raise ValueError(f"a call must have its arguments as {expected!r}, got {others[0]!r:.80}")
    arguments = call[key] if key else None
    if isinstance(arguments, str):
        arguments = parse_json(arguments) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments must be a JSON object, got {type(arguments).__name__}")
    return _call(call.get("name") or call.get("tool_name"), arguments)


def _function(body: str, closed: bool) -> ToolCall:
    """Read what stands between `<function=` and `</function>`."""
    name, bracket, rest = body.partition(">")
    if not closed or not bracket:
        raise ValueError("a function must end with </function>")
    parameters = _blocks(rest, "<parameter=", "</parameter>")
    if not parameters and rest.strip():
        parsed = parse_json(rest.strip())
        if not isinstance(parsed, dict):
            raise ValueError(f"arguments must be a JSON object, got {type(parsed).__name__}")
        return _call(name.strip(), parsed)
    arguments = []
    for parameter in parameters:
        key, bracket, value = parameter.body.partition(">")
        if not parameter.closed or not bracket or "<parameter=" in value:
            raise ValueError(f"the parameter {key.strip()!r:.80} must end with </parameter>")
        arguments.append((key.strip(), _value(value.removeprefix("\n").removesuffix("\n"))))
    return _call(name.strip(), _unique(arguments))


def _value(text: str) -> Any:
    try:
        value = parse_json(text.strip())
    except ValueError:
        return text
    return text if _too_deep(value) else value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    arguments = dict(pairs)
    if len(arguments) < len(pairs):
        raise ValueError(f"arguments must be unique, got {[key for key, _ in pairs]}")
    return arguments


def _call(name: Any, arguments: dict[str, Any]) -> ToolCall:
    if not isinstance(name, str) or not name:
        raise ValueError(f"a call must have a name, got {name!r:.80}")
    if _too_deep(arguments):
        raise ValueError(f"arguments must be nested at most {_DEPTH} levels deep")
    return ToolCall(type="function", function=FunctionCall(name=name, arguments=arguments))


def _too_deep(value: Any) -> bool:
    if not isinstance(value, dict | list):
        return False
    level = [value]  # not recursive: the depth is the model's choice
    for _ in range(_DEPTH + 1):
        containers = [x.values() if isinstance(x, dict) else x for x in level]
        level = [x for values in containers for x in values if isinstance(x, dict | list)]
        if not level:
            return False
    return True
