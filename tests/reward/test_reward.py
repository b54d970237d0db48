"""Rewards of any kind: ground truths find their completion, and what goes wrong is named."""

import math
import subprocess
import sys
import threading

import numpy as np
import pytest

from tests.reward.said import said
from twinkle_jax.reward import (
    ExactMatchReward,
    FormatReward,
    FunctionReward,
    GSM8KAccuracyReward,
    OverlongPenalty,
    Reward,
    WeightedReward,
    compute_rewards,
    last_boxed,
)

SAME = FunctionReward(lambda text, truth: float(text == truth))


def test_ground_truths_one_a_trajectory_or_one_a_prompt():
    trajectories = said("1", "2", "1", "2")
    assert SAME(trajectories, ["1", "1", "2", "2"]) == [1.0, 0.0, 0.0, 1.0]
    assert SAME(trajectories, ["1", "2"]) == [1.0, 0.0, 0.0, 1.0]
    assert SAME(trajectories, ["2"]) == [0.0, 1.0, 0.0, 1.0]
    assert SAME(trajectories, np.asarray(["1", "2"])) == [1.0, 0.0, 0.0, 1.0]
    assert SAME([], []) == []


def test_ground_truths_of_trajectories():
    mine = said("1", user_data=[("ground_truth", "1")])
    assert SAME(mine) == [1.0]
    assert SAME(mine, said("2")) == [0.0]  # a trajectory stands for what is said last
    assert SAME(said("1"), said("2", user_data={"ground_truth": "1"})) == [1.0]


@pytest.mark.parametrize("truths", [["1", "2", "3"], []])
def test_ground_truths_of_another_number(truths):
    message = f"ground_truths must be one for each of 4 trajectories, .* got {len(truths)}"
    with pytest.raises(ValueError, match=message):
        SAME(said("1", "2", "3", "4"), truths)


@pytest.mark.parametrize("truths", ["1234", {"a": 1}, 5])
def test_ground_truths_that_are_no_list(truths):
    with pytest.raises(TypeError, match="ground_truths must be a list, got"):
        SAME(said("1"), truths)


@pytest.mark.parametrize("trajectories", ["text", {"messages": []}, ["text"], 5])
def test_trajectories_that_are_none(trajectories):
    with pytest.raises(TypeError, match=r"trajectories(\[0\])? must be a"):
        FormatReward()(trajectories)


def test_functions():
    length = FunctionReward(lambda text, truth: len(text), needs_ground_truth=False)
    assert length(said("ab")) == [2]
    with pytest.raises(ValueError, match=r"ground_truths\[0\] must be an answer, got None"):
        SAME(said("ab"))
    with pytest.raises(TypeError, match="function must be callable, got 5"):
        FunctionReward(5)


def test_rewards_of_ones_own():
    class Short(Reward):
        def __call__(self, trajectories, ground_truths=None, **kwargs):
            return [1.0 if len(t["messages"][-1]["content"]) < 3 else 0.0 for t in trajectories]

    assert compute_rewards(Short(), said("ab", "abc")) == [1.0, 0.0]
    with pytest.raises(TypeError):
        Reward()


@pytest.mark.parametrize("values", [(1, 0), [True, 0], np.asarray([1.0, 0.0]), np.ones(2, np.int8)])
def test_numbers_of_any_kind_become_floats(values):
    rewards = compute_rewards(returns(values), said("a", "b"))
    assert all(type(x) is float for x in rewards) and len(rewards) == 2


def returns(value):
    def my_reward(trajectories, ground_truths):
        return value

    return my_reward


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (None, TypeError, "my_reward must return a list of 2 numbers, got None"),
        (0.5, TypeError, "my_reward must return a list of 2 numbers, got 0.5"),
        ([0.5], ValueError, "my_reward must return 2 numbers, got 1"),
        ([0.5, None], TypeError, "my_reward must return numbers, got None for trajectory 1"),
        (["1", 0.5], TypeError, "my_reward must return numbers, got '1' for trajectory 0"),
        ([0.5, math.nan], ValueError, "my_reward must return finite .* nan for trajectory 1"),
        ([-math.inf, 1], ValueError, "my_reward must return finite .* -inf for trajectory 0"),
    ],
)
def test_what_rewards_must_return(value, error, message):
    with pytest.raises(error, match=message):
        compute_rewards(returns(value), said("a", "b"))


def test_rewards_that_raise():
    def my_reward(trajectories, ground_truths):
        raise KeyError("question")

    for timeout in (None, 60):
        with pytest.raises(RuntimeError, match=r"my_reward .* KeyError: 'question'") as caught:
            compute_rewards(my_reward, said("a"), timeout=timeout)
        assert isinstance(caught.value.__cause__, KeyError)


