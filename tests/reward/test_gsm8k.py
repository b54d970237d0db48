"""GSM8K's rewards: as Twinkle's were recorded, but for answers that it loses."""

import json
import pathlib

import pytest

from tests.reward.said import said
from twinkle_jax.reward import GSM8KAccuracyReward, GSM8KFormatReward

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "reward_cases.json"
CASES = json.loads(GOLDEN.read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case["completion"])[:30])
def test_the_recorded_cases(case):
    trajectories = said(case["completion"], user_data=[("ground_truth", case["ground_truth"])])
    assert GSM8KAccuracyReward()(trajectories) == [case["accuracy"]]
    assert GSM8KFormatReward()(trajectories) == [case["format"]]


def test_there_are_enough_cases():
    assert len(CASES) == 20
    assert {case["accuracy"] for case in CASES} == {case["format"] for case in CASES} == {0.0, 1.0}


@pytest.mark.parametrize("truth", ["1,234", 1234, 1234.0, " 1234 "])
def test_ground_truths_of_other_forms(truth):
    assert GSM8KAccuracyReward()(said("#### 1,234"), [truth]) == [1.0]


def test_zero_is_an_answer():
    assert GSM8KAccuracyReward()(said("#### 0", "#### 1"), [0]) == [1.0, 0.0]


def test_without_an_answer_there_is_no_reward():
    assert GSM8KAccuracyReward()(said("", "\\boxed{}"), ["x", "x"]) == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"ground_truths\[1\] must be an answer, got ''"):
        GSM8KAccuracyReward()(said("", ""), ["1", ""])


@pytest.mark.parametrize("text", ["#" * 200_000, "#### " + " " * 200_000, "\\boxed{" * 50_000])
def test_time_grows_with_the_text_and_no_faster(text):
    assert GSM8KFormatReward()(said(text)) == [0.0]


def test_nothing_is_not_the_answer_to_nothing():
    assert GSM8KAccuracyReward()(said("I do not know", "#### ,"), [","]) == [0.0, 0.0]
