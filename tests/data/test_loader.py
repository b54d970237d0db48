"""The loader: every prompt once an epoch, in an order that a checkpoint continues."""

import copy
import json
import sys

import pytest

from twinkle_jax.data import ArithmeticTask, PromptLoader

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


def test_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ImportError, match=r"twinkle-jax\[data\]"):
        PromptLoader(PROMPTS, 4)
