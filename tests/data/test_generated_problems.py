"""Problems made up: right answers, the same ones every time, and none in both splits."""

import ast
import operator
import sys

import pytest

from twinkle_jax.data import ArithmeticTask, ReasoningGymTask
from twinkle_jax.reward import ExactMatchReward

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
LEVELS = [1, 2, 3, 4, 5, 6]


def _value(node):
    """Compute an expression from its syntax tree, which is independent of the task's own way."""
    if isinstance(node, ast.Constant):
        return node.value
    return OPERATORS[type(node.op)](_value(node.left), _value(node.right))


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("level", LEVELS)
def test_answers_are_right(level, split):
    task = ArithmeticTask(level, split=split, size=200)
    for prompt in task:
        (message,) = prompt["messages"]
        assert message["role"] == "user" and message["content"].endswith("=")
        tree = ast.parse(message["content"][:-1], mode="eval").body
        assert prompt["user_data"] == [("ground_truth", str(_value(tree)))]


@pytest.mark.parametrize("level", LEVELS)
def test_no_problem_is_in_both_splits(level):
    train = {
        ArithmeticTask(level, size=3000, seed=seed).problem(i)[0]
        for seed in (0, 1)
        for i in range(1500)
    }
    held_out = {
        ArithmeticTask(level, split="eval", size=3000, seed=seed).problem(i)[0]
        for seed in (0, 1)
        for i in range(500)
    }
    assert train and held_out and train.isdisjoint(held_out)


def test_splits_share_all_sums_of_digits():
    train = {p["messages"][0]["content"] for p in ArithmeticTask(1, size=3000)}
    held_out = {p["messages"][0]["content"] for p in ArithmeticTask(1, split="eval", size=3000)}
    assert len(train | held_out) == 100 and 10 <= len(held_out) <= 30


def test_the_same_problems_in_every_process():
    # Written down: a checkpoint that is resumed elsewhere must find the same prompts.
    task = ArithmeticTask(2, size=10)
    assert [task.problem(i)[0] for i in range(3)] == ["12+37", "23+11", "41+17"]
    assert task[3] == ArithmeticTask(2, size=10)[3] == task[-7]
    assert task[2:4] == [task[2], task[3]]
    seeds = {ArithmeticTask(5, seed=seed).problem(0)[0] for seed in range(10)}
    assert len(seeds) == 10
    with pytest.raises(IndexError):
        task[10]


def test_other_prompts():
    task = ArithmeticTask(1, prompt="What is {problem}?")
    assert task[0]["messages"][0]["content"] == f"What is {task.problem(0)[0]}?"


def test_fingerprints_differ():
    tasks = [
        ArithmeticTask(1),
        ArithmeticTask(2),
        ArithmeticTask(1, split="eval"),
        ArithmeticTask(1, size=5),
        ArithmeticTask(1, seed=1),
        ArithmeticTask(1, prompt="{problem}?"),
    ]
    assert len({task.fingerprint for task in tasks}) == len(tasks)


@pytest.mark.parametrize(
    ("options", "argument"),
    [({"level": 7}, "level"), ({"prompt": "hello"}, "prompt"), ({"split": "test"}, "split")],
)
def test_arguments_of_arithmetic_that_are_refused(options, argument):
    with pytest.raises(ValueError, match=argument):
        ArithmeticTask(**options)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"name": "countdown"}, "name"),  # not one written answer
        ({"name": "made_up"}, "name"),
        ({"split": "test"}, "split"),
        ({"size": 0}, "size"),
        ({"size": True}, "size"),
    ],
)
def test_arguments_of_reasoning_gym_that_are_refused(options, argument):
    with pytest.raises(ValueError, match=argument):
        ReasoningGymTask(**{"name": "chain_sum", **options})


def test_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match="reasoning_gym"):
        ReasoningGymTask("chain_sum")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ReasoningGymTask.allowed)
def test_questions_and_answers(name):
    pytest.importorskip("reasoning_gym", reason="pip install 'twinkle-jax[reasoning-gym]'")
    train = ReasoningGymTask(name, size=40, instruction=" Be brief.")
    held_out = ReasoningGymTask(name, split="eval", size=10, instruction=" Be brief.")
    questions = [{p["messages"][0]["content"] for p in task} for task in (train, held_out)]
    assert questions[0].isdisjoint(questions[1])
    assert all(question.endswith(" Be brief.") for question in questions[0])
    assert train[0] == train[-40] == ReasoningGymTask(name, size=40, instruction=" Be brief.")[0]
    answer = dict(train[0]["user_data"])["ground_truth"]
    completion = {"messages": [{"role": "assistant", "content": answer}]}
    assert ExactMatchReward()([completion], train[:1]) == [1.0]
    assert train.fingerprint != held_out.fingerprint
