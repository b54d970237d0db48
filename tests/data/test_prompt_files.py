"""Prompts, examples and pairs from files, with the record that an error names."""

import json

import numpy as np
import pytest

from twinkle_jax.data import read_examples, read_gsm8k, read_jsonl, read_preferences


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
    first, second, _ = (x["messages"] for x in read_jsonl(path, system="Be brief."))
    assert first[0] == {"role": "system", "content": "Be brief."} and len(first) == 2
    assert second == turns


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": "b"}\r\n')
    assert len(read_jsonl(path)) == 1


def test_a_file_in_another_encoding_is_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "caf\xe9", "answer": "b"}\n')
    with pytest.raises(ValueError, match=r"data\.jsonl must be UTF-8"):
        read_jsonl(path)


GOOD = {"prompt": "a", "answer": "b"}


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ("{", "JSON"),
        ("[" * 100_000, "JSON"),
        ("[1]", "object"),
        ({"answer": "b"}, "'prompt'"),
        ({"question": ["a"], "answer": "b"}, "'prompt'"),
        ({"messages": "a", "answer": "b"}, "'prompt'"),
        ({"prompt": "", "answer": "b"}, "'prompt'"),
        ({"prompt": 5, "answer": "b"}, "'prompt'"),
        ({"prompt": "a", "messages": [], "answer": "b"}, "'prompt' or 'messages', got both"),
        ({"messages": [], "answer": "b"}, "'prompt'"),
        ({"messages": ["a"], "answer": "b"}, "messages"),
        ({"messages": [{"role": "me", "content": "a"}], "answer": "b"}, "messages"),
        ({"messages": [{"role": "user"}], "answer": "b"}, "messages"),
        (
            {"messages": [{"role": "assistant", "content": "a"}], "answer": "b"},
            "assistant",
        ),
        ({"prompt": "a"}, "'answer'"),
        ({"prompt": "a", "answer": ["b"]}, "'answer'"),
        ({"prompt": "a", "answer": True}, "'answer'"),
        ({"prompt": "a", "answer": "  "}, "'answer'"),
        ({"prompt": "a", "answer": "@"}, "'answer'"),
        ({"prompt": "a", "answer": "b", "ground_truth": "c"}, "'answer'"),
        ({"prompt": "a", "answer": None, "ground_truth": None}, "'ground_truth'"),
        ({"prompt": "a", "ground_truth": ["b"]}, "'ground_truth'"),
        ('{"prompt": "a", "answer": NaN}', "NaN"),
        ('{"prompt": "a", "answer": "b", "more": [-Infinity]}', "Infinity"),
        ('{"prompt": "a", "answer": 1, "answer": 2}', "'answer'"),
        ('{"prompt": "a", "answer": "b", "more": {"x": 1, "x": 1}}', "'x'"),
        ('{"prompt": "a", "answer": "b", "more": 1e400}', "1e400"),
        ('{"prompt": "a", "answer": 1e400}', "1e400"),
        ('{"prompt": "a", "answer": 1e-500}', "'answer'"),
        ('{"prompt": "a", "answer": 1e-99999999999999999999}', "'answer'"),
        ('{"prompt": "a", "answer": %s}' % ("1" * 500), "'answer'"),
        ('{"prompt": "a", "answer": %s}' % ("1" * 5000), "JSON"),
    ],
)
def test_a_bad_record_is_named(record, name, tmp_path):
    path = _write(tmp_path / "data.jsonl", GOOD, "", record)
    with pytest.raises(ValueError, match=rf"data.jsonl, line 3: record 2 .*{name}"):
        read_jsonl(path, check_answer=lambda answer: answer != "@")


