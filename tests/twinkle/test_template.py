"""Templates by name, and the parsers of tool calls."""

import numpy as np

from twinkle_jax.data import small_tokenizer
from twinkle_jax.twinkle.template import Qwen3_5Template, Template, ToolCallRegistry

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


def test_what_the_chat_template_is_told():
    tokenizer = small_tokenizer("123")
    tokenizer.chat_template = THINKING
    for options, text in (
        ({}, "1"),
        ({"enable_thinking": False}, "2"),
        ({"extra": True}, "13"),
    ):
        template = Template(tokenizer, **options)
        assert template.decode(template.encode(prompt("1"), True)["input_ids"]) == text


def test_parsers():
    first = ToolCallRegistry.detect_first(CALL)
    assert first.name == "hermes_qwen" and first.parse("a " + CALL)[0]["function"]["name"] == "f"
    assert first.clean("a " + CALL) == "a" and first.detect('<tool_call>{"name"')
    names = {"Action: f[1]": "react", "<f><x>1</x></f>": "cline"}
    for text, name in names.items():
        assert ToolCallRegistry.detect_first(text).name == name
    assert ToolCallRegistry.detect_first("") is None is ToolCallRegistry.detect_first("plain")
