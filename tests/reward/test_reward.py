"""What a reward is: its signature is recognised, and ground truths find their completion."""

import asyncio
import functools
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tests.reward import completions
from twinkle_jax.data import read_jsonl
from twinkle_jax.reward import (
    ExactMatchReward,
    FormatReward,
    FunctionReward,
    Reward,
    as_reward,
    compute_rewards,
)
from twinkle_jax.reward import reward as reward_module

SAME = FunctionReward(lambda text, truth: float(text == truth))


def test_ground_truths_one_a_trajectory_or_one_a_prompt():
    trajectories = completions("1", "2", "1", "2")
    assert SAME(trajectories, ["1", "1", "2", "2"]) == [1.0, 0.0, 0.0, 1.0]
    assert SAME(trajectories, ["1", "2"]) == [1.0, 0.0, 0.0, 1.0]
    assert SAME(trajectories, ["2"]) == [0.0, 1.0, 0.0, 1.0]
    assert SAME(trajectories, np.asarray(["1", "2"])) == [1.0, 0.0, 0.0, 1.0]
    assert SAME([], []) == []


def test_ground_truths_of_trajectories():
    trajectories = completions("1", user_data=[("ground_truth", "1")])
    assert SAME(trajectories) == [1.0]
    assert SAME(trajectories, completions("2")) == [0.0]  # stands for its last message
    assert SAME(completions("1"), completions("2", user_data={"ground_truth": "1"})) == [1.0]


@pytest.mark.parametrize("truths", [["1", "2", "3"], []])
def test_ground_truths_of_another_number(truths):
    with pytest.raises(ValueError, match=f"ground_truths .* got {len(truths)}"):
        SAME(completions("1", "2", "3", "4"), truths)


@pytest.mark.parametrize("truths", ["1234", {"a": 1}, 5])
def test_ground_truths_that_are_no_list(truths):
    with pytest.raises(TypeError, match="ground_truths"):
        SAME(completions("1"), truths)


@pytest.mark.parametrize("trajectories", ["text", {"messages": []}, ["text"], 5])
def test_trajectories_that_are_none(trajectories):
    with pytest.raises(TypeError, match="trajectories"):
        FormatReward()(trajectories)


def test_functions_of_a_completion():
    length = FunctionReward(lambda text, truth: len(text), needs_ground_truth=False)
    assert length(completions("ab")) == [2]
    same = FunctionReward(lambda text, truth: float(text == truth), needs_ground_truth=False)
    assert same(completions("4", "4", "4"), [4, "4 ", None]) == [1.0, 1.0, 0.0]
    with pytest.raises(ValueError, match=r"ground_truths\[0\]"):
        SAME(completions("ab"))
    with pytest.raises(TypeError, match="function"):
        FunctionReward(5)


def test_ground_truths_that_are_several_answers():
    """As text, `['4', 'four']` would be an answer that no completion gives."""
    answers = completions("four", "['4']", user_data=[("ground_truth", ["4", "four"])])
    assert FunctionReward(lambda text, truth: float(text in truth))(answers) == [1.0, 0.0]
    for truths in (None, [("4",), "4"], [np.asarray(["4", "5"]), "4"], [{"4": 1}, "4"]):
        with pytest.raises(ValueError, match=r"ground_truths\[0\] must be text or a number"):
            ExactMatchReward()(answers, truths)
    with pytest.raises(ValueError, match=r"ground_truths\[1\] must be an answer"):
        SAME(answers, ["4", []])
    assert SAME(completions("7", "0.5", "3"), [7, np.asarray(0.5), np.int64(3)]) == [1.0] * 3


def test_rewards_of_ones_own():
    class Short(Reward):
        def __call__(self, batch, truths=None, **kwargs):  # names of its own: it is a Reward
            return [1.0 if len(t["messages"][-1]["content"]) < 3 else 0.0 for t in batch]

    short = Short()
    assert as_reward(short) is short
    assert compute_rewards(short, completions("ab", "abc")) == [1.0, 0.0]
    with pytest.raises(TypeError):
        Reward()


def test_functions_of_trajectories():
    def both(trajectories, truths):
        return [float(truth) for truth in truths]

    def optional(trajectories, ground_truths=None, **kwargs):
        return [float(truth) for truth in ground_truths]

    class Duck:
        def __call__(self, trajectories, ground_truths):
            return [float(truth) for truth in ground_truths]

    for function in (both, optional, Duck()):
        assert as_reward(function) is function
        assert function(completions("a", "b"), [1, 2]) == [1.0, 2.0]

    def alone(trajectories):
        return [len(t["messages"]) for t in trajectories]

    assert as_reward(alone)(completions("a"), ["never seen"]) == [1]
    assert as_reward(alone).__name__ == "alone"


