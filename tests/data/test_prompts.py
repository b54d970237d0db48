"""Prompts from files, with the record that an error names; generated problems; the loader."""

import ast
import copy
import json
import operator
import sys

import numpy as np
import pytest

from twinkle_jax.data import (
    ArithmeticTask,
    PromptLoader,
    ReasoningGymTask,
    read_examples,
    read_gsm8k,
    read_jsonl,
    read_preferences,
)
from twinkle_jax.reward import ExactMatchReward

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
LEVELS = [1, 2, 3, 4, 5, 6]


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


def _value(node):
    """Compute an expression from its syntax tree, which is independent of the task's own way."""
    if isinstance(node, ast.Constant):
        return node.value
    return OPERATORS[type(node.op)](_value(node.left), _value(node.right))


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("level", LEVELS)
def test_answers_are_right(level, split):
    task = ArithmeticTask(level, split=split, size=200)
    for prompt in task:
        (message,) = prompt["messages"]
        assert message["role"] == "user" and message["content"].endswith("=")
        tree = ast.parse(message["content"][:-1], mode="eval").body
        assert prompt["user_data"] == [("ground_truth", str(_value(tree)))]


@pytest.mark.parametrize("level", LEVELS)
def test_no_problem_is_in_both_splits(level):
    train = {
        ArithmeticTask(level, size=3000, seed=seed).problem(i)[0]
        for seed in (0, 1)
        for i in range(1500)
    }
    held_out = {
        ArithmeticTask(level, split="eval", size=3000, seed=seed).problem(i)[0]
        for seed in (0, 1)
        for i in range(500)
    }
    assert train and held_out and train.isdisjoint(held_out)


def test_splits_share_all_sums_of_digits():
    train = {p["messages"][0]["content"] for p in ArithmeticTask(1, size=3000)}
    held_out = {p["messages"][0]["content"] for p in ArithmeticTask(1, split="eval", size=3000)}
    assert len(train | held_out) == 100 and 10 <= len(held_out) <= 30


def test_the_same_problems_in_every_process():
    # Written down: a checkpoint that is resumed elsewhere must find the same prompts.
    task = ArithmeticTask(2, size=10)
    assert [task.problem(i)[0] for i in range(3)] == ["12+37", "23+11", "41+17"]
    assert task[3] == ArithmeticTask(2, size=10)[3] == task[-7]
    assert task[2:4] == [task[2], task[3]]
    seeds = {ArithmeticTask(5, seed=seed).problem(0)[0] for seed in range(10)}
    assert len(seeds) == 10
    with pytest.raises(IndexError):
        task[10]


def test_other_prompts():
    task = ArithmeticTask(1, prompt="What is {problem}?")
    assert task[0]["messages"][0]["content"] == f"What is {task.problem(0)[0]}?"


def test_fingerprints_differ():
    tasks = [
        ArithmeticTask(1),
        ArithmeticTask(2),
        ArithmeticTask(1, split="eval"),
        ArithmeticTask(1, size=5),
        ArithmeticTask(1, seed=1),
        ArithmeticTask(1, prompt="{problem}?"),
    ]
    assert len({task.fingerprint for task in tasks}) == len(tasks)


@pytest.mark.parametrize(
    ("options", "argument"),
    [({"level": 7}, "level"), ({"prompt": "hello"}, "prompt"), ({"split": "test"}, "split")],
)
def test_arguments_of_arithmetic_that_are_refused(options, argument):
    with pytest.raises(ValueError, match=argument):
        ArithmeticTask(**options)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"name": "countdown"}, "name"),  # not one written answer
        ({"name": "made_up"}, "name"),
        ({"split": "test"}, "split"),
        ({"size": 0}, "size"),
        ({"size": True}, "size"),
    ],
)
def test_arguments_of_reasoning_gym_that_are_refused(options, argument):
    with pytest.raises(ValueError, match=argument):
        ReasoningGymTask(**{"name": "chain_sum", **options})


def test_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match="reasoning_gym"):
        ReasoningGymTask("chain_sum")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ReasoningGymTask.allowed)
def test_questions_and_answers(name):
    pytest.importorskip("reasoning_gym", reason="pip install 'twinkle-jax[reasoning-gym]'")
    train = ReasoningGymTask(name, size=40, instruction=" Be brief.")
    held_out = ReasoningGymTask(name, split="eval", size=10, instruction=" Be brief.")
    questions = [{p["messages"][0]["content"] for p in task} for task in (train, held_out)]
    assert questions[0].isdisjoint(questions[1])
    assert all(question.endswith(" Be brief.") for question in questions[0])
    assert train[0] == train[-40] == ReasoningGymTask(name, size=40, instruction=" Be brief.")[0]
    answer = dict(train[0]["user_data"])["ground_truth"]
    completion = {"messages": [{"role": "assistant", "content": answer}]}
    assert ExactMatchReward()([completion], train[:1]) == [1.0]
    assert train.fingerprint != held_out.fingerprint


PROMPTS = [
    {"messages": [{"role": "user", "content": str(i)}], "user_data": [("ground_truth", i)]}
    for i in range(10)
]


def _seen(loader, batches=None):
    batches = list(loader) if batches is None else [next(loader) for _ in range(batches)]
    return [batch.ground_truths for batch in batches]


