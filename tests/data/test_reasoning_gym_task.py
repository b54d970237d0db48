"""Tasks of reasoning-gym: which are allowed, and that no question is in both splits."""

import sys

import pytest

from twinkle_jax.data import ReasoningGymTask
from twinkle_jax.reward import ExactMatchReward

_GET = "pip install 'twinkle-jax[reasoning-gym]'"


@pytest.mark.parametrize("name", ["countdown", "n_queens", "puzzle24", "made_up"])
def test_tasks_that_are_not_allowed(name):
    with pytest.raises(ValueError, match=f"name must be one of base_conversion, .* got '{name}'"):
        ReasoningGymTask(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "test"}, "split must be 'train' or 'eval', got 'test'"),
        ({"size": 0}, "size must be a positive int, got 0"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ReasoningGymTask("chain_sum", **options)


def test_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"reasoning_gym must .*'twinkle-jax\[reasoning-gym\]'"):
        ReasoningGymTask("chain_sum")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ReasoningGymTask.allowed)
def test_questions_and_answers(name):
    pytest.importorskip("reasoning_gym", reason=_GET)
    train = ReasoningGymTask(name, size=40, instruction=" Be brief.")
    held_out = ReasoningGymTask(name, split="eval", size=10, instruction=" Be brief.")
    questions = [{p["messages"][0]["content"] for p in task} for task in (train, held_out)]
    assert questions[0].isdisjoint(questions[1])
    assert all(question.endswith(" Be brief.") for question in questions[0])
    assert train[0] == train[-40] == ReasoningGymTask(name, size=40, instruction=" Be brief.")[0]
    answer = dict(train[0]["user_data"])["ground_truth"]
    said = [{"messages": [{"role": "assistant", "content": answer}]}]
    assert ExactMatchReward()(said, train[:1]) == [1.0]
    assert train.fingerprint != held_out.fingerprint