QUESTION = {"role": "user", "content": "1+1="}


def conversation(*answers, **user_data):
    messages = [QUESTION]
    for answer in answers:
        messages += [{"role": "assistant", "content": answer}, QUESTION]
    return {"messages": messages[:-1], "user_data": list(user_data.items())}


def test_functions_in_trls_form():
    calls = []

    def reward(prompts, completions, **columns):
        calls.append((prompts, completions, columns))
        return [1.0, None]

    rows = [conversation("2", "two", level=3), conversation("3", source="book")]
    assert as_reward(reward)(rows, ["2", "4"]) == [1.0, None]
    [(prompts, answers, columns)] = calls
    assert prompts == [[QUESTION, {"role": "assistant", "content": "2"}, QUESTION], [QUESTION]]
    assert answers == [
        [{"role": "assistant", "content": "two"}],
        [{"role": "assistant", "content": "3"}],
    ]
    assert columns == {
        "level": [3, None],
        "source": [None, "book"],
        "ground_truth": ["2", "4"],
        "answer": ["2", "4"],
    }


def test_a_function_gets_only_what_it_names():
    def reward(completions, answer, *, level, weight=0.25, **_):
        return [(completions[0][0]["content"] == answer[0]) * level[0] * weight]

    def named(level, completions, weight=2):
        return [weight * n for n in level]

    rows = [conversation("2", level=3, weight=None, ground_truth="2")]
    del rows[0]["user_data"][1]
    assert as_reward(reward)(rows) == [0.75]
    assert as_reward(named)(rows) == [6]


def test_columns_of_a_file_reach_the_reward(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "answer": 7, "level": "hard", "tests": [1, {"x": 2}]}\n')

    def reward(completions, answer, level, tests):
        assert (answer, level, tests) == (["7"], ["hard"], [[1, {"x": 2}]])
        return [1.0]

    assert compute_rewards(reward, read_jsonl(path)) == [1.0]


def test_columns_and_ground_truths_of_one_name():
    def reward(completions, answer, ground_truth):
        return [len(answer[0]), len(ground_truth[0])]

    row = [conversation("2", answer="mine", ground_truth="kept")]
    assert as_reward(reward)(row, ["given"]) == [4, 5]
    assert as_reward(reward)(row) == [4, 4]

    def one(completions, user):
        return [user]

    twice = [{"messages": [], "user_data": [("user", 1), ("user", 2), ("prompts", "x")]}]
    assert as_reward(one)(twice) == [[1]]  # the first, as user_data_get has it


def test_a_trajectory_without_a_completion():
    def reward(prompts, completions):
        assert prompts == [[QUESTION]] and completions == [[{"role": "assistant", "content": ""}]]
        return [0.0]

    assert as_reward(reward)([{"messages": [QUESTION]}]) == [0.0]


def test_columns_that_are_missing_are_named():
    def my_reward(completions, solution, answer, **columns):
        return []

    with pytest.raises(ValueError, match=r"my_reward .*level.* got solution, answer: "):
        as_reward(my_reward)([conversation("2", level=3)])


@pytest.mark.parametrize(
    "function",
    [
        lambda completion, answer: 1.0,
        lambda prompts, answers: [1.0],
        lambda: [1.0],
        lambda *args, **kwargs: [1.0],
        lambda t, g: [1.0],
        lambda trajectories, ground_truths, third: [1.0],
        lambda *, trajectories: [1.0],
        lambda *trajectories: [1.0],
        lambda completions, /: [1.0],
        lambda ground_truths, trajectories: [1.0],
        dict.fromkeys,
        FormatReward,
        5,
    ],
)
def test_other_signatures_are_refused_before_they_are_called(function):
    with pytest.raises(TypeError, match=r"^judge"):
        as_reward(function, argument="judge")


def test_rewards_need_no_jax():
    code = "import sys, twinkle_jax.reward as r; print('jax' in sys.modules, 'flax' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]


async def length(completions, **columns):
    await asyncio.sleep(0)
    return [float(len(completion[0]["content"])) for completion in completions]


class Length(Reward):
    needs_ground_truth = True

    async def __call__(self, trajectories, ground_truths=None):
        await asyncio.sleep(0)
        return [float(len(t["messages"][-1]["content"])) for t in trajectories]


class Judge:
    async def __call__(self, trajectories, ground_truths):
        return await length([t["messages"][-1:] for t in trajectories])


async def trajectories_alone(trajectories):
    return await Judge()(trajectories, None)


async def of_one(text, truth):
    await asyncio.sleep(0)
    return float(len(text))


def wrapped(completions, **columns):  # async, but not by its definition
    return length(completions)


def sometimes(text, truth):
    return 1.0 if text == "a" else of_one(text, truth)


