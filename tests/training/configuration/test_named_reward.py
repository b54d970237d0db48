"""Rewards by name: those that are built in, and a user's own from a file or a module."""

import re

import pytest

from twinkle_jax.reward import ExactMatchReward, GSM8KAccuracyReward, MathReward, compute_rewards
from twinkle_jax.training.configuration.named_reward import find_reward

OWN = """
from twinkle_jax.reward import Reward

def half(trajectories, truths):
    return [0.5 for _ in trajectories]

class Quarter(Reward):
    def __call__(self, trajectories, ground_truths=None):
        return [0.25 for _ in trajectories]

made = Quarter()
number = 3
"""


def test_built_in_names():
    assert isinstance(find_reward("exact"), ExactMatchReward)
    assert isinstance(find_reward("math"), MathReward)
    assert isinstance(find_reward("gsm8k"), GSM8KAccuracyReward)


@pytest.mark.parametrize(("name", "worth"), [("half", 0.5), ("Quarter", 0.25), ("made", 0.25)])
def test_a_function_a_class_or_a_reward_of_a_file(tmp_path, name, worth):
    file = tmp_path / "own_rewards.py"
    file.write_text(OWN)
    said = [{"messages": [{"role": "assistant", "content": "4"}]}]
    assert compute_rewards(find_reward(f"{file}:{name}"), said) == [worth]


def test_a_function_of_a_module():
    assert find_reward("tests.training.recorded_reward:short_answers").__name__ == "short_answers"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mathematics", "reward must be one of exact, math, gsm8k, FILE.py:NAME or MODULE:NAME"),
        (":half", "got ':half'"),
        ("nowhere.py:half", "reward must be in a file that is there, got 'nowhere.py'"),
        ("no_such_module:half", "reward must be in a module that is there, got 'no_such_module'"),
        ("FILE:third", "reward must name what can be called in .*own_rewards.py, got 'third'"),
        ("FILE:number", "got 'number'"),
    ],
)
def test_what_is_not_there_is_named(tmp_path, name, message):
    file = tmp_path / "own_rewards.py"
    file.write_text(OWN)
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\*", ".*")):
        find_reward(name.replace("FILE:", f"{file}:"))
