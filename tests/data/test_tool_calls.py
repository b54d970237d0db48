"""Tool calls in text: each format, several calls, and text that was written to break a parser."""

import functools
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
from twinkle_jax.data.tool_calls import ANY_FORMAT, TEMPLATE_FORMATS, TOOL_CALL_FORMATS


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


BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MANY, DONE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def v3(name, arguments):
    return f"{BEGIN}function{SEP}{name}\n```json\n{arguments}\n```{END}"


@pytest.mark.parametrize(
    ("tool_format", "text", "calls", "content"),
    [
        ("llama", '{"name": "f", "parameters": {"x": 1}}', [("f", {"x": 1})], ""),
        ("llama", '{"type": "function", "name": "f",\n "parameters": {}}', [("f", {})], ""),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {"x": {}}}', [("f", {"x": {}})], ""),
        ("llama", '<|python_tag|> {"parameters": {"x": 1}, "name": "f"}', [("f", {"x": 1})], ""),
        ("llama", '<|python_tag|>{"name": "f", "arguments": {"x": 1}}', [("f", {"x": 1})], ""),
        (
            "llama",
            '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}',
            [("f", {"x": 1}), ("g", {})],
            "",
        ),
        ("llama", 'So: {"name": "f", "parameters": {"x": "}"}}', [("f", {"x": "}"})], "So:"),
        ("llama", '{"name": "Ada", "age": 3}', [], '{"name": "Ada", "age": 3}'),
        ("llama", '{"name": "f"}', [], '{"name": "f"}'),
        ("llama", "f({x: 1})", [], "f({x: 1})"),
        (
            "llama",  # of the arguments nothing is a call
            '{"name": "f", "parameters": {"name": "g", "parameters": {"x": 1}}}',
            [("f", {"name": "g", "parameters": {"x": 1}})],
            "",
        ),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]',
            [("f", {"x": 1}), ("g", {})],
            "",
        ),
        ("mistral", 'So: [TOOL_CALLS][{"name": "f", "arguments": "{}"}]', [("f", {})], "So:"),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', [("f", {})], ""),
        (
            "mistral",
            '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g-2.h[ARGS]{}',
            [("f", {"x": 1}), ("g-2.h", {})],
            "",
        ),
        ("mistral", '[TOOL_CALLS]f{"x": 1}[TOOL_CALLS] g {}', [("f", {"x": 1}), ("g", {})], ""),
        (
            "mistral",
            'So: [TOOL_CALLS]f[ARGS]{"x": "[TOOL_CALLS]g[ARGS]{}"}',
            [("f", {"x": "[TOOL_CALLS]g[ARGS]{}"})],
            "So:",
        ),
        ("mistral", '[{"name": "f", "arguments": {}}]', [], '[{"name": "f", "arguments": {}}]'),
        (
            "deepseek",
            "So: " + MANY + v3("f", '{"x": 1}') + "\n" + v3("g", "{}") + DONE,
            [("f", {"x": 1}), ("g", {})],
            "So:",
        ),
        ("deepseek", v3("f", f'{{"x": "{END}"}}'), [("f", {"x": END})], ""),
        ("deepseek", f'{MANY}{BEGIN}function{SEP}f\n```json\n{{"x": 1}}', [("f", {"x": 1})], ""),
        (
            "deepseek",  # V3.1
            f'{MANY}{BEGIN}f{SEP}{{"x": 1}}{END}{BEGIN}g{SEP}{{}}{END}{DONE}',
            [("f", {"x": 1}), ("g", {})],
            "",
        ),
        ("deepseek", f"{MANY}{BEGIN}function{SEP}{{}}{END}{DONE}", [("function", {})], ""),
        ("deepseek", '```json\n{"x": 1}\n```', [], '```json\n{"x": 1}\n```'),
        (
            "harmony",
            "<|channel|>analysis<|message|>I call to=functions.g.<|start|>assistant<|channel|>"
            'commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>',
            [("f", {"x": 1})],
            "<|channel|>analysis<|message|>I call to=functions.g.",
        ),
        (
            "harmony",
            ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}',
            [("f", {"x": 1})],
            "",
        ),
        ("harmony", "<|channel|>analysis to=f code<|message|>{}", [("f", {})], ""),
        (
            "harmony",
            "<|channel|>final<|message|>Send it to=functions.f {}",
            [],
            "<|channel|>final<|message|>Send it to=functions.f {}",
        ),
        (
            "gemma",
            'So: <|tool_call>call:f{x:<|"|>a:{1}, "b"\n<tool_call|><|"|>,y:[1,-2.5,true],'
            'z:{<|"|>k 1<|"|>:None,k2:<|"|><|"|>}}<tool_call|><|tool_call>call:g{}<tool_call|>',
            [
                (
                    "f",
                    {
                        "x": 'a:{1}, "b"\n<tool_call|>',
                        "y": [1, -2.5, True],
                        "z": {"k 1": None, "k2": ""},
                    },
                ),
                ("g", {}),
            ],
            "So:",
        ),
        ("gemma", "call:f{x:1}", [], "call:f{x:1}"),
    ],
)
def test_forms_of_chat_templates(tool_format, text, calls, content):
    """Among them are the examples of vLLM's tests and of the models' cards."""
    parsed = parse_tool_calls(f"{text}\n", tool_format)
    assert [tuple(x["function"].values()) for x in parsed.calls] == calls
    assert not parsed.errors and parsed.content == content
    assert parse_tool_calls(text).calls == []  # only where the template writes them


