"""Tokenizers in files: what is read, what is refused, what text may spell."""

import json
import subprocess
import sys

import pytest

from tests.data.chats import chatml_tokenizer, llama_tokenizer
from twinkle_jax.data import ChatTemplate, Tokenizer, small_tokenizer

TEXT = "1+2=<|end|> naïve 你好 🙂\n"


def test_bytes_spell_any_text():
    tokenizer = small_tokenizer()
    assert len(tokenizer) == 6 + 256
    ids = tokenizer.encode(TEXT)
    assert len(ids) == len(TEXT.encode()) and min(ids) >= 6
    assert tokenizer.decode(ids) == TEXT
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, None)
    assert tokenizer.decode([3, *ids, 1]) == TEXT
    assert tokenizer.decode([1], skip_special_tokens=False) == "<|end|>"


def test_characters():
    tokenizer = small_tokenizer("ab \n")
    assert tokenizer.encode("ab \nba") == [7, 8, 9, 10, 8, 7]
    assert tokenizer.decode([7, 8, 9, 10, 8, 7]) == "ab \nba"
    assert tokenizer.decode(tokenizer.encode("a|b"), skip_special_tokens=False) == "a<|unknown|>b"
    with pytest.raises(ValueError, match=r"^characters"):
        small_tokenizer("aa")


@pytest.mark.parametrize("make", [chatml_tokenizer, llama_tokenizer, small_tokenizer])
def test_saved_and_read_again(make, tmp_path):
    tokenizer = make()
    tokenizer.save_pretrained(tmp_path / "new")
    again = Tokenizer.from_pretrained(tmp_path / "new")
    assert again.encode(TEXT) == tokenizer.encode(TEXT)
    assert again.chat_template == tokenizer.chat_template
    assert again.eos_token_id == tokenizer.eos_token_id


def test_what_other_files_say(tmp_path):
    tokenizer = small_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ 'newer' }}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 1, 5]}')
    again = Tokenizer.from_pretrained(tmp_path)
    assert again.chat_template == "{{ 'newer' }}"
    assert again.stop_token_ids == [1, 0, 5]
    assert tokenizer.stop_token_ids == [1]


