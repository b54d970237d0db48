"""Rewards are called on copies, what they return is checked, and what goes wrong is named."""

import math
import sys
import threading
import time
from decimal import Decimal

import numpy as np
import pytest

from tests.reward import completions
from twinkle_jax.reward import (
    FormatReward,
    FunctionReward,
    GSM8KAccuracyReward,
    Reward,
    WeightedReward,
    compute_rewards,
    score_trajectories,
)

SAME = FunctionReward(lambda text, truth: float(text == truth))


def returns(value):
    def my_reward(trajectories, ground_truths):
        return value

    return my_reward


@pytest.mark.parametrize(
    "values", [(1, 0), [True, 0], np.asarray([1.0, 0.0]), np.ones(2, np.int8), [Decimal("1.5"), 0]]
)
def test_numbers_of_any_kind_become_floats(values):
    rewards = compute_rewards(returns(values), completions("a", "b"))
    assert rewards == [float(x) for x in values]
    assert all(type(x) is float for x in rewards)


def test_a_function_gets_a_ground_truth_for_each_trajectory():
    """As a built-in reward does, from one for each prompt, or from the trajectories themselves."""
    seen = []

    def my_reward(trajectories, ground_truths):
        seen.append(ground_truths)
        return [0.0] * len(trajectories)

    both = WeightedReward({"mine": my_reward, "same": SAME})
    answers = completions("a", "b", "a", "b")
    assert score_trajectories(both, answers, ["a", "b"]).components["same"] == [1, 0, 0, 1]
    compute_rewards(my_reward, answers, np.array([1, 2]))
    answers[0]["user_data"] = [("ground_truth", "a")]
    compute_rewards(my_reward, answers)
    assert seen == [["a", "a", "b", "b"], [1, 1, 2, 2], ["a", None, None, None]]
    with pytest.raises(ValueError, match="ground_truths must be one for each of 4"):
        compute_rewards(my_reward, answers, ["a", "b", "c"])


class Unshowable:
    def __repr__(self):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (None, TypeError, "got None"),
        (0.5, TypeError, "got 0.5"),
        ([0.5], ValueError, "2 numbers, got 1"),
        (iter([0.5, 1]), TypeError, "iterator"),
        ([0.5, None], TypeError, "got None for trajectory 1"),
        (["1", 0.5], TypeError, "got '1' for trajectory 0"),
        ([Unshowable(), 0.5], TypeError, "Unshowable for trajectory 0"),
        ([0.5, math.nan], ValueError, "got nan for trajectory 1"),
        ([-math.inf, 1], ValueError, "got -inf for trajectory 0"),
        ([1, 10**400], ValueError, "10000.* for trajectory 1"),
        ([1, 10**5000], ValueError, "int for trajectory 1"),  # which has no repr
        ([1, 1e39], ValueError, r"1e\+39 for trajectory 1"),
        ([1, -1e39], ValueError, "for trajectory 1"),
        ([[1.0], [1.0, 2.0]], TypeError, r"\[1.0\] for trajectory 0"),
        (np.asarray([[1.0], [1.0]]), TypeError, r"\[1.0\] for trajectory 0"),
        ([1, np.ones(2)], TypeError, "array.* for trajectory 1"),
    ],
)
def test_what_rewards_must_return(value, error, message):
    with pytest.raises(error, match=f"^my_reward must return .*{message}"):
        compute_rewards(returns(value), completions("a", "b"))


def test_the_largest_rewards():
    largest = float(np.finfo(np.float32).max)
    assert compute_rewards(returns([largest, -largest]), completions("a", "b"))[0] == largest
    half = 2.0**103  # of the distance to what would be next: from there on float32 is infinite
    rounded_down = float(np.nextafter(largest + half, 0))
    assert compute_rewards(returns([rounded_down]), completions("a")) == [rounded_down]
    with pytest.raises(ValueError, match="finite"):
        compute_rewards(returns([-largest - half]), completions("a"))


@pytest.mark.parametrize("timeout", [None, 60])
def test_errors_name_the_reward_the_line_and_the_trajectory(timeout):
    def my_reward(trajectories, ground_truths):
        texts = [t["messages"][-1]["content"] for t in trajectories]
        return [{"a": 1, "b": 2}[text] for text in texts]

    line = my_reward.__code__.co_firstlineno + 2
    with pytest.raises(RuntimeError, match=r"my_reward .* KeyError: 'c'") as caught:
        compute_rewards(my_reward, completions(*"abcd"), ["1", "2"], timeout=timeout)
    assert isinstance(caught.value.__cause__, KeyError)
    assert f"{__file__}, line {line}" in str(caught.value)
    assert str(caught.value).endswith("for trajectory 2")


