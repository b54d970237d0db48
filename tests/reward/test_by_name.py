"""Rewards by name: the built-in ones, a user's own from a file or a module, and several at once."""

import sys

import pytest

from tests.reward import completions
from twinkle_jax.reward import (
    ExactMatchReward,
    GSM8KAccuracyReward,
    MathReward,
    compute_rewards,
    find_reward,
    find_rewards,
    score_trajectories,
)

OWN = """
from __future__ import annotations  # dataclasses look their module up

from dataclasses import dataclass

from twinkle_jax.reward import Reward


def half(trajectories, truths):
    return [0.5 for _ in trajectories]


def long(completions, **columns):
    return [len(completion[0]["content"]) for completion in completions]


def wrong(completion, answer):
    return 1.0


class Quarter(Reward):
    def __call__(self, trajectories, ground_truths=None):
        return [0.25 for _ in trajectories]


@dataclass
class Needs:
    something: int

    def __call__(self, trajectories, ground_truths):
        return []


made = Quarter()
number = 3
"""
ANSWERS = completions("4")


@pytest.fixture
def rewards_file(tmp_path):
    file = tmp_path / "own_rewards.py"
    file.write_text(OWN)
    yield str(file)
    sys.modules.pop("own_rewards", None)


def test_a_file_without_a_name_is_answered_with_its_names(rewards_file):
    with pytest.raises(ValueError, match=r"has .*half, .* as .*own_rewards.py:NAME; got ''"):
        find_reward(rewards_file)


def test_built_in_names():
    assert isinstance(find_reward("exact"), ExactMatchReward)
    assert isinstance(find_reward("math"), MathReward)
    assert isinstance(find_reward("gsm8k"), GSM8KAccuracyReward)


@pytest.mark.parametrize(
    ("name", "worth"), [("half", 0.5), ("Quarter", 0.25), ("made", 0.25), ("long", 1)]
)
def test_a_function_a_class_or_a_reward_of_a_file(rewards_file, name, worth):
    reward = find_reward(f"{rewards_file}:{name}")
    assert compute_rewards(reward, ANSWERS) == [worth]
    assert reward(ANSWERS, None) == [worth]  # whatever its own signature


def test_a_function_of_a_module():
    assert find_reward("tests.training.recorded_reward:short_answers").__name__ == "short_answers"


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("mathematics", ValueError, "exact.*MODULE:NAME"),
        (":half", ValueError, ":half"),
        ("nowhere.py:half", ValueError, "not found.*nowhere.py"),
        ("no_such_module:half", ValueError, "not found.*no_such_module"),
        ("no_such.module:half", ValueError, "not found.*no_such.module"),
        # without what the file imports: Reward, dataclass
        ("FILE:third", ValueError, "has half, long, wrong, Quarter, Needs, made, as .*'third'"),
        ("FILE:number", TypeError, "3"),
        ("FILE:wrong", TypeError, r"wrong\(completion, answer\)"),
        ("FILE:Needs", ValueError, "without arguments.*'Needs'.*something"),
    ],
)
def test_what_is_not_there_is_named_with_the_option(rewards_file, name, error, message):
    with pytest.raises(error, match=f"^judge.*{message}"):
        find_reward(name.replace("FILE:", f"{rewards_file}:"), argument="judge")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1\ny = 1 / 0\n", "ZeroDivisionError.*line 2"),
        ("x = 1\n\ndef f(:\n", "SyntaxError.*line 3"),
        ("import no_such_package\n", "ModuleNotFoundError.*no_such_package.*line 1"),
        ("import json\njson.loads('{')\n", "JSONDecodeError.*line 2"),  # not json's own line
        ("import sys\n\n\nsys.exit(0)\n", "SystemExit.*line 4"),
    ],
)
def test_a_file_that_raises_is_named_with_the_line(tmp_path, code, message):
    (tmp_path / "broken_rewards.py").write_text(code)
    with pytest.raises(ValueError, match=rf"^reward .*{message}") as caught:
        find_reward(f"{tmp_path}/broken_rewards.py:f")
    assert "broken_rewards.py, line" in str(caught.value)
    assert "broken_rewards" not in sys.modules


def test_a_module_that_imports_what_is_missing_is_not_itself_missing(tmp_path, monkeypatch):
    (tmp_path / "module_with_rewards.py").write_text("\nimport no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"no_such_package.*module_with_rewards.py, line 2"):
        find_reward("module_with_rewards:f")


def test_modules_beside_a_file_and_in_the_current_directory_are_found(tmp_path, monkeypatch):
    """As a script finds them; the command's own path does not have the current directory."""
    (tmp_path / "of_a_user.py").write_text("def score(completions): return [3.0]\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "beside.py").write_text("WORTH = 4.0\n")
    file = tmp_path / "sub" / "rewards.py"
    file.write_text("import beside\ndef score(completions): return [beside.WORTH]\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    assert compute_rewards(find_reward("of_a_user:score"), ANSWERS) == [3.0]
    assert compute_rewards(find_reward(f"{file}:score"), ANSWERS) == [4.0]
    assert sys.path[-2:] == [str(tmp_path), str(tmp_path / "sub")]  # behind what is installed
    for name in ("of_a_user", "beside"):
        monkeypatch.delitem(sys.modules, name)


def test_an_interrupt_while_a_file_is_imported_is_an_interrupt(tmp_path):
    (tmp_path / "slow_rewards.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        find_reward(f"{tmp_path}/slow_rewards.py:f")


def test_several_rewards(rewards_file):
    combined = find_rewards(
        ["exact", f"{rewards_file}:half", f"{rewards_file}:Quarter"], [2, 1, -1]
    )
    assert combined.weights == {"exact": 2.0, "half": 1.0, "Quarter": -1.0}
    scores = score_trajectories(combined, ANSWERS, ["4"])
    assert scores.rewards == [2 * 1 + 0.5 - 0.25]
    assert scores.components == {"exact": [1.0], "half": [0.5], "Quarter": [0.25]}


def test_one_reward_alone():
    for names in ("exact", ["exact"]):
        scores = score_trajectories(find_rewards(names), ANSWERS, ["4"])
        assert scores == ([1.0], {"exact": [1.0]})


def test_functions_of_one_name_in_two_files(rewards_file, tmp_path):
    other = tmp_path / "other.py"
    other.write_text("def half(trajectories): return [2.0 for _ in trajectories]")
    both = find_rewards([f"{rewards_file}:half", f"{other}:half"], (1, 2))
    scores = score_trajectories(both, ANSWERS)
    assert scores.components == {f"{rewards_file}:half": [0.5], f"{other}:half": [2.0]}
    assert scores.rewards == [4.5]


@pytest.mark.parametrize(
    ("names", "weights", "message"),
    [
        ([], None, "^reward "),
        (["exact", "exact"], None, "^reward .*exact"),
        (["exact", "nothing"], None, "^reward .*nothing"),
        (["exact", "math"], [1], "^reward_weights"),
        ("exact", [float("nan")], "^reward_weights"),
        (["exact", "math"], [0, 0.0], "^reward_weights"),
    ],
)
def test_names_and_weights_that_are_refused(names, weights, message):
    with pytest.raises(ValueError, match=message):
        find_rewards(names, weights)
