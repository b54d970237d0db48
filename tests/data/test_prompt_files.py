"""Data sets in files: what is read, and which record is refused for what."""

import json

import pytest

from twinkle_jax.data import read_gsm8k, read_jsonl


def _write(path, *records):
    lines = [x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for x in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_prompts_and_answers(tmp_path):
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]
    path = _write(
        tmp_path / "data.jsonl",
        {"prompt": "naïve?", "answer": " yes ", "source": "me"},
        "",
        {"messages": turns, "answer": 4},
        {"prompt": "c", "answer": 0.5},
    )
    assert read_jsonl(path) == [
        {
            "messages": [{"role": "user", "content": "naïve?"}],
            "user_data": [("ground_truth", "yes"), ("source", "me")],
        },
        {"messages": turns, "user_data": [("ground_truth", "4")]},
        {
            "messages": [{"role": "user", "content": "c"}],
            "user_data": [("ground_truth", "0.5")],
        },
    ]
    first = read_jsonl(path, system="Be brief.")[0]["messages"]
    assert first[0] == {"role": "system", "content": "Be brief."} and len(first) == 2


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": "b"}\r\n')
    assert len(read_jsonl(path)) == 1


GOOD = {"prompt": "a", "answer": "b"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "must be JSON, got '{"),
        ("[" * 100_000, "must be JSON, got"),
        ("[1]", r"must be a JSON object, got '\[1\]"),
        ({"answer": "b"}, "must have a 'prompt' that is not empty, or 'messages', got answer='b'"),
        ({"prompt": "", "answer": "b"}, "must have a 'prompt' that is not empty"),
        ({"prompt": 5, "answer": "b"}, "must have a 'prompt' that is not empty"),
        ({"prompt": "a", "messages": [], "answer": "b"}, "must have a 'prompt'"),
        ({"messages": [], "answer": "b"}, "must have a 'prompt'"),
        ({"messages": ["a"], "answer": "b"}, "must have messages with a role of system, user"),
        ({"messages": [{"role": "me", "content": "a"}], "answer": "b"}, "must have messages with"),
        ({"messages": [{"role": "user"}], "answer": "b"}, "must have messages with a role"),
        (
            {"messages": [{"role": "assistant", "content": "a"}], "answer": "b"},
            "must end before the assistant answers",
        ),
        ({"prompt": "a"}, "must have an 'answer', text or a number, got None"),
        ({"prompt": "a", "answer": ["b"]}, r"must have an 'answer', text or a number, got \['b'\]"),
        ({"prompt": "a", "answer": True}, "must have an 'answer', text or a number, got True"),
        ({"prompt": "a", "answer": "  "}, "must have an 'answer' that can be read, got '  '"),
        ({"prompt": "a", "answer": "@"}, "must have an 'answer' that can be read, got '@'"),
    ],
)
def test_a_bad_record_is_named(record, message, tmp_path):
    path = _write(tmp_path / "data.jsonl", GOOD, "", record)
    with pytest.raises(ValueError, match=rf"data.jsonl, line 3: record 2 {message}"):
        read_jsonl(path, check_answer=lambda answer: answer != "@")


def test_an_empty_file(tmp_path):
    with pytest.raises(ValueError, match=r"data.jsonl must hold at least one record, got none"):
        read_jsonl(_write(tmp_path / "data.jsonl", ""))
    with pytest.raises(FileNotFoundError):
        read_jsonl(tmp_path / "none.jsonl")


def test_gsm8k(tmp_path):
    path = _write(
        tmp_path / "train.jsonl",
        {"question": "How many?", "answer": "He has 2*3=<<2*3=6>>6.\n#### 6"},
        {"question": " How much? ", "answer": "#### $ is\n#### -1,234.5"},
    )
    problems = read_gsm8k(path, system="s", instruction=" Answer after ####.")
    assert problems[0] == {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "How many? Answer after ####."},
        ],
        "user_data": [("ground_truth", "6"), ("solution", "He has 2*3=<<2*3=6>>6.")],
    }
    assert problems[1]["user_data"][0] == ("ground_truth", "-1234.5")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "a", "answer": "6"}, "must end its 'answer' with '#### number', got '6'"),
        ({"question": "a", "answer": "#### six"}, "must end its 'answer' with '#### number'"),
        ({"question": "a", "answer": "#### 6\nend"}, "must end its 'answer' with '#### number'"),
        ({"question": "a"}, "must have a 'question' and an 'answer', got question='a'"),
        ({"question": "", "answer": "#### 6"}, "must have a 'question' and an 'answer'"),
        ({"prompt": "a", "answer": "#### 6"}, "must have a 'question' and an 'answer', got prompt"),
    ],
)
def test_a_bad_problem_of_gsm8k_is_named(record, message, tmp_path):
    path = _write(tmp_path / "train.jsonl", {"question": "a", "answer": "#### 6"}, record)
    with pytest.raises(ValueError, match=rf"train.jsonl, line 2: record 2 {message}"):
        read_gsm8k(path)
