"""Tool calls in text: each format, several calls, and text that was written to break a parser."""

import random
import time

import pytest

from twinkle_jax.data import (
    Template,
    parse_cline_calls,
    parse_hermes_calls,
    parse_react_calls,
    parse_tool_calls,
    small_tokenizer,
)
from twinkle_jax.data.tool_calls import TOOL_CALL_FORMATS


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (
            '<tool_call>{"name": "f", "arguments": {"x": [1, {"y": null}]}}</tool_call>',
            [("f", "x")],
        ),
        ('<tool_call>\n{"name": "f", "arguments": "{\\"x\\": 1}"}\n</tool_call>', [("f", "x")]),
        ('<tool_call>{"name": "f"}</tool_call>', [("f", "")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "")]),
        ('<tool_call>{"name": "f", "arguments": " "}</tool_call>', [("f", "")]),
        ('<tool_call>{"tool_name": "f", "arguments": {}}</tool_call>', [("f", "")]),
        ('<tool_call>{"name": "f"}</tool_call> <tool_call>{"name": "g"}', [("f", ""), ("g", "")]),
        ('<tool_call>{"name": "f", "arguments": {"x": "<function=g>"}}</tool_call>', [("f", "x")]),
        ("<tool_call><function=f></function></tool_call>", [("f", "")]),
        ("<function=f><parameter=x>1</parameter></function>", [("f", "x")]),
        ('<function=f>\n{"x": [1]}\n</function>', [("f", "x")]),
        ('<tool_call>{"name": "f", "id": "1", "type": "function"}</tool_call>', [("f", "")]),
        (
            "<tool_call><function=f></function>\n<function=g></function></tool_call>",
            [("f", ""), ("g", "")],
        ),
    ],
)
def test_forms_of_hermes_and_qwen(text, calls):
    parsed = parse_hermes_calls(f"So: {text}\n")
    functions = [x["function"] for x in parsed.calls]
    assert [(f["name"], "".join(f["arguments"])) for f in functions] == calls
    assert not parsed.errors and parsed.content == "So:"


def test_values_of_qwen3_coder_are_json_or_text():
    text = """<tool_call>
<function=write>
<parameter=path>
 a.py
</parameter>
<parameter=code>

    def f():
        return "<b>"

</parameter>
<parameter=lines>[1, 2]</parameter>
<parameter=zip>007</parameter>
<parameter=nan>NaN</parameter>
<parameter=deep>DEEP</parameter>
</function>
</tool_call>"""
    deep = "[" * 70 + "]" * 70
    (parsed,) = parse_hermes_calls(text.replace("DEEP", deep)).calls
    code = '\n    def f():\n        return "<b>"\n'  # one line break on each side is the format's
    assert parsed == call(
        "write", path=" a.py", code=code, lines=[1, 2], zip="007", nan="NaN", deep=deep
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"name": "f", "arguments": {', "Expecting"),
        ("", "Expecting"),
        ("f(1)", "Expecting"),
        ("[1]", "a call must be a JSON object, got list"),
        ('{"name": "f", "parameters": {"x": 1}}', "as 'arguments', got 'parameters'"),
        ('{"name": "f", "x": 1}', "as 'arguments', got 'x'"),
        ('{"name": "f", "arguments": [1]}', "arguments"),
        ('{"name": "f", "arguments": "[1]"}', "arguments"),
        ('{"name": "f", "arguments": "{"}', "Expecting"),
        ('{"name": "f", "name": "g"}', "duplicate key 'name'"),
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN"),
        ('{"arguments": {}}', "a call must have a name, got None"),
        ('{"name": ["f"], "arguments": {}}', "a call must have a name"),
        ('{"name": "f", "arguments": {"x": ' + "[" * 65 + "]" * 65 + "}}", "64 levels"),
        ('{"name": "f", "arguments": {"x": ' + "[" * 90_000, "nested too deeply"),
        ("<function=f>", "a function must end with </function>"),
        ("<function=f</function>", "a function must end with </function>"),
        ("<function=></function>", "a call must have a name, got ''"),
        ("<function=f>x=1</function>", "Expecting"),
        ("<function=f>[1]</function>", "arguments must be a JSON object, got list"),
        ("<function=f><parameter=x>1</function>", "the parameter 'x' must end"),
        ("<function=f><parameter=x>1<parameter=y>2</parameter></function>", "the parameter 'x'"),
        (
            "<function=f><parameter=x>1</parameter><parameter=x>2</parameter></function>",
            "arguments must be unique",
        ),
    ],
)
def test_broken_calls_are_errors_beside_the_others(body, reason):
    good = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    parsed = parse_hermes_calls(f"a {good} b <tool_call>{body}</tool_call> c {good}")
    assert parsed.calls == [call("g"), call("g")]
    (error,) = parsed.errors
    assert reason in error.reason and len(error.reason) <= 200
    assert error.text == f"<tool_call>{body}</tool_call>"[:200]
    assert parsed.content == "a  b  c"