def test_each_prompt_once_an_epoch():
    batches = _seen(PromptLoader(PROMPTS, 4, epochs=3))
    assert [len(batch) for batch in batches] == [4] * 7 + [2]
    order = [i for batch in batches for i in batch]
    epochs = [order[:10], order[10:20], order[20:]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_prompts_are_dictionaries():
    with pytest.raises(TypeError, match="a trajectory must be a dictionary"):
        next(PromptLoader(["1+1="], 1))


def test_without_shuffling():
    batches = _seen(PromptLoader(PROMPTS, 4, shuffle=False, epochs=1))
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_the_seed_is_the_order():
    first = _seen(PromptLoader(PROMPTS, 5, epochs=1))
    assert first == _seen(PromptLoader(PROMPTS, 5, epochs=1))
    assert first != _seen(PromptLoader(PROMPTS, 5, epochs=1, seed=1))


def test_batches_are_prompts_with_their_truths():
    (batch,) = PromptLoader(PROMPTS[:2], 2, shuffle=False, epochs=1)
    assert batch == PROMPTS[:2] and isinstance(batch, list)
    assert batch.ground_truths == [0, 1]


@pytest.mark.parametrize(
    "change",
    [
        lambda prompt: prompt["messages"][0].update(content="changed"),
        lambda prompt: prompt["messages"].append({"role": "assistant", "content": "x"}),
        lambda prompt: dict(prompt["user_data"])["tests"][0].pop("in"),
        lambda prompt: prompt["user_data"].clear(),
        lambda prompt: prompt.pop("user_data"),
    ],
)
def test_what_is_changed_in_a_batch_does_not_change_the_data(change):
    """A reward may strip texts in place; later epochs see them as they were."""
    prompts = [
        {"messages": [{"role": "user", "content": "a"}], "user_data": [("tests", [{"in": [1]}])]}
    ]
    before = copy.deepcopy(prompts)
    loader = PromptLoader(prompts, 1)
    change(next(loader)[0])
    assert next(loader) == before == prompts


def test_for_ever_by_default():
    loader = PromptLoader(PROMPTS, 4)
    assert len(_seen(loader, 25)) == 25 and loader.epoch == 10


@pytest.mark.parametrize("prompts", [PROMPTS, ArithmeticTask(2, size=10)], ids=["list", "task"])
def test_it_goes_on_where_it_was(prompts):
    """At the start, in an epoch, across its end, at the end of another, before the last batch."""
    options = {"batch_size": 4, "seed": 3, "epochs": 3}
    loader = PromptLoader(prompts, **options)
    states = [json.dumps(loader.get_state())]
    batches = []
    for batch in loader:
        batches.append(batch)
        states.append(json.dumps(loader.get_state()))
    assert len(batches) == 8
    resumed = PromptLoader(prompts, **options)
    for done in (8, 7, 5, 3, 2, 0):
        resumed.set_state(json.loads(states[done]))
        assert resumed.epoch == min(done * 4, 30) // 10
        assert list(resumed) == batches[done:]


def test_a_state_is_a_copy():
    loader = PromptLoader(PROMPTS, 4)
    loader.get_state()["fingerprint"]["batch_size"] = 5
    assert loader.get_state()["fingerprint"]["batch_size"] == 4


def test_more_epochs_may_follow():
    loader = PromptLoader(PROMPTS, 5, epochs=1)
    first = _seen(loader)
    longer = PromptLoader(PROMPTS, 5, epochs=2)
    longer.set_state(loader.get_state())
    assert first + _seen(longer) == _seen(PromptLoader(PROMPTS, 5, epochs=2))


OTHERS = [
    ("batch_size", {"batch_size": 5}),
    ("seed", {"seed": 1}),
    ("shuffle", {"shuffle": False}),
    ("prompts", {"prompts": PROMPTS[:9]}),
    ("data", {"prompts": [*PROMPTS[:9], PROMPTS[0]]}),
    ("data", {"prompts": [{**p, "user_data": [("ground_truth", 5)]} for p in PROMPTS]}),
    ("data", {"prompts": PROMPTS[::-1]}),
]


@pytest.mark.parametrize(("name", "other"), OTHERS, ids=lambda x: x if isinstance(x, str) else "")
def test_another_loader_refuses_the_state(name, other):
    loader = PromptLoader(**{"prompts": PROMPTS, "batch_size": 4})
    next(loader)
    with pytest.raises(ValueError, match=f"^{name}"):
        PromptLoader(**{"prompts": PROMPTS, "batch_size": 4, **other}).set_state(loader.get_state())


def test_another_order_refuses_the_state():
    """As another version of what shuffles would give."""
    loader = PromptLoader(PROMPTS, 4)
    state = loader.get_state()
    state["fingerprint"]["order"] = "0"
    with pytest.raises(ValueError, match=r"^order"):
        loader.set_state(state)


@pytest.mark.parametrize(
    "state", [{}, {"position": 1}, {"position": -1, "fingerprint": {}}, {"position": "1"}]
)
def test_states_that_are_none(state):
    with pytest.raises(ValueError, match=r"^state"):
        PromptLoader(PROMPTS, 4).set_state(state)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("batch_size", True),
        ("batch_size", 2.0),
        ("epochs", 0),
        ("seed", -1),
        ("prompts", []),
    ],
)
def test_arguments_that_are_refused(name, value):
    with pytest.raises(ValueError, match=f"^{name}"):
        PromptLoader(**{"prompts": PROMPTS, "batch_size": 4, name: value})


def test_the_loader_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ImportError, match=r"twinkle-jax\[data\]"):
        PromptLoader(PROMPTS, 4)