ASYNC = [length, Length(), Judge(), trajectories_alone, FunctionReward(of_one),
         functools.partial(length, extra=1), FunctionReward(functools.partial(of_one)),
         FunctionReward(sometimes)]  # fmt: skip


@pytest.mark.parametrize("reward", ASYNC)
@pytest.mark.parametrize("timeout", [60.0, None])
def test_rewards_may_be_async(reward, timeout):
    trajectories = completions("a", "bcd", user_data=[("ground_truth", "x")])
    assert compute_rewards(reward, trajectories, timeout=timeout) == [1.0, 3.0]
    assert list(as_reward(reward)(trajectories, ["x"])) == [1.0, 3.0]


@pytest.mark.parametrize("reward", [wrapped, lambda trajectories, truths: Judge()(trajectories, 0)])
@pytest.mark.parametrize("timeout", [60.0, None])
def test_what_a_reward_returns_may_be_awaited(reward, timeout):
    assert compute_rewards(reward, completions("a", "bcd"), timeout=timeout) == [1.0, 3.0]


@pytest.mark.parametrize("returned", [None, 5.0, {"a": 1.0}])
def test_an_async_reward_returns_a_list(returned):
    class Wrong(Reward):
        async def __call__(self, trajectories, ground_truths=None):
            return returned

    with pytest.raises(TypeError, match=r"^Wrong must return a list of 1 numbers, got"):
        compute_rewards(Wrong(), completions("a"))


def test_what_an_async_reward_is_stays_known():
    assert as_reward(Length()).needs_ground_truth
    assert as_reward(Length()).__name__ == "Length"
    assert as_reward(trajectories_alone).__name__ == "trajectories_alone"


def test_async_calls_run_at_the_same_time_and_on_one_loop():
    """Each waits until all have begun; and what one call has made, the next one may use."""
    begun, loops = [], []

    async def judge(text, truth):
        begun.append(text)
        loops.append(asyncio.get_running_loop())
        while len(begun) < 20:
            await asyncio.sleep(0.001)
        return 1.0

    reward = FunctionReward(judge, needs_ground_truth=False)
    for _ in range(2):
        begun.clear()
        assert compute_rewards(reward, completions(*map(str, range(20))), timeout=30) == [1.0] * 20
    assert len(set(map(id, loops))) == 1


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_an_async_reward_that_fails_is_named_and_the_next_one_runs(error, nested):
    async def fail(text):
        await asyncio.sleep(0)
        if text == "b":
            raise error("no")
        return 1.0

    async def fragile(completions, **columns):
        texts = [completion[0]["content"] for completion in completions]
        if nested:
            return await asyncio.gather(*map(fail, texts))
        return [await fail(text) for text in texts]

    with pytest.raises(RuntimeError, match=rf"^fragile .*{error.__name__}: no .*for trajectory 1"):
        compute_rewards(fragile, completions("a", "b"), timeout=30)
    assert compute_rewards(length, completions("a"), timeout=30) == [1.0]


def test_threads_find_one_loop(monkeypatch):
    def slow():
        time.sleep(0.05)
        return new_event_loop()

    async def judge(trajectories):
        loops.add(id(asyncio.get_running_loop()))
        return [1.0]

    loops, new_event_loop = set(), asyncio.new_event_loop
    reward_module._start_loop.cache_clear()
    monkeypatch.setattr(asyncio, "new_event_loop", slow)
    threads = [
        threading.Thread(target=compute_rewards, args=(judge, completions("a"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loops) == 1


@pytest.mark.parametrize("call", [compute_rewards, lambda reward, rows: as_reward(reward)(rows)])
def test_a_call_that_would_wait_for_itself_is_refused(call):
    async def outer(trajectories):
        return call(length, trajectories)

    with pytest.raises(RuntimeError, match=r"^outer .* an async reward must be awaited in another"):
        compute_rewards(outer, completions("a"), timeout=30)
    assert compute_rewards(length, completions("a"), timeout=30) == [1.0]


def test_a_time_limit_within_an_async_reward_keeps_its_place():
    async def impatient(trajectories):
        await asyncio.wait_for(asyncio.sleep(60), 0.01)

    with pytest.raises(RuntimeError, match=r"^impatient .* TimeoutError.*test_reward\.py, line"):
        compute_rewards(impatient, completions("a"), timeout=30)


def test_an_async_reward_that_hangs_ends_in_time():
    async def hangs(completions, **columns):
        await asyncio.sleep(60)

    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"^hangs must return within"):
        compute_rewards(hangs, completions("a"), timeout=0.2)
    assert time.monotonic() - started < 30
    assert compute_rewards(length, completions("a"), timeout=30) == [1.0]
    assert all(thread.daemon for thread in threading.enumerate() if "reward" in thread.name)