def test_rewards_that_hang():
    forever = threading.Event()

    def my_reward(trajectories, ground_truths):
        forever.wait(60)

    with pytest.raises(TimeoutError, match=r"my_reward must return within 0.05 s, it did not"):
        compute_rewards(my_reward, said("a"), timeout=0.05)
    forever.set()


def test_weighted_sums():
    texts = said("<think>x</think> #### 7", "#### 7", "<think>x</think>", "")
    both = WeightedReward(
        {"right": GSM8KAccuracyReward(), "form": FormatReward(["think"])},
        {"form": 0.25, "right": 2},
    )
    assert both(texts, ["7"]) == [2.25, 2.0, 0.25, 0.0]
    assert both.components(texts, ["7"]) == {
        "right": [1.0, 1.0, 0.0, 0.0],
        "form": [1.0, 0.0, 1.0, 0.0],
    }
    plain = WeightedReward([GSM8KAccuracyReward(), FormatReward(["think"])])
    assert plain(texts, ["7"]) == [2.0, 1.0, 1.0, 0.0]
    assert list(plain.rewards) == ["GSM8KAccuracyReward", "FormatReward"]


@pytest.mark.parametrize(
    ("rewards", "weights", "message"),
    [
        ([], None, "rewards must not be empty"),
        ([SAME, SAME], None, "rewards must have different names, got"),
        ([SAME], [1, 2], "weights must be 1, one a reward, got 2"),
        ({"a": SAME}, {"b": 1}, r"weights must be for \['a'\], got \['b'\]"),
    ],
)
def test_sums_that_are_refused(rewards, weights, message):
    with pytest.raises(ValueError, match=message):
        WeightedReward(rewards, weights)


def test_a_part_of_a_sum_that_fails_is_named():
    with pytest.raises(ValueError, match=r"my_reward must return finite numbers.* got nan"):
        WeightedReward([SAME, returns([math.nan])])(said("a"), ["a"])


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
    assert FormatReward()(said(text)) == [loose]
    assert FormatReward(strict=True)(said(text)) == [strict]


@pytest.mark.parametrize("tags", [[], "think", ["think", ""]])
def test_tags_that_are_refused(tags):
    with pytest.raises(ValueError, match="tags must be a list of names that are not empty, got"):
        FormatReward(tags)


def test_many_open_tags_take_no_longer():
    assert FormatReward()(said("<think>" * 200_000)) == [0.0]
    assert FormatReward(strict=True)(said("<think>" * 200_000)) == [0.0]


def test_the_penalty_of_long_completions():
    # L = 100, C = 20: 0 up to 80, −1 at 100, −(n − 80)/20 between
    lengths = [{"messages": [], "completion_length": n} for n in (0, 80, 85, 100, 101, 10**6)]
    assert OverlongPenalty(100, 20)(lengths) == [0.0, 0.0, -0.25, -1.0, -1.0, -1.0]
    assert math.copysign(1, OverlongPenalty(100, 20)(lengths)[0]) == 1

    class Words:
        def encode(self, text):
            return text.split()

    assert OverlongPenalty(4, 4, tokenizer=Words())(said("a b")) == [-0.5]


def test_penalties_that_are_refused():
    with pytest.raises(ValueError, match=r"trajectories\[0\] must have a completion_length"):
        OverlongPenalty(4, 4)(said("a b"))
    with pytest.raises(ValueError, match=r"buffer must be in \[1, max_length=4\], got 5"):
        OverlongPenalty(4, 5)
    with pytest.raises(ValueError, match=r"buffer must be in \[1, max_length=4\], got 0"):
        OverlongPenalty(4, 0)
    with pytest.raises(TypeError, match=r"max_length must be an int, got 4.0"):
        OverlongPenalty(4.0, 1)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\\boxed{1} \\boxed{2}", "2"),
        ("\\boxed{ \\frac{1}{2} }", "\\frac{1}{2}"),
        ("\\boxed{1} \\boxed{2", None),
        ("\\boxed{}", ""),
        ("boxed{1}", None),
        ("\\boxed{1}}", "1"),
    ],
)
def test_the_last_box(text, found):
    assert last_boxed(text) == found


def test_rewards_need_no_jax():
    code = "import sys, twinkle_jax.reward as r; print('jax' in sys.modules, 'flax' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]


def test_exact_matches():
    assert ExactMatchReward()(said("7", " 7\n", "07", "7.", ""), [7]) == [1.0, 1.0, 0.0, 0.0, 0.0]
