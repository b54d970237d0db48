"""Twinkle's preprocessors: conversations and `user_data` of a row, rows and columns."""

import pytest

from twinkle_jax.twinkle.preprocessor import (
    AlpacaProcessor,
    CompetitionMathGRPOProcessor,
    CompetitionMathProcessor,
    CountdownProcessor,
    DataFilter,
    EmojiDPOProcessor,
    GSM8KProcessor,
    OlympiadBenchProcessor,
    Preprocessor,
    SelfCognitionProcessor,
)

SUM = {"question": "1+1=", "answer": "#### 2"}


def turns(processor, row):
    return [(m["role"], m["content"]) for m in processor.preprocess(row)["messages"]]


def test_rows_become_conversations():
    alpaca = {"instruction": "Add", "input": "1 1", "output": None}
    assert turns(AlpacaProcessor(), alpaca) == [("user", "Add\n1 1"), ("assistant", "")]
    assert turns(AlpacaProcessor(), {"instruction": "Add"})[0] == ("user", "Add")
    me = {"query": "Who is {{NAME}}?", "response": "By {{AUTHOR}}"}
    assert turns(SelfCognitionProcessor("N", "A"), me)[1:] == [
        ("user", "Who is N?"),
        ("assistant", "By A"),
    ]
    assert turns(GSM8KProcessor("s"), SUM | {"question": None}) == [("system", "s"), ("user", "")]
    assert turns(GSM8KProcessor(add_assistant=True), SUM)[2] == ("assistant", "#### 2")
    assert "boxed" in turns(GSM8KProcessor(), SUM)[0][1]
    assert GSM8KProcessor().extract_ground_truth("so\n#### -1,234.5") == "-1234.5"
    assert GSM8KProcessor().extract_ground_truth("none") == ""
    assert turns(CompetitionMathGRPOProcessor(), {"problem": "p", "solution": "s"})[-1][1] == ""
    countdown = CountdownProcessor().preprocess({"nums": [1, 2], "target": 3})
    assert countdown["user_data"] == [("target", 3), ("nums", [1, 2])]
    problem = {"question": "q", "context": "c", "final_answer": ["1", "2"], "image_1": None}
    bench = OlympiadBenchProcessor(language="en").preprocess(problem)
    assert bench["user_data"] == [("ground_truth", "1, 2")]
    assert bench["messages"][1]["content"] == "背景信息：c\n\nq"
    with pytest.raises(ValueError, match="images"):
        OlympiadBenchProcessor().preprocess({"question": "q", "image_1": b"x"})
    with pytest.raises(ValueError, match=r"language .* 'fr'"):
        OlympiadBenchProcessor(language="fr")
    math = turns(CompetitionMathProcessor(), {"problem": "p", "solution": "s"})
    assert math == [("user", "p"), ("assistant", "s")]
    assert turns(GSM8KProcessor(system=""), SUM)[0] == ("system", "")


def test_pairs_have_the_prompt_and_the_system_prompt_in_both_conversations():
    row = {"prompt": "q", "good": "a", "bad": None}
    for system, start in (("s", [("system", "s")]), (None, []), ("", [])):
        pair = EmojiDPOProcessor(system, "good", "bad").preprocess(row)
        for name, answer in (("positive", "a"), ("negative", "")):
            messages = [(m["role"], m["content"]) for m in pair[name]["messages"]]
            assert messages == [*start, ("user", "q"), ("assistant", answer)]


def test_rows_and_columns():
    rows, columns = [{"a": 1, "b": 2}, {"a": 3, "b": 4}], {"a": [1, 3], "b": [2, 4]}
    assert Preprocessor.map_col_to_row(columns) == rows == Preprocessor.map_col_to_row(rows)
    assert Preprocessor.map_row_to_col(rows) == columns == Preprocessor.map_row_to_col(columns)
    assert Preprocessor.map_row_to_col(rows, ["b", "c"]) == {"b": [2, 4], "c": []}
    with pytest.raises(NotImplementedError, match="Preprocessor"):
        Preprocessor()(rows)
    with pytest.raises(NotImplementedError, match="DataFilter"):
        DataFilter()(rows[0])
