"""Rewards that look at text alone; GSM8K's against recorded values of Twinkle's."""

import json
import math
import pathlib
import re

import pytest

from tests.reward import completions
from twinkle_jax.reward import (
    ExactMatchReward,
    FormatReward,
    GSM8KAccuracyReward,
    GSM8KFormatReward,
    OverlongPenalty,
    last_boxed,
    token_f1,
)


def test_exact_matches():
    texts = completions("7", " 7\n", "07", "7.", "")
    assert ExactMatchReward()(texts, [7]) == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "loose", "strict"),
    [
        ("<think>a</think><answer>b</answer>", 1, 1),
        (" <think>a\n</think>\n<answer></answer>\n", 1, 1),
        ("<answer>b</answer><think>a</think>", 1, 0),
        ("so <think>a</think><answer>b</answer>", 1, 0),
        ("<think>a</think><answer>b</answer>.", 1, 0),
        ("<think>a</think> hm <answer>b</answer>", 1, 0),
        ("<think>a</think><think>a</think><answer>b</answer>", 1, 0),
        ("<think>a<answer>b</think></answer>", 1, 0),
        ("<think>a</think><answer>b", 0, 0),
        ("</think><think><answer>b</answer>", 0, 0),
        ("<think>a</think>", 0, 0),
        ("", 0, 0),
    ],
)
def test_parts_between_tags(text, loose, strict):
    assert FormatReward()(completions(text)) == [loose]
    assert FormatReward(strict=True)(completions(text)) == [strict]


@pytest.mark.parametrize("tags", [[], "think", ["think", ""], ["<think>"], ["think>"]])
def test_tags_that_are_refused(tags):
    with pytest.raises(ValueError, match="tags"):
        FormatReward(tags)


def test_many_open_tags_take_no_longer():
    assert FormatReward()(completions("<think>" * 200_000)) == [0.0]
    assert FormatReward(strict=True)(completions("<think>" * 200_000)) == [0.0]


def test_the_penalty_of_long_completions():
    # L = 100, C = 20: 0 up to 80, −1 at 100, −(n − 80)/20 between
    lengths = [{"messages": [], "completion_length": n} for n in (0, 80, 85, 100, 101, 10**6)]
    assert OverlongPenalty(100, 20)(lengths) == [0.0, 0.0, -0.25, -1.0, -1.0, -1.0]
    assert math.copysign(1, OverlongPenalty(100, 20)(lengths)[0]) == 1

    class Words:
        def encode(self, text):
            return text.split()

    assert OverlongPenalty(4, 4, tokenizer=Words())(completions("a b")) == [-0.5]


def test_penalties_that_are_refused():
    with pytest.raises(ValueError, match=r"trajectories\[0\]"):
        OverlongPenalty(4, 4)(completions("a b"))
    with pytest.raises(ValueError, match="buffer"):
        OverlongPenalty(4, 5)
    with pytest.raises(ValueError, match="buffer"):
        OverlongPenalty(4, 0)
    with pytest.raises(TypeError, match="max_length"):
        OverlongPenalty(4.0, 1)


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("\\boxed{1} \\boxed{2}", "2"),
        ("\\boxed{ \\frac{1}{2} }", "\\frac{1}{2}"),
        ("\\boxed{1} \\boxed{2", None),
        ("\\boxed{}", ""),
        ("boxed{1}", None),
        ("\\boxed{1}}", "1"),
    ],
)
def test_the_last_box(text, box):
    assert last_boxed(text) == box


ROOT = pathlib.Path(__file__).parents[2]
CASES = json.loads((ROOT / "tests/golden/reward_cases.json").read_text())["cases"]
ROWS = re.findall(
    r"^\| `(####.*?)` \| `(.*?)` \| ([01]) \|",
    (ROOT / "docs/data_and_rewards.md").read_text(),
    re.MULTILINE,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case["completion"])[:30])
