"""What can be asked of the example without the package that has the weights."""

import json

import pytest

from tests.examples import FOLDER, load
from tests.model.families import family

EXAMPLE = load("real_model")


def answers(*texts):
    return [{"messages": [{"role": "assistant", "content": text}]} for text in texts]


def test_the_reward_is_the_first_number():
    texts = (" 7\n5 + 6 =", "12", " 78", "It is 7.", "5, no, 7", "-7", "seven", "")
    expected = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert EXAMPLE.first_number(answers(*texts), ["7"] * len(texts)) == expected


def test_the_command_finds_the_reward():
    from twinkle_jax.reward import find_reward

    reward = find_reward(f"{FOLDER / 'real_model.py'}:first_number")
    assert reward(answers(" 12 and"), ["12"]) == [1.0]


def test_the_sums_are_all_there_and_none_is_both_trained_on_and_judged_by(tmp_path):
    from twinkle_jax.data import read_jsonl

    EXAMPLE.write_sums(tmp_path)
    train, held_out = (read_jsonl(tmp_path / f"{name}.jsonl") for name in ("train", "held_out"))
    assert (len(train), len(held_out)) == (65, 16)
    prompts = [x["messages"][0]["content"] for x in [*train, *held_out]]
    assert set(prompts) == {f"{a} + {b} =" for a in range(1, 10) for b in range(1, 10)}
    for x in train:
        a, b = x["messages"][0]["content"].removesuffix(" =").split(" + ")
        assert x["user_data"] == [("ground_truth", str(int(a) + int(b)))]


def test_a_prompt_is_the_beginning_of_a_text():
    from twinkle_jax.data import Template, small_tokenizer

    template = Template(small_tokenizer(), chat_template=EXAMPLE.CHAT_TEMPLATE)
    message = {"role": "user", "content": "3+4="}
    ids = template.encode({"messages": [message]}, add_generation_prompt=True)["input_ids"]
    assert template.tokenizer.decode(ids.tolist(), skip_special_tokens=False) == "3+4="


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_logits_are_compared(tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install 'twinkle-jax[oracle]'")
    config = transformers.AutoConfig.for_model(**family("gemma3_text"))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    rows = [[5, 6, 7, 8, 9], [10]]
    assert EXAMPLE.compare_logits(tmp_path, rows) < 1e-5
    written = json.loads((tmp_path / "config.json").read_text())
    written["sliding_window"] = 4  # both read the same file, so both slide alike
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert EXAMPLE.compare_logits(tmp_path, rows) < 1e-5
