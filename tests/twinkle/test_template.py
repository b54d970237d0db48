"""Templates by name, and the parsers of tool calls."""

import json

import numpy as np
import pytest

from twinkle_jax.data import small_tokenizer
from twinkle_jax.twinkle.template import (
    HermesQwenParser,
    Qwen3_5Template,
    Template,
    ToolCallParser,
    ToolCallRegistry,
)

CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
THINKING = "{% if enable_thinking %}1{% else %}2{% endif %}{% if extra %}3{% endif %}"


def prompt(text):
    return {"messages": [{"role": "user", "content": text}]}


def test_features_have_twinkles_keys():
    template = Qwen3_5Template(model_id=small_tokenizer("12"))
    feature = template.encode(prompt("12"), add_generation_prompt=True)
    assert feature["attention_mask"].tolist() == [1] * 5 and feature["length"] == 5
    assert feature["position_ids"].tolist() == list(range(5))
    longer = template.concat_input_feature(feature, [5])
    assert longer["length"] == 6 and longer["position_ids"].tolist() == list(range(6))
    assert template.decode(np.asarray([feature["input_ids"][1]])) == "1"
    ids = feature["input_ids"]
    assert template.batch_decode([ids]) == ["<|user|>12<|end|><|assistant|>"]  # as in transformers
    assert template.batch_decode([ids], skip_special_tokens=True) == ["12"]


def test_what_the_chat_template_is_told():
    tokenizer = small_tokenizer("123")
    tokenizer.chat_template = THINKING
    for options, text in (
        ({}, "1"),
        ({"enable_thinking": False}, "2"),
        ({"extra": True}, "13"),
        ({"chat_template": "{{ messages[0].content }}23"}, "123"),
    ):
        template = Template(tokenizer, **options)
        assert template.decode(template.encode(prompt("1"), True)["input_ids"]) == text


def test_key_rounds_have_labels():
    turns = [{"role": role, "content": role[0]} for role in ("user", "assistant") * 2]
    template = Template(small_tokenizer())
    for rounds, count in (([3], 1), ("[1, 3]", 2), ([0], 0), ([], 2)):
        row = {"messages": turns, "user_data": [("key_rounds", rounds)]}
        labels = template.encode(row)["labels"]
        assert template.decode(labels[labels >= 0]) == "a<|end|>" * count


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x":1}'])
def test_json_of_arguments_is_decoded(arguments):
    source = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    template = Template(small_tokenizer(), chat_template=source)
    calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
    for written in (calls, json.dumps(calls)):
        messages = [{"role": "assistant", "content": "", "tool_calls": written}]
        ids = template.encode({"messages": messages}, add_generation_prompt=True)["input_ids"]
        assert template.decode(ids) == 'f{"x": 1}'


@pytest.mark.parametrize("call", [{"name": "f", "arguments": "{}"}, "f", {"function": "f"}])
def test_calls_without_a_function_are_left_to_the_chat_template(call):
    source = "{% for m in messages %}{{ m.tool_calls[0] | tojson }}{% endfor %}"
    template = Template(small_tokenizer(), chat_template=source)
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    ids = template.encode({"messages": messages}, add_generation_prompt=True)["input_ids"]
    assert template.decode(ids) == json.dumps(call)


def test_check():
    template = Template(small_tokenizer("12"), max_length=5)
    good = prompt("1")
    assert template.batch_check([good, prompt("1" * 9), {"messages": []}]) == [good, None, None]


def test_sampled_messages_have_their_tool_calls():
    """`ToolExploreReward` counts turns that have them: of the raw text it counted none."""
    template = Template(small_tokenizer())
    prompt = template.encode({"messages": [{"role": "user", "content": "?"}]}, True)
    for text, content, count in ((f"So: {CALL}", "So:", 1), ("Paris", "Paris", 0)):
        tokens = [*template.tokenizer.encode(text), 1]
        feature = template.concat_input_feature(prompt, tokens)
        message = feature["messages"][-1]
        assert message["content"] == content and len(message.get("tool_calls", [])) == count
        assert list(feature["input_ids"][-len(tokens) :]) == tokens
        longer = template.extend_input_feature(feature, [{"role": "tool", "content": "1"}])
        assert len(longer["input_ids"]) > len(feature["input_ids"])


def test_parsers():
    first = ToolCallRegistry.detect_first(CALL)
    assert first.name == "hermes_qwen" and first.parse("a " + CALL)[0]["function"]["name"] == "f"
    assert first.clean("a " + CALL) == "a" and first.detect('<tool_call>{"name"')
    names = {"Action: f[1]": "react", "<f><x>1</x></f>": "cline"}
    for text, name in names.items():
        assert ToolCallRegistry.detect_first(text).name == name
    assert ToolCallRegistry.detect_first("") is None is ToolCallRegistry.detect_first("plain")

    class Other(ToolCallParser):
        name = "react"

    before = ToolCallRegistry.parsers()
    assert ToolCallRegistry.register(Other()) in before and ToolCallRegistry.parsers() == before


def test_calls_in_thinking_are_calls_as_they_are_of_twinkle():
    thought = f"<think>{CALL}</think>"
    assert HermesQwenParser().parse(thought) == Template(small_tokenizer()).parse_tool_call(thought)
    assert HermesQwenParser().parse(thought)[0]["function"]["name"] == "f"


def test_a_registered_parser_is_used(monkeypatch):
    class Shout(ToolCallParser):
        name = "shout"

        def detect(self, text):
            return "!" in text

        def parse(self, text):
            return [{"type": "function", "function": {"name": text.split("!")[1], "arguments": {}}}]

        def clean(self, text):
            return text.split("!")[0].rstrip()

    template = Template(small_tokenizer())
    monkeypatch.setattr(ToolCallRegistry, "_parsers", ToolCallRegistry.parsers())  # of this test
    assert template.parse_tool_call("run !go!") == []
    ToolCallRegistry.register(Shout())
    assert template.parse_tool_call("run !go!")[0]["function"]["name"] == "go"
    assert template.clean_tool_call("run !go!") == "run"
    assert template.clean_tool_call(None) == "" and template.parse_tool_call(None) == []
    assert template.parse_tool_call(CALL)[0]["function"]["name"] == "f"
