"""GSM8K's rewards: as Twinkle's were recorded, but for answers that it loses."""

import json
import pathlib
import re

import pytest

from tests.reward.completions import completions
from twinkle_jax.reward import GSM8KAccuracyReward, GSM8KFormatReward

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
    ],
)
def test_values_in_boxes(answer, truth, right):
    assert GSM8KAccuracyReward()(completions(f"\\boxed{{{answer}}}"), [truth]) == [right]


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