@pytest.mark.parametrize(
    ("literal", "text"),
    [
        ("0.00001", "0.00001"),
        ("1e22", "1" + "0" * 22),
        ("1.50", "1.50"),
        ("-2.5E-3", "-0.0025"),
        ("12345678901234567890123", "12345678901234567890123"),
        ("0.1000000000000000055511151231257827", "0.1000000000000000055511151231257827"),
        ("-0.0", "-0.0"),
        ("1E2", "100"),
        ("5e-324", "0." + "0" * 323 + "5"),
    ],
)
def test_numbers_keep_the_digits_of_the_file(literal, text, tmp_path):
    path = _write(tmp_path / "data.jsonl", f'{{"prompt": "a", "answer": {literal}, "x": 1e-5}}')
    assert read_jsonl(path)[0]["user_data"] == [("ground_truth", text), ("x", 0.00001)]


def test_forms_that_data_sets_have(tmp_path):
    turn = [{"role": "user", "content": "a"}]
    path = _write(
        tmp_path / "data.jsonl",
        {"prompt": turn, "level": 3, "tests": [{"in": 1.5}, None], "answer": "b"},
        {"prompt": "a", "question": "x", "ground_truth": 7},
        {"messages": turn, "prompt": None, "answer": "####"},
        {"question": "a", "answer": "2*617\n#### 1,234", "level": 1},
        {"question": "a", "answer": "yes", "solution": "z"},
        {"question": "a", "answer": "b #### 1", "solution": "z"},
        {"question": "a", "answer": "b #### x, y"},
        {"prompt": "a", "answer": None, "ground_truth": "b"},  # a table with both columns
        {"prompt": "a", "answer": "b", "ground_truth": None},
        {"question": "a", "answer": "b #### -2,1"},  # two numbers
        {"question": "a", "answer": "b #### -12,34,567.5"},  # one in India
    )
    prompts = read_jsonl(path)
    assert all(prompt["messages"] == turn for prompt in prompts)
    assert [prompt["user_data"] for prompt in prompts] == [
        [("ground_truth", "b"), ("level", 3), ("tests", [{"in": 1.5}, None])],
        [("ground_truth", "7"), ("question", "x")],
        [("ground_truth", "####")],
        [("ground_truth", "1234"), ("level", 1), ("solution", "2*617")],
        [("ground_truth", "yes"), ("solution", "z")],
        [("ground_truth", "1"), ("solution", "z")],
        [("ground_truth", "x, y"), ("solution", "b")],
        [("ground_truth", "b")],
        [("ground_truth", "b")],
        [("ground_truth", "-2,1"), ("solution", "b")],
        [("ground_truth", "-1234567.5"), ("solution", "b")],
    ]


def test_forms_of_examples(tmp_path):
    """All end with the assistant's turn; other columns are not read."""
    user, turn = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    result = {"role": "tool", "content": "4"}
    tool = {"type": "function", "function": {"name": "f"}}
    path = _write(
        tmp_path / "data.jsonl",
        {"messages": [user, turn], "prompt": "a", "level": 1},
        {"messages": [user, turn, user, turn]},
        {"prompt": "a", "completion": "b", "messages": None},
        {"prompt": [user], "completion": [turn], "question": "x", "answer": 4},
        {"prompt": [user], "completion": "b"},
        {"question": "a", "answer": "b", "prompt": None, "completion": None},
        {"messages": [user, call, result, turn], "tools": [tool]},
        {"prompt": [user, turn, user], "completion": "b"},
    )
    once = [user, turn]
    examples = read_examples(path)
    assert [example["messages"] for example in examples] == [
        once, [*once, *once], once, once, once, once, [user, call, result, turn],
        [user, {**turn, "weight": 0}, *once],
    ]  # fmt: skip
    assert [example["user_data"] for example in examples] == [[]] * 8
    assert [example.get("tools") for example in examples] == [None] * 6 + [[tool], None]
    system = {"role": "system", "content": "s"}
    assert read_examples(path, system="s")[0]["messages"] == [system, *once]


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ("{", "JSON"),
        ({"messages": []}, "'messages'"),
        ({"messages": "a"}, "'messages'"),
        ({"prompt": "a"}, "'completion'"),
        ({"completion": "a"}, "'prompt'"),
        ({"prompt": "a", "answer": "b"}, "'completion'"),
        ({"question": "a", "answer": 4}, "'answer', which are texts"),
        ({"prompt": "a", "completion": []}, "'completion'"),
        ({"prompt": "a", "completion": ""}, "'completion'"),
        ({"prompt": "", "completion": "a"}, "'prompt'"),
        ({"messages": [{"role": "me", "content": "a"}]}, "messages with a role"),
        ({"messages": [{"role": "user", "content": None, "tool_calls": [1]}]}, "content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "content"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": "f"}]}, "tool_calls"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [1]}]}, "tool_calls"),
        ({"messages": [{"role": "user", "content": "a"}]}, "end with the assistant"),
        ({"prompt": "a", "completion": [{"role": "user", "content": "b"}]}, "end with the assist"),
        ({"messages": [{"role": "user", "content": "a"}], "completion": "b"}, "got both"),
    ],
)
def test_a_bad_example_is_named(record, name, tmp_path):
    path = _write(tmp_path / "data.jsonl", {"prompt": "a", "completion": "b"}, "", record)
    with pytest.raises(ValueError, match=rf"data.jsonl, line 3: record 2 .*{name}"):
        read_examples(path)