def test_a_call_nested_as_deep_as_allowed():
    text = '{"name": "f", "arguments": {"x": ' + "[" * 63 + "]" * 63 + "}}"
    assert parse_hermes_calls(f"<tool_call>{text}</tool_call>").calls


def test_cline():
    text = """<think>I could <read_file><path>no</path></read_file></think>
<execute_command>
  <command> ls -la </command> and <b>
  <requires_approval>false</requires_approval>
</execute_command> then <read_file><path>a</path></read_file>
<note>no tag in it</note> <open><x>1</x>"""
    parsed = parse_cline_calls(text)
    assert parsed.calls == [
        call("execute_command", command="ls -la", requires_approval="false"),
        call("read_file", path="a"),
    ]
    assert not parsed.errors and "execute" not in parsed.content
    assert parsed.content.endswith(" then \n<note>no tag in it</note> <open><x>1</x>")
    html = "<div><span>x</span></div> <Upper><path>x</path></Upper> <a_b>x</a_b>"
    assert parse_cline_calls(html) == ([], [], html)
    assert parse_cline_calls("<f><f>x</f></f>").calls == []
    (error,) = parse_cline_calls("<f><x>1</x><x>2</x></f>").errors
    assert "arguments must be unique" in error.reason


def test_react():
    text = """Thought: Look.
Action: search[x [1]]
Observation: none
Action: web.fetch
Action Input: {"url": "a",
 "deep": true}
Observation: b
  Action :  say
Action Input: "hello
world
Thought: done
Action: nothing
Action: not one[x] of these"""
    parsed = parse_react_calls(text)
    assert parsed.calls == [
        call("search", input="x [1]"),
        call("web.fetch", url="a", deep=True),
        call("say", input='"hello\nworld'),
    ]
    assert parsed.content.split("\n") == [
        "Thought: Look.",
        "Observation: none",
        "Observation: b",
        "Thought: done",
        "Action: nothing",
        "Action: not one[x] of these",
    ]
    assert parse_react_calls("Action: f\nAction Input: {}").calls == [call("f")]


def test_the_first_format_takes_the_whole_text():
    hermes = '<tool_call>{"name": "f", "arguments": {"x": "<g><y>1</y></g>"}}</tool_call>'
    react = "Action: h[1]"
    cline = "<g><y>1</y></g>"
    assert parse_tool_calls(f"{react}\n{cline}\n{hermes}").calls == [call("f", x="<g><y>1</y></g>")]
    assert parse_tool_calls(f"{react}\n{cline}").calls == [call("g", y="1")]
    assert parse_tool_calls(react).calls == [call("h", input="1")]
    broken = parse_tool_calls(f"<tool_call>?</tool_call>{cline}")
    assert broken.calls == [] and len(broken.errors) == 1
    assert parse_tool_calls("plain text \n") == ([], [], "plain text")