@pytest.mark.parametrize("status", [0, 1, None, "message"])
@pytest.mark.parametrize("timeout", [None, 60])
def test_sys_exit_is_an_error(status, timeout):
    def my_reward(trajectories, ground_truths):
        sys.exit(status)

    with pytest.raises(RuntimeError, match=r"my_reward .* SystemExit: .*for trajectory 0"):
        compute_rewards(my_reward, completions("a"), timeout=timeout)


@pytest.mark.parametrize("timeout", [None, 60])
def test_an_interrupt_stays_an_interrupt(timeout):
    calls = []

    def my_reward(trajectories, ground_truths):
        calls.append(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compute_rewards(my_reward, completions("a"), timeout=timeout)
    assert len(calls) == 1


def test_an_error_of_the_batch_alone_names_the_batch():
    def my_reward(trajectories, ground_truths):
        return [1.0] if len(trajectories) == 1 else 1 / 0

    batch = [{"messages": [{"role": "user", "content": "first question"}]}] * 2
    with pytest.raises(RuntimeError, match=r"my_reward .*batch of 2 .*'first question'"):
        compute_rewards(my_reward, batch)
    with pytest.raises(RuntimeError, match=r"my_reward .*batch of 0"):
        compute_rewards(my_reward, [])


def test_another_error_for_one_alone_is_not_its_error():
    def other_type(trajectories, ground_truths):
        raise KeyError if len(trajectories) > 1 else ValueError

    def other_line(trajectories, ground_truths):
        if len(trajectories) > 1:
            raise KeyError
        raise KeyError

    for my_reward in (other_type, other_line):
        with pytest.raises(RuntimeError, match=r"KeyError.* for a batch of 2"):
            compute_rewards(my_reward, completions("a", "b"))


def test_the_users_own_line_is_named_and_not_a_librarys():
    import json

    reward = FunctionReward(lambda text, truth: json.loads(text), needs_ground_truth=False)
    with pytest.raises(RuntimeError, match=r"JSONDecodeError.*test_scoring.py, line \d+.* 1$"):
        compute_rewards(reward, completions("1", "{"))


def test_columns_that_are_missing_name_the_reward():
    def my_reward(completions, level):
        return []

    with pytest.raises(RuntimeError, match=r"my_reward .*level") as caught:
        compute_rewards(my_reward, completions("a"))
    assert ".py" not in str(caught.value)  # no line of the user's is wrong


def test_rewards_that_hang():
    forever = threading.Event()

    def my_reward(trajectories, ground_truths):
        forever.wait(60)

    with pytest.raises(TimeoutError, match="my_reward"):
        compute_rewards(my_reward, completions("a"), timeout=0.05)
    forever.set()


def test_a_reward_that_fails_slowly_is_an_error_and_no_time_out():
    def my_reward(trajectories, ground_truths):
        if len(trajectories) == 1:
            time.sleep(60)
        raise KeyError("question")

    with pytest.raises(RuntimeError, match=r"my_reward .* KeyError.* for a batch of 2"):
        compute_rewards(my_reward, completions("a", "b"), timeout=0.5)


def test_a_reward_sees_copies():
    shared = {"role": "assistant", "content": " 4 ", "tool_calls": [{"arguments": "{}"}]}
    trajectory = {"messages": [shared], "user_data": [("tests", ["a"]), ("ground_truth", "4")]}
    batch, truths = [trajectory, trajectory], [["4"], ["5"]]
    before = repr((batch, truths))

    def spoils(trajectories, ground_truths):
        message = trajectories[0]["messages"][0]
        message["content"] = message["content"].strip()
        message["tool_calls"].clear()
        trajectories[0]["user_data"][0][1].append("b")
        trajectories[0]["user_data"].append(("more", 1))
        trajectories[1]["messages"].clear()
        ground_truths[0].append("x")
        return [float(len(t["messages"])) for t in trajectories]

    def spoils_columns(prompts, completions, tests, answer):
        completions[0][0]["content"] = ""
        tests[0].append("b")
        answer[0].append("x")
        return [float(len(c[0]["content"])) for c in completions]

    both = WeightedReward({"first": spoils, "second": spoils_columns})
    for _ in range(2):
        scores = score_trajectories(both, batch, truths)
        assert repr((batch, truths)) == before
        assert scores.components == {"first": [1.0, 0.0], "second": [0.0, 3.0]}


def test_weighted_sums():
    texts = completions("<think>x</think> #### 7", "#### 7", "<think>x</think>", "")
    both = WeightedReward(
        {"right": GSM8KAccuracyReward(), "form": FormatReward(["think"])},
        {"form": 0.25, "right": 2},
    )
    components = {"right": [1.0, 1.0, 0.0, 0.0], "form": [1.0, 0.0, 1.0, 0.0]}
    assert both(texts, ["7"]) == [2.25, 2.0, 0.25, 0.0]
    scores = score_trajectories(both, texts, ["7"])
    assert scores == ([2.25, 2.0, 0.25, 0.0], components)
    assert scores.means() == {"right": 0.5, "form": 0.5}
    plain = WeightedReward([GSM8KAccuracyReward(), FormatReward(["think"])])
    assert plain(texts, ["7"]) == [2.0, 1.0, 1.0, 0.0]
    assert list(plain.rewards) == ["GSM8KAccuracyReward", "FormatReward"]
    assert compute_rewards(WeightedReward([plain], [2]), texts, ["7"]) == [4.0, 2.0, 2.0, 0.0]


def test_a_weighted_sum_is_exact_so_that_all_right_is_1():
    three = {name: lambda completions: [1.0] * len(completions) for name in "abc"}
    weighted = WeightedReward(three, [0.7, 0.2, 0.1])
    assert compute_rewards(weighted, completions("x")) == [1.0]
    with pytest.raises(ValueError, match="weighted sum"):
        compute_rewards(WeightedReward(three, [1.7e308] * 3), completions("x"))


def test_one_reward_is_its_only_component():
    def my_reward(completions):
        return [0.5, 1]

    assert score_trajectories(my_reward, completions("a", "b")) == (
        [0.5, 1],
        {"my_reward": [0.5, 1]},
    )


def test_none_is_no_reward():
    def some(completions):
        return [1.0, None, 3.0]

    def none(completions):
        return [None, None, None]

    rewards = WeightedReward({"some": some, "none": none, "all": returns([1, 1, 1])}, [2, 5, 0.5])
    scores = score_trajectories(rewards, completions("a", "b", "c"))
    assert scores.rewards == [2.5, 0.5, 6.5]
    assert scores.components == {
        "some": [1.0, None, 3.0],
        "none": [None, None, None],
        "all": [1.0, 1.0, 1.0],
    }
    assert scores.means() == {"some": 2.0, "all": 1.0}
    with pytest.raises(TypeError, match=r"some.*none"):
        compute_rewards(WeightedReward([some, none]), completions("a", "b", "c"))


def test_a_sum_that_overflows():
    parts = {"a": returns([3e38]), "b": returns([3e38])}
    with pytest.raises(ValueError, match="sum"):
        compute_rewards(WeightedReward(parts, [1e300, -1e300]), completions("a"))
    with pytest.raises(ValueError, match="sum"):
        compute_rewards(WeightedReward([returns([3e38])], [2]), completions("a"))


def test_the_shorter_time_limit_of_a_sum_counts():
    def slow(completions):
        time.sleep(0.5)
        return [1.0]

    for of_sum, limit in ((0.05, 60), (60, 0.05), (0.05, None), (None, 0.05)):
        with pytest.raises(TimeoutError, match="slow"):
            compute_rewards(WeightedReward([slow], timeout=of_sum), completions("a"), timeout=limit)
    with pytest.raises(TimeoutError, match="slow"):
        WeightedReward([slow], timeout=0.05)(completions("a"))
    assert compute_rewards(WeightedReward([slow], timeout=None), completions("a")) == [1.0]


@pytest.mark.parametrize("limit", [None, 1e4])
def test_a_longer_limit_than_the_usual_one_counts(limit, monkeypatch):
    """Sums had one of 600 seconds, so that `--reward_timeout 3600` was 600."""
    limits, join = [], threading.Thread.join
    monkeypatch.setattr(
        threading.Thread, "join", lambda thread, x=None: limits.append(x) or join(thread, x)
    )
    part = returns([1.0])
    assert WeightedReward([part], timeout=limit)(completions("a")) == [1.0]
    assert compute_rewards(WeightedReward([part]), completions("a"), timeout=limit) == [1.0]
    assert limits == ([] if limit is None else [limit] * 2)  # without one there is no thread


@pytest.mark.parametrize(
    ("rewards", "weights", "error", "message"),
    [
        ([], None, ValueError, "rewards"),
        ([SAME, SAME], None, ValueError, "rewards"),
        ([SAME], [1, 2], ValueError, "weights"),
        ([SAME], [math.nan], ValueError, "weights"),
        ({"a": SAME}, {"b": 1}, ValueError, r"weights .*'a'.*'b'"),
        ({"a": lambda answer: 1.0}, None, TypeError, "rewards.*'a'"),
    ],
)
def test_sums_that_are_refused(rewards, weights, error, message):
    with pytest.raises(error, match=message):
        WeightedReward(rewards, weights)


def test_a_part_of_a_sum_that_fails_is_named():
    with pytest.raises(ValueError, match="my_reward"):
        WeightedReward([SAME, returns([math.nan])])(completions("a"), ["a"])


def test_names_for_metrics():
    def brevity(text, truth):
        return -len(text)

    class Own(Reward):
        def __call__(self, trajectories, ground_truths=None):
            return [0.0]

    rewards = WeightedReward([FunctionReward(brevity), SAME, Own()])
    assert list(rewards.rewards) == ["brevity", "FunctionReward", "Own"]
