"""The oracle: honest conversations have the token ids that transformers gives them."""

import json

import pytest

from tests.data.chats import chatml_tokenizer, llama_tokenizer
from twinkle_jax.data import Template, Tokenizer, small_tokenizer

transformers = pytest.importorskip("transformers", reason="pip install 'twinkle-jax[oracle]'")

CHATS = [
    [("user", "What is the sum of two and three?")],
    [("system", "Be brief. Use <think> tags."), ("user", " 2 + 3 =\n\n"), ("assistant", "\n5 ")],
    [("user", ""), ("assistant", "naïve café 你好 🙂"), ("user", "\n\nx"), ("assistant", "")],
    [("user", "> quoted <"), ("assistant", "<think>\n2\n</think>\n\n5"), ("user", "a < b > c")],
    [("user", "call"), ("assistant", "<tool_call>{}</tool_call>"), ("tool", "The answer is 5.")],
]


@pytest.mark.parametrize("make", [chatml_tokenizer, llama_tokenizer, small_tokenizer])
@pytest.mark.parametrize("prompt", [False, True])
def test_ids_are_those_of_transformers(make, prompt, tmp_path):
    make().save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    template = Template(tmp_path, chat_template=None)
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        if prompt or not any("</think>" in content for _, content in chat):
            ours = template.encode({"messages": messages}, add_generation_prompt=prompt)
            expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt)
            assert ours["input_ids"].tolist() == list(expected["input_ids"])


@pytest.mark.parametrize("make", [chatml_tokenizer, llama_tokenizer])
def test_plain_text(make, tmp_path):
    make().save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)("The answer is 5.")["input_ids"]
    template = Template(tmp_path, use_chat_template=False)
    for prompt in (False, True):
        messages = [{"role": "user", "content": "The answer is 5."}]
        ours = template.encode({"messages": messages}, add_generation_prompt=prompt)
        assert ours["input_ids"].tolist() == theirs
        assert ours["labels"].tolist()[:-1] == ([-100] * len(theirs[1:]) if prompt else theirs[1:])


def test_plain_text_that_the_tokenizer_ends(tmp_path):
    """The end is learnt, and a prompt does not have it: something is to follow."""
    from tokenizers import processors

    tokenizer = llama_tokenizer()
    start, end = "<|begin_of_text|>", "<|eot_id|>"
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}",
        special_tokens=[(token, tokenizer.backend.token_to_id(token)) for token in (start, end)],
    )
    tokenizer.save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)("The answer is 5.")["input_ids"]
    template = Template(tmp_path, use_chat_template=False)
    trajectory = {"messages": [{"role": "user", "content": "The answer is 5."}]}
    learnt = template.encode(trajectory)
    assert learnt["input_ids"].tolist() == theirs
    assert learnt["labels"].tolist() == [*theirs[1:], -100]
    prompt = template.encode(trajectory, add_generation_prompt=True)
    assert prompt["input_ids"].tolist() == theirs[:-1]


def test_tools(tmp_path):
    chatml_tokenizer().save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "Add 2 and 3"}]
    tools = [{"tool_name": "add", "description": "Adds – naïvely", "parameters": '{"x": "int"}'}]
    ours = Template(tmp_path).encode({"messages": messages, "tools": tools})
    expected = theirs.apply_chat_template(messages, tools=tools)
    assert ours["input_ids"].tolist() == list(expected["input_ids"])


def test_a_template_for_conversations_with_tools(tmp_path):
    tokenizer = small_tokenizer()
    texts = {"default": "\n{{ messages[0].content }}\n ", "tool_use": "\n{{ tools }}\n\n"}
    named = [{"name": name, "template": text} for name, text in texts.items()]
    config = {**tokenizer.config, "chat_template": named}
    Tokenizer(tokenizer.backend, config).save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "Add 2 and 3"}]
    for tools in (None, [{"name": "add"}]):
        ours = Template(tmp_path).encode({"messages": messages, "tools": tools}, True)
        expected = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
        assert ours["input_ids"].tolist() == list(expected["input_ids"])


def test_templates_that_have_files(tmp_path):
    """As transformers writes them: `chat_template.jinja`, and the others in a directory."""
    small_tokenizer().save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools }}"}
    theirs.save_pretrained(tmp_path)
    assert (tmp_path / "additional_chat_templates/tool_use.jinja").is_file()
    messages = [{"role": "user", "content": "Add 2 and 3"}]
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    for tools in (None, [{"name": "add"}]):
        ours = Template(tokenizer).encode({"messages": messages, "tools": tools}, True)
        expected = theirs.apply_chat_template(messages, tools=tools)
        assert ours["input_ids"].tolist() == list(expected["input_ids"])
    tokenizer.save_pretrained(tmp_path)  # over those files
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again.chat_template == theirs.chat_template
    small_tokenizer().save_pretrained(tmp_path)  # another one's do not stay
    assert Tokenizer.from_pretrained(tmp_path).chat_template == small_tokenizer().chat_template


def test_tags_that_are_special_tokens(tmp_path):
    """As in Hermes: its calls were left out of the text, and its messages spelled tags as text."""
    from tokenizers import Tokenizer as Backend

    contents = json.loads(chatml_tokenizer().backend.to_str())
    for token in contents["added_tokens"]:
        token["special"] = True
    Tokenizer(Backend.from_str(json.dumps(contents)), chatml_tokenizer().config).save_pretrained(
        tmp_path
    )
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    template = Template(tmp_path)
    call = '<think>5?</think><tool_call>{"name": "add"}'
    messages = [{"role": "user", "content": "Add"}, {"role": "assistant", "content": call}]
    ours = template.encode({"messages": messages})["input_ids"].tolist()
    assert ours == list(theirs.apply_chat_template(messages)["input_ids"])
    sampled = ours[ours.index(theirs.convert_tokens_to_ids("<think>")) :]
    assert template.tokenizer.decode(sampled) == f"{call}\n"  # without <|im_end|>
    asked = template.encode({"messages": [{"role": "user", "content": call}]})
    for tag in ("<think>", "</think>", "<tool_call>"):
        assert ours.count(theirs.convert_tokens_to_ids(tag)) == 1
        assert theirs.convert_tokens_to_ids(tag) not in asked["input_ids"].tolist()


@pytest.mark.parametrize("make", [chatml_tokenizer, llama_tokenizer, small_tokenizer])
def test_text_and_special_tokens_are_read_alike(make, tmp_path):
    make().save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_pretrained(tmp_path)
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.bos_token_id == theirs.bos_token_id
    assert len(ours) == len(theirs)
    for text in ("The answer is 5.", " naïve\n\n", "你好 🙂", "<tool_call>"):
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids) == text