CALLS = {
    "hermes_qwen": '<tool_call>{"name": "f", "arguments": {"x": "1"}}</tool_call>',
    "cline": "<f><x>1</x></f>",
    "react": '\nAction: f\nAction Input: {"x": "1"}\n',
}
CALLS_OF_G = {
    "hermes_qwen": CALLS["hermes_qwen"].replace('"f"', '"g"'),
    "cline": "<g><x>1</x></g>",
    "react": CALLS["react"].replace("f", "g"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("any_format", [False, True])
def test_thinking_holds_no_calls(name, any_format):
    def parse(text, **options):
        return parse_tool_calls(text, "any" if any_format else name, **options)

    one = CALLS[name]
    two, second = CALLS_OF_G[name], call("g", x="1")
    broken = one[: len(one) // 2]  # what a thought leaves open does not reach beyond it
    for thought in (one, f"{one}{broken}", broken, f"<think>{one}"):
        finished = f"<think>{thought}</think>"
        for text in (finished, f"<think>{thought}", f"{thought}</think>"):
            assert parse(f"{text}\n") == ([], [], text.rstrip())
        assert parse(f"{thought}", thinking=True) == ([], [], thought.rstrip())
        for text, opened in ((finished, False), (finished[7:], False), (finished[7:], True)):
            parsed = parse(f"{text}So:{two}", thinking=opened)
            assert parsed.calls == [second] and not parsed.errors
            assert parsed.content == f"{text}So:"
        assert parse(f"{two}\n<think>{thought}").calls == [second]
        assert parse(f"{finished}{two}{finished}{two}").calls == [second, second]
    assert parse(f"<think></think>{two}Thought:</think>{two}").calls == [second, second]


def test_tags_of_thinking_in_a_call_are_its_arguments():
    for value in ("<think>", "</think>", "</think> <think>"):
        text = f'<tool_call>{{"name": "f", "arguments": {{"x": "{value}"}}}}</tool_call>'
        for around in (text, f"<think>?</think>{text}", f"{text}<think>{text}</think>"):
            assert parse_tool_calls(around).calls == [call("f", x=value)]
    parsed = parse_tool_calls(f"I could <tool_call> it.</think>{CALLS['hermes_qwen']}")
    assert parsed.calls == [call("f", x="1")] and not parsed.errors


def test_templates_parse_what_was_decoded():
    template = Template(small_tokenizer())
    assert template.parse_tool_call("Action: f[x]") == [call("f", input="x")]
    assert template.parse_tool_call("") == template.parse_tool_call(None) == []
    assert template.clean_tool_call("So\nAction: f[x]") == "So" == template.clean_tool_call("So ")
    assert template.clean_tool_call(None) == ""
    thought = "<think>Action: f[x]\n</think>"
    assert template.parse_tool_call(thought) == []
    assert template.clean_tool_call(f"{thought}So\nAction: f[x]") == f"{thought}So"


PARTS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "<function=f>",
    "</function>",
    "<parameter=",
    "<parameter=x>",
    "</parameter>",
    '{"name": "f", "arguments": {',
    '{"name":',
    '"',
    "\\",
    "}}",
    "[",
    "{",
    "1e999",
    "<f>",
    "</f>",
    "<x>",
    "</x>",
    "<",
    ">",
    "Action: f[",
    "Action: f",
    "Action Input:",
    "]",
    "\n",
    " ",
    "\ud800",
    "é",
]


@pytest.mark.parametrize("seed", range(3))
def test_no_text_raises(seed):
    draw = random.Random(seed)
    for _ in range(1500):
        text = "".join(draw.choices(PARTS, k=draw.randint(0, 25)))
        for parse in (*TOOL_CALL_FORMATS.values(), parse_tool_calls):
            parsed = parse(text)
            assert len(parsed.content) <= len(text)
            for parsed_call in parsed.calls:
                assert (
                    isinstance(parsed_call["function"]["name"], str)
                    and parsed_call["function"]["name"]
                )
                assert isinstance(parsed_call["function"]["arguments"], dict)


# Texts on which a parser that looks for an end again and again takes quadratic time.
REPEATED = [
    "<think>",
    "</think>",
    "<think></think>",
    "<tool_call></think>",
    "<tool_call>",
    "<tool_call>{",
    '<tool_call>{"name": "',
    "<tool_call><function=f><parameter=x>",
    "<function=f>",
    "<function=",
    "<parameter=x>",
    "<f>",
    "<f><g>",
    "<f></g>",
    "<f><x></f>",
    "<",
    "<a",
    "Action: f[",
    "Action: f]",
    "Action: f\n",
    "Action Input:\n",
    "Action",
    "\n",
    " ",
    "]",
    "a",
    '{"',
    "[",
    '<tool_call>"\\',
]


@pytest.mark.parametrize("size", [50_000, pytest.param(1_000_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("start", ["", "<tool_call>", "<think>", "<f><x>", "Action: f\n"])
def test_hostile_text_is_parsed_in_linear_time(start, size):
    """Processor time of at most 40 us a character, ten times what is usual, at any length."""
    names = "".join(f"<t{i}>" for i in range(size // 8))  # as many names as tags
    for text in [start + part * (size // len(part)) for part in REPEATED] + [start + names]:
        begin = time.process_time()
        parse_tool_calls(text)
        assert time.process_time() - begin < 40e-6 * size, text[:40]