def test_the_recorded_cases(case):
    texts = completions(case["completion"], user_data=[("ground_truth", case["ground_truth"])])
    assert GSM8KAccuracyReward()(texts) == [case["accuracy"]]
    assert GSM8KFormatReward()(texts) == [case["format"]]


def test_there_are_enough_cases():
    assert len(CASES) == 20
    assert {case["accuracy"] for case in CASES} == {case["format"] for case in CASES} == {0.0, 1.0}


def test_the_table_in_the_documentation():
    assert len(ROWS) == 9
    texts = completions(*(completion.replace(r"\n", "\n") for completion, _, _ in ROWS))
    assert GSM8KAccuracyReward()(texts, [row[1] for row in ROWS]) == [float(x[2]) for x in ROWS]


@pytest.mark.parametrize("truth", ["1,234", 1234, 1234.0, " 1234 "])
def test_ground_truths_of_other_forms(truth):
    assert GSM8KAccuracyReward()(completions("#### 1,234"), [truth]) == [1.0]


def test_zero_is_an_answer():
    assert GSM8KAccuracyReward()(completions("#### 0", "#### 1"), [0]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("1" * 400, "1" * 399 + "2", 0),
        ("1" * 400, "1" * 400, 1),
        ("0.000009", "0", 1),
        ("0.00001", "0", 0),
        ("-.5", "-0.5", 1),
        ("1e9999", "1e9998", 0),
        ("9e9999", "1e-9999", 0),
        ("1e99999999", "1e99999999", 1),  # as text
        ("1e99999999", "1e99999998", 0),
        ("1_0", "10", 0),  # a number in Python alone
        ("٣", "3", 0),
        ("-inf", "-inf", 0),
        ("NaN", "NaN", 0),
        ("Monday", "Monday", 1),
        ("monday", "Monday", 0),
        ("$7", "7", 1),
        ("1\n2", "12", 0),
        ("7%", "7", 1),
        ("7$", "7", 1),
        ("1$7", "17", 0),
        ("-$7", "-7", 1),
        ("-\\$7", "-7", 1),
        ("72.5.", "72.5", 1),
        ("7%.", "7", 1),
        ("7..5", "7.5", 0),
    ],
)
def test_values_in_boxes(answer, truth, right):
    assert GSM8KAccuracyReward()(completions(f"\\boxed{{{answer}}}"), [truth]) == [right]


def test_a_full_stop_after_the_hashes_is_no_decimal_point():
    assert GSM8KAccuracyReward()(completions("So #### 72.5.", "#### 72."), ["72.5", "72"]) == [1, 1]


def test_without_an_answer_there_is_no_reward():
    assert GSM8KAccuracyReward()(completions("", "\\boxed{}"), ["x", "x"]) == [0.0, 0.0]
    assert GSM8KFormatReward()(completions("#### -", "#### ,", "#### x")) == [0.0, 0.0, 0.0]
    assert GSM8KFormatReward()(completions("#### -1", "#### .5", "####7")) == [1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"ground_truths\[1\]"):
        GSM8KAccuracyReward()(completions("", ""), ["1", ""])


@pytest.mark.parametrize(
    "text",
    ["#" * 200_000, "#### " + " " * 200_000, "\\boxed{" * 50_000, "#### " + ",." * 100_000],
)
def test_time_grows_with_the_text_and_no_faster(text):
    assert GSM8KFormatReward()(completions(text)) == [0.0]


def test_nothing_is_not_the_answer_to_nothing():
    assert GSM8KAccuracyReward()(completions("I do not know", "#### ,"), [","]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("Delhi", "the delhi.", 1),
        ("the Delhi city", "New Delhi", 0.5),  # one of two words, either way
        ("red red blue", "red green", 0.4),  # one word of 3 and of 2: 2 · 1 / 5
        ("red red", "red red red", 0.8),
        ("a the", "an", 1),
        ("", "x", 0),
        ("cat", "dog", 0),
    ],
)
def test_shared_words(answer, truth, score):
    assert token_f1(answer, truth) == token_f1(truth, answer) == score
    assert token_f1(answer, truth, stem=lambda word: "one") > 0 or not answer
