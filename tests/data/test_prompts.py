"""Generated problems, and the loader."""

import ast
import copy
import json
import operator
import sys

import pytest

from twinkle_jax.data import ArithmeticTask, PromptLoader, ReasoningGymTask
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


PROMPTS = [
    {"messages": [{"role": "user", "content": str(i)}], "user_data": [("ground_truth", i)]}
    for i in range(10)
]


def _seen(loader, batches=None):
    batches = list(loader) if batches is None else [next(loader) for _ in range(batches)]
    return [batch.ground_truths for batch in batches]


def test_each_prompt_once_an_epoch():
    batches = _seen(PromptLoader(PROMPTS, 4, epochs=3))
    assert [len(batch) for batch in batches] == [4] * 7 + [2]
    order = [i for batch in batches for i in batch]
    epochs = [order[:10], order[10:20], order[20:]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_prompts_are_dictionaries():
    with pytest.raises(TypeError, match="a trajectory must be a dictionary"):
        next(PromptLoader(["1+1="], 1))


def test_without_shuffling():
    batches = _seen(PromptLoader(PROMPTS, 4, shuffle=False, epochs=1))
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_the_seed_is_the_order():
    first = _seen(PromptLoader(PROMPTS, 5, epochs=1))
    assert first == _seen(PromptLoader(PROMPTS, 5, epochs=1))
    assert first != _seen(PromptLoader(PROMPTS, 5, epochs=1, seed=1))


def test_batches_are_prompts_with_their_truths():
    (batch,) = PromptLoader(PROMPTS[:2], 2, shuffle=False, epochs=1)
    assert batch == PROMPTS[:2] and isinstance(batch, list)
    assert batch.ground_truths == [0, 1]


@pytest.mark.parametrize(
    "change",
    [
        lambda prompt: prompt["messages"][0].update(content="changed"),
        lambda prompt: prompt["messages"].append({"role": "assistant", "content": "x"}),
        lambda prompt: dict(prompt["user_data"])["tests"][0].pop("in"),
        lambda prompt: prompt["user_data"].clear(),
        lambda prompt: prompt.pop("user_data"),
    ],
)
def test_what_is_changed_in_a_batch_does_not_change_the_data(change):
    """A reward may strip texts in place; later epochs see them as they were."""
    prompts = [
        {"messages": [{"role": "user", "content": "a"}], "user_data": [("tests", [{"in": [1]}])]}
    ]
    before = copy.deepcopy(prompts)
    loader = PromptLoader(prompts, 1)
    change(next(loader)[0])
    assert next(loader) == before == prompts


def test_for_ever_by_default():
    loader = PromptLoader(PROMPTS, 4)
    assert len(_seen(loader, 25)) == 25 and loader.epoch == 10


@pytest.mark.parametrize("prompts", [PROMPTS, ArithmeticTask(2, size=10)], ids=["list", "task"])
def test_it_goes_on_where_it_was(prompts):
    """At the start, in an epoch, across its end, at the end of another, before the last batch."""
    options = {"batch_size": 4, "seed": 3, "epochs": 3}
    loader = PromptLoader(prompts, **options)
    states = [json.dumps(loader.get_state())]
    batches = []
    for batch in loader:
        batches.append(batch)
        states.append(json.dumps(loader.get_state()))
    assert len(batches) == 8
    resumed = PromptLoader(prompts, **options)
    for done in (8, 7, 5, 3, 2, 0):
        resumed.set_state(json.loads(states[done]))
        assert resumed.epoch == min(done * 4, 30) // 10
        assert list(resumed) == batches[done:]


def test_a_state_is_a_copy():
    loader = PromptLoader(PROMPTS, 4)
    loader.get_state()["fingerprint"]["batch_size"] = 5
    assert loader.get_state()["fingerprint"]["batch_size"] == 4


def test_more_epochs_may_follow():
    loader = PromptLoader(PROMPTS, 5, epochs=1)
    first = _seen(loader)
    longer = PromptLoader(PROMPTS, 5, epochs=2)
    longer.set_state(loader.get_state())
    assert first + _seen(longer) == _seen(PromptLoader(PROMPTS, 5, epochs=2))


OTHERS = [
    ("batch_size", {"batch_size": 5}),
    ("seed", {"seed": 1}),
    ("shuffle", {"shuffle": False}),
    ("prompts", {"prompts": PROMPTS[:9]}),
    ("data", {"prompts": [*PROMPTS[:9], PROMPTS[0]]}),
    ("data", {"prompts": [{**p, "user_data": [("ground_truth", 5)]} for p in PROMPTS]}),
    ("data", {"prompts": PROMPTS[::-1]}),
]


@pytest.mark.parametrize(("name", "other"), OTHERS, ids=lambda x: x if isinstance(x, str) else "")
def test_another_loader_refuses_the_state(name, other):
    loader = PromptLoader(**{"prompts": PROMPTS, "batch_size": 4})
    next(loader)
    with pytest.raises(ValueError, match=f"^{name}"):
        PromptLoader(**{"prompts": PROMPTS, "batch_size": 4, **other}).set_state(loader.get_state())


def test_another_order_refuses_the_state():
    """As another version of what shuffles would give."""
    loader = PromptLoader(PROMPTS, 4)
    state = loader.get_state()
    state["fingerprint"]["order"] = "0"
    with pytest.raises(ValueError, match=r"^order"):
        loader.set_state(state)


@pytest.mark.parametrize(
    "state", [{}, {"position": 1}, {"position": -1, "fingerprint": {}}, {"position": "1"}]
)
def test_states_that_are_none(state):
    with pytest.raises(ValueError, match=r"^state"):
        PromptLoader(PROMPTS, 4).set_state(state)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("batch_size", True),
        ("batch_size", 2.0),
        ("epochs", 0),
        ("seed", -1),
        ("prompts", []),
    ],
)
def test_arguments_that_are_refused(name, value):
    with pytest.raises(ValueError, match=f"^{name}"):
        PromptLoader(**{"prompts": PROMPTS, "batch_size": 4, name: value})


def test_the_loader_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ImportError, match=r"twinkle-jax\[data\]"):
        PromptLoader(PROMPTS, 4)