def test_ids_of_mistral():
    text = '[TOOL_CALLS] [{"name": "f", "id": "abcDEF123"}, {"name": "g", "id": "call_12345"}]'
    assert parse_tool_calls(text, "mistral").calls == [call("f") | {"id": "abcDEF123"}, call("g")]
    (one,) = parse_tool_calls("[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{}", "mistral").calls
    assert one == call("f") | {"id": "abcDEF123"}


@pytest.mark.parametrize(
    ("tool_format", "text", "reason", "good"),
    [
        ("llama", '{"name": "f", "parameters": {"x": 1}', "Expecting", 0),
        ("llama", '{"name": "f", "parameters": [1]}', "arguments must be a JSON object", 0),
        ("llama", '{"name": "", "parameters": {}}', "a call must have a name", 0),
        ("llama", '{"name": "f", "parameters": {}, "name": "g"}', "duplicate key 'name'", 0),
        ("llama", '<|python_tag|>__import__("os").system("ls")', "Expecting", 0),
        ("llama", '<|python_tag|>f.call(x="1")', "Expecting", 0),
        ("llama", '<|python_tag|>{"name": "f", "x": 1}', "as 'parameters', got 'x'", 0),
        ("mistral", '[TOOL_CALLS] [{"name": "f"', "Expecting", 0),
        ("mistral", "[TOOL_CALLS] []", "a list of calls must not be empty", 0),
        ("mistral", "[TOOL_CALLS]", "Expecting", 0),
        ("mistral", "[TOOL_CALLS]f[ARGS]", "Expecting", 0),
        ("mistral", "[TOOL_CALLS]f[ARGS](x=1)", "Expecting", 0),
        ("mistral", "[TOOL_CALLS]f[ARGS][1]", "arguments must be a JSON object", 0),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": NaN}', "NaN", 0),
        ("mistral", '[TOOL_CALLS] [{"nom": "f"}, {"name": "g"}]', "'arguments', got 'nom'", 1),
        ("mistral", '[TOOL_CALLS] ["f", {"name": "g"}]', "a call must be a JSON object", 1),
        ("mistral", "[TOOL_CALLS]" + "[" * 90_000, "nested too deeply", 0),
        ("deepseek", MANY + v3("f", '{"x": ') + v3("g", "{}") + DONE, "Expecting", 1),
        ("deepseek", f"{MANY}{v3('f', '{} {}')}{v3('g', '{}')}{DONE}", "must end after", 1),
        ("deepseek", f"{MANY}{v3('', '{}')}{v3('g', '{}')}{DONE}", "a call must have a name", 1),
        ("deepseek", f"{MANY}{BEGIN}f{END}{v3('g', '{}')}{DONE}", "Expecting", 1),
        ("deepseek", f"{MANY}f()", "Expecting", 0),
        ("harmony", "<|start|>assistant to=f<|message|>x = 1<|call|>", "Expecting", 0),
        ("harmony", "<|start|>assistant to=f<|message|>{} {}<|call|>", "must end after", 0),
        ("gemma", "<|tool_call>call:f{x:1}", "must end with <tool_call|>", 0),
        ("gemma", '<|tool_call>call:f{x:<|"|>1}<tool_call|>', "must end with <tool_call|>", 0),
        (
            "gemma",
            "<|tool_call>call:f{x:}<tool_call|><|tool_call>call:g{}<tool_call|>",
            "Expecting",
            1,
        ),
        ("gemma", "<|tool_call>call:f{x:1,x:2}<tool_call|>", "duplicate key 'x'", 0),
        ("gemma", "<|tool_call>call:f[1]<tool_call|>", "arguments must be a JSON object", 0),
    ],
)
def test_broken_calls_in_forms_of_chat_templates(tool_format, text, reason, good):
    parsed = parse_tool_calls(f"So: {text}", tool_format)
    assert parsed.calls == [call("g")] * good
    (error,) = parsed.errors
    assert reason in error.reason and len(error.reason) <= 200
    assert text.startswith(error.text) and len(error.text) <= 200
    assert parsed.content == "So:"