def test_forms_of_pairs(tmp_path):
    """Of messages that both answers begin with, and of a prompt, none is learned."""
    user, chosen, rejected = (
        {"role": role, "content": text}
        for role, text in (("user", "a"), ("assistant", "b"), ("assistant", "c"))
    )
    system, more = {"role": "system", "content": "s"}, {"role": "user", "content": "d"}
    tool = {"type": "function", "function": {"name": "f"}}
    unlearned = {**chosen, "weight": 0}
    path = _write(
        tmp_path / "data.jsonl",
        {"prompt": "a", "chosen": "b", "rejected": "c", "score": 1},
        {"prompt": [user], "chosen": [chosen], "rejected": [rejected], "tools": [tool]},
        {"chosen": [user, chosen], "rejected": [user, rejected]},
        {"prompt": "a", "chosen": [user, chosen], "rejected": [user, rejected]},
        {"prompt": [user], "chosen": [user, chosen], "rejected": [user, rejected]},
        {"prompt": "a", "chosen": [system, user, chosen], "rejected": [system, user, rejected]},
        {"prompt": [user, chosen, user], "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": [chosen, more, chosen], "rejected": [chosen, more, rejected]},
        {"chosen": [user, chosen, user, chosen], "rejected": [user, chosen, more, chosen]},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"chosen": [user, chosen], "rejected": [user, chosen]},
    )
    pairs = read_preferences(path)
    found = [(pair["messages"], dict(pair["user_data"])["rejected"]) for pair in pairs]
    once = ([user, chosen], [user, rejected])
    assert found == [
        once, once, once, once, once, ([system, user, chosen], [system, user, rejected]),
        ([user, unlearned, user, chosen], [user, unlearned, user, rejected]),
        ([user, chosen, more, chosen], [user, chosen, more, rejected]),
        ([user, unlearned, user, chosen], [user, unlearned, more, chosen]),
        (once[0], once[0]), (once[0], once[0]),
    ]  # fmt: skip
    assert [pair.get("tools") for pair in pairs] == [None, [tool]] + [None] * 9
    pair = read_preferences(path, system="s")[0]
    assert pair["messages"][0] == dict(pair["user_data"])["rejected"][0] == system


def test_pairs_with_a_question_and_a_system_prompt(tmp_path):
    """As in Intel/orca_dpo_pairs, whose system prompt is empty in some records."""
    answers = {"chosen": "b", "rejected": "c"}
    turns = {"chosen": [_USER, _TURN], "rejected": [_USER, {**_TURN, "content": "c"}]}
    path = _write(
        tmp_path / "data.jsonl",
        {"system": "s", "question": "a", **answers},
        {"system": "", "question": "a", **answers},
        {"system": "s", "question": "other", **turns},
        {"system": "t", "prompt": [_SYSTEM, _USER], **answers},
    )
    for system in (None, "default"):
        first = [] if system is None else [{"role": "system", "content": system}]
        pairs = read_preferences(path, system=system)
        for pair, start in zip(pairs, ([_SYSTEM], first, [_SYSTEM], [_SYSTEM]), strict=True):
            for messages, text in ((pair["messages"], "b"), (pair["user_data"][0][1], "c")):
                assert messages == [*start, _USER, {**_TURN, "content": text}]