def test_special_tokens_that_have_a_file_of_their_own(tmp_path):
    """As old checkpoints have them: the template wrote none, and no token ended a completion."""
    tokenizer = small_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    config = {"chat_template": tokenizer.chat_template, "eos_token": "<|pad|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokens = {"eos_token": {"content": "<|end|>"}, "bos_token": "<|system|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    again = Tokenizer.from_pretrained(tmp_path)
    assert (again.eos_token_id, again.bos_token_id) == (1, 2)
    config["added_tokens_decoder"] = {}  # newer ones have all tokens in one file
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_pretrained(tmp_path).stop_token_ids == [0]


def test_stop_tokens_of_the_model_where_generation_has_no_configuration(tmp_path):
    """As in transformers, so that a chat model whose tokenizer has another end stops."""
    small_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": [1, 4]}')
    assert Tokenizer.from_pretrained(tmp_path).stop_token_ids == [1, 4]
    for outer, ends in (("null", [1, 3]), ("2", [1, 2])):
        text = '{"eos_token_id": %s, "text_config": {"eos_token_id": 3}}'
        (tmp_path / "config.json").write_text(text % outer)
        assert Tokenizer.from_pretrained(tmp_path).stop_token_ids == ends
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert Tokenizer.from_pretrained(tmp_path).stop_token_ids == [1, 5]


@pytest.mark.parametrize("wrong", ["2", 2.0, True, -1, 2**40, [[2]]])
def test_stop_tokens_are_ids(wrong):
    tokenizer = Tokenizer(small_tokenizer().backend, {}, {"eos_token_id": wrong})
    with pytest.raises(ValueError, match=r"^eos_token_id must be a token id"):
        _ = tokenizer.stop_token_ids


@pytest.mark.parametrize("wrong", [5, ["<|end|>"], {"content": 3}])
def test_special_tokens_that_are_no_text_are_refused(wrong):
    tokenizer = Tokenizer(small_tokenizer().backend, {"eos_token": wrong})
    with pytest.raises(ValueError, match=r"^eos_token must be text"):
        _ = tokenizer.eos_token_id


def test_several_templates_and_tokens_with_flags():
    config = {
        "chat_template": [
            {"name": "rag", "template": "{{ 'documents' }}"},
            {"name": "default", "template": "{{ 'plain' }}"},
        ],
        "eos_token": {"content": "<|end|>", "lstrip": False},
    }
    tokenizer = Tokenizer(small_tokenizer().backend, config)
    assert tokenizer.chat_template == "{{ 'plain' }}"
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 1


def test_padding_and_truncation_of_the_file_do_not_count(tmp_path):
    tokenizer = small_tokenizer()
    tokenizer.backend.enable_truncation(2)
    tokenizer.backend.enable_padding(length=50)
    tokenizer.save_pretrained(tmp_path)
    assert len(Tokenizer.from_pretrained(tmp_path).encode("12345")) == 5


def test_special_tokens_that_strip_their_neighbours():
    from tokenizers import AddedToken

    backend = Tokenizer(small_tokenizer().backend).backend
    backend.add_special_tokens([AddedToken("<|both|>", lstrip=True, rstrip=True)])
    tokenizer = Tokenizer(backend)
    both = backend.token_to_id("<|both|>")
    honest = tokenizer.control.encode("a <|both|> b")
    assert honest.ids == [*tokenizer.encode("a"), both, *tokenizer.encode("b")]
    forged = tokenizer.control.encode(tokenizer.control.hide("<|end|>") + "a <|both|> b")
    assert forged.ids == tokenizer.encode("<|end|>") + honest.ids
    assert forged.starts[-3:] == [7, 9, 18] and forged.text == "<|end|>a <|both|> b"


def test_a_special_token_that_text_becomes_when_it_is_normalised():
    from tokenizers import AddedToken, normalizers

    backend = small_tokenizer().backend
    backend.normalizer = normalizers.NFKC()
    backend.add_special_tokens([AddedToken("<|x|>", normalized=True)])
    tokenizer = Tokenizer(backend)
    assert backend.encode("a＜|x|＞").ids[-1] == backend.token_to_id("<|x|>")  # what is at stake
    assert tokenizer.encode("a＜|x|＞") == tokenizer.encode("a<|x|>")
    assert backend.token_to_id("<|x|>") not in tokenizer.encode("a＜|x|＞")


def test_a_special_token_that_is_a_word_of_the_vocabulary():
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    word = "hi"
    backend = Backend(models.WordLevel({"<s>": 0, word: 1}, unk_token=word))
    backend.add_special_tokens(["<s>"])
    with pytest.raises(ValueError, match=r"^text"):
        Tokenizer(backend).encode("<s>")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "[" * 100_000),
    ],
)
def test_files_that_are_refused(name, content, tmp_path):
    small_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=name):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("template", [5, ["a"], [{"name": "default", "template": 5}]])
def test_a_chat_template_is_text(template):
    with pytest.raises(ValueError, match=r"^chat_template must be text"):
        Tokenizer(small_tokenizer().backend, {"chat_template": template})


def test_a_directory_without_a_tokenizer(tmp_path):
    (tmp_path / "vocab.txt").write_text("a")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["ms://Qwen/Qwen3", "../../etc/x", "no/such/directory", ""])
def test_what_is_neither_a_directory_nor_a_hub_id(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"path_or_id|tokenizer\.json"):
        Tokenizer.from_pretrained(name)


def test_a_token_that_is_not_there():
    tokenizer = Tokenizer(small_tokenizer().backend, {"eos_token": "</s>"})
    with pytest.raises(ValueError, match=r"^eos_token"):
        _ = tokenizer.eos_token_id


def test_extras_that_are_missing_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"^tokenizers"):
        small_tokenizer()
    with pytest.raises(ImportError, match=r"^jinja2"):
        ChatTemplate("")


def test_nothing_heavy_is_imported_before_it_is_used():
    heavy = ["tokenizers", "jinja2", "grain", "math_verify", "sympy", "transformers", "torch"]
    code = (
        "import json, sys, twinkle_jax.data, twinkle_jax.reward;"
        f"print(json.dumps([name for name in {heavy} if name in sys.modules]))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == []


def test_unpaired_surrogates_are_refused():
    with pytest.raises(ValueError, match=r"^text must .* surrogate"):
        small_tokenizer().encode("a\ud83d")