def test_a_broken_call_has_the_name_of_its_function_where_it_can_be_read():
    for text in ("[TOOL_CALLS]f[ARGS]{", "[TOOL_CALLS]f[ARGS][1]"):
        assert [error.name for error in parse_tool_calls(text, "mistral").errors] == ["f"]
    assert parse_tool_calls("[TOOL_CALLS] [{", "mistral").errors[0].name == ""


def test_after_64_broken_calls_the_rest_is_text():
    """Each error may cost as much time as the whole text."""
    broken = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{<｜tool▁call▁end｜>"
    calls, errors, content = parse_tool_calls(broken * 66, "deepseek")
    assert (len(calls), len(errors), content) == (0, 64, broken * 2)


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
    own = '[TOOL_CALLS]f[ARGS]{"x": "<g><y>1</y></g>"}'
    assert parse_tool_calls(own, ("mistral", "cline")).calls == [call("f", x="<g><y>1</y></g>")]
    assert parse_tool_calls(cline, ("mistral", "cline")).calls == [call("g", y="1")]


CALLS = {
    "hermes_qwen": '<tool_call>{"name": "f", "arguments": {"x": "1"}}</tool_call>',
    "cline": "<f><x>1</x></f>",
    "react": '\nAction: f\nAction Input: {"x": "1"}\n',
    "llama": '{"name": "f", "parameters": {"x": "1"}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"x": "1"}}]',
    "deepseek": MANY + v3("f", '{"x": "1"}') + DONE,
    "harmony": '<|start|>assistant to=functions.f<|message|>{"x": "1"}<|call|>',
    "gemma": '<|tool_call>call:f{"x": "1"}<tool_call|>',
    "glm": '<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>"1"</arg_value>\n</tool_call>',
}
CALLS_OF_G = {
    "hermes_qwen": CALLS["hermes_qwen"].replace('"f"', '"g"'),
    "cline": "<g><x>1</x></g>",
    "react": CALLS["react"].replace("f", "g"),
    "llama": CALLS["llama"].replace('"f"', '"g"'),
    "mistral": '[TOOL_CALLS]g[ARGS]{"x": "1"}',
    "deepseek": CALLS["deepseek"].replace(f"{SEP}f", f"{SEP}g"),
    "harmony": CALLS["harmony"].replace("functions.f", "functions.g"),
    "gemma": CALLS["gemma"].replace("call:f", "call:g"),
    "glm": CALLS["glm"].replace(">f\n", ">g"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("any_format", [False, True])
def test_thinking_holds_no_calls(name, any_format):
    def parse(text, **options):
        everything = (name, *ANY_FORMAT) if name in TEMPLATE_FORMATS else "any"
        return parse_tool_calls(text, everything if any_format else name, **options)

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


@pytest.mark.parametrize(
    ("tool_format", "thinks", "ends"),
    [
        ("harmony", "<|channel|>analysis<|message|>", ""),
        ("gemma", "<|channel>thought\n", "<channel|>"),
        ("hermes_qwen", "<seed:think>", "</seed:think>"),
    ],
)
def test_thinking_in_other_words_holds_no_calls(tool_format, thinks, ends):
    """And what follows it does; thinking that is not closed goes on to the end."""
    names = (tool_format, *ANY_FORMAT)
    own, react = CALLS_OF_G[tool_format], "\nAction: f[1]\n"
    for thought in (react, CALLS["hermes_qwen"], CALLS["cline"]):
        text = f"{thinks}{thought}{ends}"
        assert parse_tool_calls(text, names) == ([], [], text.rstrip())
        assert parse_tool_calls(f"{thinks}{thought}", names).calls == []
        parsed = parse_tool_calls(f"{text}{own}", names)
        assert parsed == ([call("g", x="1")], [], text.rstrip())


def test_tags_of_thinking_in_a_call_are_its_arguments():
    for value in ("<think>", "</think>", "</think> <think>"):
        text = f'<tool_call>{{"name": "f", "arguments": {{"x": "{value}"}}}}</tool_call>'
        for around in (text, f"<think>?</think>{text}", f"{text}<think>{text}</think>"):
            assert parse_tool_calls(around).calls == [call("f", x=value)]
        for name in TEMPLATE_FORMATS:
            text = CALLS[name].replace('"1"', f'"{value}"')
            for around in (text, f"<think>?</think>{text}", f"{text}<think>{text}</think>"):
                assert parse_tool_calls(around, name).calls == [call("f", x=value)]
        quoted = f'<|tool_call>call:f{{x:<|"|>{value}<|"|>}}<tool_call|>'
        for around in (quoted, f"<think>?</think>{quoted}", f"{quoted}<think>{quoted}</think>"):
            assert parse_tool_calls(around, "gemma").calls == [call("f", x=value)]
    parsed = parse_tool_calls(f"I could <tool_call> it.</think>{CALLS['hermes_qwen']}")
    assert parsed.calls == [call("f", x="1")] and not parsed.errors
    parsed = parse_tool_calls(f"I could [TOOL_CALLS] it.</think>{CALLS['mistral']}", "mistral")
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
    "<|python_tag|>",
    '{"name": "f", "parameters": {',
    "[TOOL_CALLS]",
    "f[ARGS]",
    "[CALL_ID]",
    MANY,
    BEGIN,
    SEP,
    END,
    "<|start|>",
    "<|channel|>analysis",
    " to=functions.f",
    "<|message|>",
    "<|call|>",
    "<|tool_call>call:f{",
    "<tool_call|>",
    '<|"|>',
    "x:",
    "<|channel>",
    "<channel|>",
    "\n```json\n",
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
        names = [*TEMPLATE_FORMATS, "any"]
        parses = [functools.partial(parse_tool_calls, tool_format=name) for name in names]
        for parse in (*TOOL_CALL_FORMATS.values(), *parses):
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


@pytest.mark.slow
@pytest.mark.parametrize("size", [50_000, pytest.param(1_000_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("start", ["", "<tool_call>", "<think>", "<f><x>", "Action: f\n"])
def test_hostile_text_is_parsed_in_linear_time(start, size):
    """Processor time of at most 40 us a character, ten times what is usual, at any length."""
    names = "".join(f"<t{i}>" for i in range(size // 8))  # as many names as tags
    for text in [start + part * (size // len(part)) for part in REPEATED] + [start + names]:
        begin = time.process_time()
        parse_tool_calls(text)
        assert time.process_time() - begin < 40e-6 * size, text[:40]


# The same for calls in forms of chat templates.
REPEATED_FORMS = {
    "llama": [
        "<|python_tag|>",
        "<|python_tag|>{",
        '{"name": "f", "parameters": {"x":',
        '{"name": "f", "parameters": {}}',
        '{"name": "f", "parameters": }',
        '{"name": "',
        '{"type":',
        "{ ",
        ";",
    ],
    "mistral": [
        "[TOOL_CALLS]",
        "[TOOL_CALLS][",
        "[TOOL_CALLS]f",
        "[TOOL_CALLS]f[ARGS]{}",
        "[ARGS]",
    ],
    "deepseek": [
        MANY,
        BEGIN,
        f"{BEGIN}{END}",
        f"{BEGIN}f{SEP}",
        f"{BEGIN}function{SEP}f\n",
        v3("f", "{}"),
        v3("f", '{"'),
        v3("f", '["","'),
        f"{BEGIN}f{SEP}{{}}",
    ],
    "harmony": [
        "<|start|>",
        "<|start|>to=",
        "<|start|>to=f<|message|>",
        "<|start|>to=f<|message|>{}",
        '<|start|>to=f<|message|>{"x": "',
        "to=f",
        "<|channel|>",
        "<|channel|>analysis<|message|>",
    ],
    "gemma": [
        "<|tool_call>call:",
        "<|tool_call>call:f{",
        "<|tool_call>call:f{x:1}<tool_call|>",
        '<|tool_call>call:f{<|"|>',
        '<|"|>',
        "{x",
        ",x:None",
        "<|channel>",
    ],
    "glm": [
        "<tool_call>",
        "<tool_call>f</tool_call>",
        "<tool_call>f<arg_key>",
        "<arg_key>",
        "<arg_key>x</arg_key>",
        "<arg_key>x</arg_key><arg_value>",
        "<arg_key>x</arg_key><arg_value>1</arg_value>",
        "</arg_value>",
    ],
}


@pytest.mark.parametrize("size", [50_000, pytest.param(1_000_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("tool_format", REPEATED_FORMS)
def test_hostile_text_in_forms_of_chat_templates_is_parsed_in_linear_time(tool_format, size):
    """As above."""
    parts = [*REPEATED_FORMS[tool_format], "<think>", "</think>", '"', "[", "\n", " ", "a"]
    for start in ("", REPEATED_FORMS[tool_format][0]):
        for part in parts:
            text = start + part * (size // len(part))
            begin = time.process_time()
            parse_tool_calls(text, tool_format)
            assert time.process_time() - begin < 40e-6 * size, text[:40]


@pytest.mark.parametrize("tool_format", ["hermes", ["react", "hermes"]])
def test_unknown_formats_are_named(tool_format):
    with pytest.raises(ValueError, match=r"tool_format .*hermes_qwen.* got 'hermes'"):
        parse_tool_calls("nothing", tool_format)


def test_calls_of_glm():
    def parse(text):
        return parse_tool_calls(text, "glm")

    def arguments(*pairs):
        return "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs
        )

    pairs = (("a", "two\nlines "), ("b", '{"c": [1]}'), ("d", "007"), ("e", ""), ("f", "<think>"))
    expected = call("f", a="two\nlines ", b={"c": [1]}, d="007", e="", f="<think>")
    text = f"So.\n<tool_call>f\n{arguments(*pairs)}</tool_call>"
    assert parse(text) == ([expected], [], "So.")
    both = parse(f"{text}\n<tool_call>now</tool_call>")
    assert both == ([expected, call("now")], [], "So.")
    for unclosed in (f"<tool_call>f\n{arguments(('x', 1))}", "<tool_call>f"):
        assert [error.text for error in parse(unclosed).errors] == [unclosed]  # there may be more
    for broken in (
        "",
        "two words",
        '{"name": "f", "arguments": {}}',
        "f<arg_key>x",
        "f<arg_key>x</arg_key>",
        "f<arg_key>x</arg_key><arg_value>1",
        "f<arg_key>x</arg_key>: <arg_value>1</arg_value>",
        f"f{arguments(('x', 1))} and {arguments(('y', 1))}",
        f"f{arguments(('x', 1), ('x', 2))}",
        f"{arguments(('x', 1))}",
    ):
        calls, errors, rest = parse(f"<tool_call>{broken}</tool_call>")
        assert (calls, rest, len(errors)) == ([], "", 1), broken
    assert parse_tool_calls(text).calls == []  # in another policy's text they are errors