def test_pairs_in_parquet_files(tmp_path):
    """In which each column has keys of its own, which are None where a message lacks them."""
    pyarrow = pytest.importorskip("pyarrow", reason="pip install 'twinkle-jax[hub]'")
    parquet = pytest.importorskip("pyarrow.parquet")
    calls = [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        for arguments in ({"x": 1}, {"y": 2})
    ]
    rejected = [_USER, {**_TURN, "content": "c"}]
    pairs = [{"chosen": [_USER, call], "rejected": rejected} for call in calls]
    for prompt in ({}, {"prompt": "a"}, {"prompt": [_USER]}):
        table = pyarrow.Table.from_pylist([prompt | pair for pair in pairs])
        parquet.write_table(table, tmp_path / "data.parquet")
        for found, call in zip(read_preferences(tmp_path / "data.parquet"), calls, strict=True):
            assert len(found["messages"]) == 2
            assert found["messages"][1]["tool_calls"] == call["tool_calls"]
            assert dict(found["user_data"])["rejected"][1:] == rejected[1:]


_SYSTEM, _USER = {"role": "system", "content": "s"}, {"role": "user", "content": "a"}
_TURN = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ({"prompt": "a", "chosen": "b"}, "'rejected' answer"),
        ({"prompt": "a", "rejected": "b"}, "'chosen'"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "'rejected' answer"),
        ({"chosen": "b", "rejected": "c"}, "a 'prompt'"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, "a 'prompt'"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, "a 'prompt'"),
        ({"prompt": "a", "chosen": [{"role": "me"}], "rejected": "c"}, "messages with a role"),
        ({"prompt": "a", "chosen": [_TURN], "rejected": [{"role": "user", "content": "b"}]}, "end"),
        (
            {
                "prompt": "other",
                "chosen": [{"role": "user", "content": "a"}, _TURN],
                "rejected": [{"role": "user", "content": "a"}, {**_TURN, "content": "c"}],
            },
            "begin with the 'prompt'",
        ),
        (
            {
                "prompt": "a",
                "chosen": [{"role": "user", "content": "other"}, _TURN],
                "rejected": [{"role": "user", "content": "a"}, _TURN],
            },
            "begin with the 'prompt'",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": [_USER, _TURN]}, "begin with the 'prompt'"),
        (
            {"prompt": [_SYSTEM, _USER], "chosen": [_USER, _TURN], "rejected": [_USER, _TURN]},
            "begin with the 'prompt'",
        ),
        (
            {"prompt": [_SYSTEM], "chosen": [_SYSTEM, _TURN], "rejected": [_TURN]},
            "begin with the 'prompt'",
        ),
    ],
)
def test_a_bad_pair_is_named(record, name, tmp_path):
    path = _write(tmp_path / "data.jsonl", {"prompt": "a", "chosen": "b", "rejected": "c"}, record)
    with pytest.raises(ValueError, match=rf"data.jsonl, line 2: record 2 .*{name}"):
        read_preferences(path)


def test_files_without_answers(tmp_path):
    """Judged by something else; but a file in which some are missing has a mistake."""
    path = _write(tmp_path / "data.jsonl", {"prompt": "a", "level": 1}, {"prompt": "b"})
    assert [prompt["user_data"] for prompt in read_jsonl(path)] == [[("level", 1)], []]
    with pytest.raises(ValueError, match="record 1"):
        read_jsonl(path, check_answer=bool)
    path = _write(tmp_path / "data.jsonl", {"prompt": "a"}, GOOD)
    with pytest.raises(ValueError, match="record 2"):
        read_jsonl(path)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("column", [[TOOL], json.dumps([TOOL])], ids=["list", "text"])
def test_descriptions_of_tools_are_the_conversations(tmp_path, column):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "2+2=", "tools": column}))
    row = read_jsonl(path)[0]
    assert row["tools"] == [TOOL]
    assert row["user_data"] == [("tools", column)]  # rewards get the column as it is


@pytest.mark.parametrize("column", [["add"], "add", "[1]", {"name": "add"}, [], None, [{}], 3])
def test_other_columns_of_that_name_are_the_users_own(tmp_path, column):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "2+2=", "tools": column}))
    row = read_jsonl(path)[0]
    assert "tools" not in row and row["user_data"] == [("tools", column)]


def test_answers_in_parquet_files(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pip install 'twinkle-jax[hub]'")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = {"prompt": ["a", "b"], "answer": [1e-05, float("nan")]}
    parquet.write_table(pyarrow.table(table).slice(0, 1), tmp_path / "one.parquet")
    assert read_jsonl(tmp_path / "one.parquet")[0]["user_data"] == [("ground_truth", "0.00001")]
    parquet.write_table(pyarrow.table(table), tmp_path / "two.parquet")
    with pytest.raises(ValueError, match="record 2"):
        read_jsonl(tmp_path / "two.parquet")
    for kind in (pyarrow.float16(), pyarrow.float32(), pyarrow.float64()):
        answers = pyarrow.array(np.asarray([0.1, 0.2], kind.to_pandas_dtype()))
        table_of_kind = pyarrow.table({"prompt": ["x", "y"], "ground_truth": answers})
        parquet.write_table(table_of_kind.slice(0, 1), tmp_path / "short.parquet")
        assert read_jsonl(tmp_path / "short.parquet")[0]["user_data"] == [("ground_truth", "0.1")]
    parquet.write_table(pyarrow.table(table).slice(0, 0), tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="at least one record"):
        read_jsonl(tmp_path / "none.parquet")


def test_an_empty_file(tmp_path):
    with pytest.raises(ValueError, match=r"data.jsonl"):
        read_jsonl(_write(tmp_path / "data.jsonl", ""))
    with pytest.raises(FileNotFoundError):
        read_jsonl(tmp_path / "none.jsonl")


def test_gsm8k(tmp_path):
    path = _write(
        tmp_path / "train.jsonl",
        {"question": "How many?", "answer": "He has 2*3=<<2*3=6>>6.\n#### 6", "level": 1},
        {"question": " How much? ", "answer": "#### $ is\n#### -1,234.5"},
    )
    problems = read_gsm8k(path, system="s", instruction=" Answer after ####.")
    assert problems[0] == {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "How many? Answer after ####."},
        ],
        "user_data": [
            ("ground_truth", "6"),
            ("solution", "He has 2*3=<<2*3=6>>6."),
            ("level", 1),
        ],
    }
    assert problems[1]["user_data"][0] == ("ground_truth", "-1234.5")
    assert [m["role"] for m in read_gsm8k(path)[0]["messages"]] == ["user"]  # nothing is added


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ({"question": "a", "answer": "6"}, "'answer'"),
        ({"question": "a", "answer": "#### six"}, "'answer'"),
        ({"question": "a", "answer": "#### 6\nend"}, "'answer'"),
        ({"question": "a"}, "'question'"),
        ({"question": "", "answer": "#### 6"}, "'question'"),
        ({"prompt": "a", "answer": "#### 6"}, "'question'"),
    ],
)
def test_a_bad_problem_of_gsm8k_is_named(record, name, tmp_path):
    path = _write(tmp_path / "train.jsonl", {"question": "a", "answer": "#### 6"}, record)
    with pytest.raises(ValueError, match=rf"train.jsonl, line 2: record 2 .*{name}"):
        read_gsm8k(path)
