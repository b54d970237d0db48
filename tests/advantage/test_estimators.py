"""All estimators under Twinkle's names: found, swapped for each other, asked what they need."""

import copy
import inspect
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import twinkle_jax
from tests.advantage.cases import BY_NAME, COUNT, DATA, GREEDY, LENGTHS, PROMPTS, SIZE, rewards_of
from twinkle_jax import advantage, grpo_advantage, rloo_advantage
from twinkle_jax.advantage import (
    ESTIMATORS,
    Advantage,
    GAEAdvantage,
    GRPOAdvantage,
    RLOOAdvantage,
    get_advantage,
)

REWARDS = rewards_of("graded")
NEEDS = {  # what a call needs besides rewards
    name: {key: DATA[key] for key in case.data}
    | {k: v for k, v in case.settings.items() if k == "k"}
    for name, case in BY_NAME.items()
}


@pytest.mark.parametrize("name", BY_NAME)
def test_calls_the_function(name):
    estimator, function, needs = get_advantage(name), BY_NAME[name].function, NEEDS[name]
    assert isinstance(estimator, Advantage)
    assert getattr(advantage, type(estimator).__name__) is type(estimator)
    # the hyper-parameters of others change nothing, so that estimators can be swapped
    others = {"gamma": 0.9, "gae_lambda": 0.5, "normalize": True, "k": 3} | needs
    scaled = name in ("grpo", "rloo")
    for scale in ("group", "batch", "none"):
        settings = {"scale": scale} if scaled else {}
        expected = function(REWARDS, num_generations=SIZE, **needs, **settings)
        result = estimator(REWARDS.tolist(), num_generations=SIZE, scale=scale, **others)
        assert isinstance(result, jax.Array)
        np.testing.assert_array_equal(result, expected)
    missing = REWARDS.tolist()
    missing[2] = missing[9] = None
    where = ~np.isin(np.arange(COUNT), (2, 9))
    expected = function(REWARDS, num_generations=SIZE, where=where, **needs)
    np.testing.assert_array_equal(estimator(missing, SIZE, **needs), expected)
    assert estimator(missing, SIZE, where=np.arange(COUNT) != 4, **needs)[4] == 0


@pytest.mark.parametrize("name", BY_NAME)
def test_one_generation_by_default(name):
    estimator, needs = get_advantage(name), NEEDS[name]
    if name == "remax":  # a greedy completion for each
        result = estimator(REWARDS[:PROMPTS], **needs)
        np.testing.assert_array_equal(result, REWARDS[:PROMPTS] - GREEDY)
    elif name in ("grpo", "reinforce"):
        np.testing.assert_array_equal(estimator(REWARDS), REWARDS)
    else:
        with pytest.raises(ValueError, match="num_generations"):
            estimator(REWARDS, **needs)


def test_hyper_parameters_arrive():
    pair = np.stack([REWARDS, REWARDS[::-1]], axis=1)
    for name, rewards, options in (
        *((name, REWARDS, {"epsilon": 10.0}) for name in ("grpo", "rloo", "maxrl", "dgpo", "gdpo")),
        ("mc_grpo", REWARDS, {"epsilon": 10.0}),
        ("pkpo", REWARDS, {"k": 3, "baseline": "leave_one_out"}),
        ("pass_at_k", REWARDS, {"k": 3, "threshold": 0.1}),
        ("gdpo", pair, {"reward_weights": [1.0, 2.0]}),
    ):
        expected = BY_NAME[name].function(rewards, SIZE, **options)
        np.testing.assert_array_equal(get_advantage(name)(rewards, SIZE, **options), expected)
    mapped = jax.vmap(lambda r: GRPOAdvantage()(r, 6, "batch", axis_name="b"), axis_name="b")
    result = mapped(jnp.asarray(REWARDS).reshape(2, 12))
    np.testing.assert_allclose(result.ravel(), grpo_advantage(REWARDS, 6, "batch"), rtol=1e-6)


@pytest.mark.parametrize("name", BY_NAME)
def test_what_it_needs_and_what_its_hyper_parameters_are(name):
    estimator, needs = get_advantage(name), NEEDS[name]
    assert set(estimator.needs) == set(BY_NAME[name].data)
    known = estimator.hyper_parameters
    assert {option for option, needed in known.items() if needed} == set(needs) - set(DATA)
    takes = inspect.signature(BY_NAME[name].function).parameters
    every_call = {"rewards", "num_generations", "scale", "where", "reward_weights", "axis_name"}
    assert set(known) == set(takes) - every_call - set(DATA)


@pytest.mark.parametrize("name", BY_NAME)
def test_data_is_never_ignored(name):
    estimator, needs = get_advantage(name), NEEDS[name]
    for wrong in ("mask", "values", "segment_ids", "reward_weight", "xyz"):
        with pytest.raises(TypeError, match=f"{type(estimator).__name__} .*'{wrong}'"):
            estimator(REWARDS, SIZE, **needs, **{wrong: REWARDS})
    for needed in needs:
        with pytest.raises(TypeError, match=f"{needed}="):
            estimator(REWARDS, SIZE, **{k: v for k, v in needs.items() if k != needed})
    with pytest.raises(ValueError, match="scale"):
        estimator(REWARDS, SIZE, "std", **needs)
    takers = {"lengths": "OPOAdvantage", "greedy_rewards": "ReMaxAdvantage"}
    for data in takers.keys() - needs:
        with pytest.raises(TypeError, match=f"{data}.*{takers[data]}"):
            estimator(REWARDS, SIZE, **needs, **{data: LENGTHS})


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("mask", "where="), ("masks", "where="), ("values", "GAEAdvantage"),
        ("segment_ids", "segment_"), ("eps", "epsilon="), ("reward_weight", "reward_weights="),
        ("num_generation", "num_generations="), ("wher", "where="), ("xyz", "where"),
    ],
)  # fmt: skip
def test_unknown_names_get_a_suggestion(name, suggestion):
    with pytest.raises(TypeError, match=f"'{name}'.*{suggestion}"):
        RLOOAdvantage()(REWARDS, num_generations=SIZE, **{name: [True] * COUNT})


def test_hyper_parameters_over_time_are_those_of_gae():
    over_time = dict.fromkeys(inspect.signature(GAEAdvantage).parameters, 1)
    GRPOAdvantage()(REWARDS, SIZE, **over_time)


def test_none_in_a_list_means_missing():
    rewards, where = [0.0, None, 2.0, 1.0, 3.0, None], [True, False, True, True, True, False]
    filled = [0.0, 9.0, 2.0, 1.0, 3.0, 9.0]
    for kind, function in ((GRPOAdvantage, grpo_advantage), (RLOOAdvantage, rloo_advantage)):
        for scale in ("group", "batch", "none"):
            result = kind()(rewards, num_generations=3, scale=scale)
            assert result.tolist() == function(filled, 3, scale, where=where).tolist()
    also = GRPOAdvantage()(rewards, 3, "none", where=[True] * 3 + [False] + [True] * 2)
    assert also.tolist() == [-1, 0, 1, 0, 0, 0]
    assert GRPOAdvantage()([None] * 4, 2).tolist() == [0] * 4
    with pytest.raises(ValueError, match=r"^rewards must be .* rows of equal length"):
        GRPOAdvantage()([[None], [1.0, 2.0]], 2)
    assert GRPOAdvantage()((None, 1, 2, True), 2, "none").tolist() == [0, 0, 0.5, -0.5]


def test_none_among_components():
    rewards = [[1.0, None], [2.0, 3.0], None, [4.0, 1.0]]
    filled = [[1.0, 0.0], [2.0, 3.0], [0.0, 0.0], [4.0, 1.0]]
    present = np.array([[True, False], [True, True], [False, False], [True, True]])
    expected = grpo_advantage(filled, 4, "none", where=present)
    assert GRPOAdvantage()(rewards, 4, "none").tolist() == expected.tolist()
    fewer = GRPOAdvantage()(rewards, 4, "none", where=[False, True, True, True])
    assert fewer.tolist() == [0, 0, 0, 0]  # 5, missing, 5
    cells = np.array([[True, True], [True, False], [True, True], [True, True]])
    one_less = GRPOAdvantage()(rewards, 4, "none", where=cells)
    expected = grpo_advantage(filled, 4, "none", where=present & cells)
    assert one_less.tolist() == expected.tolist()


@pytest.mark.parametrize("name", BY_NAME)
def test_objects_are_values(name):
    estimator, same = get_advantage(name), get_advantage(name)
    assert estimator == same and hash(estimator) == hash(same)
    assert len({get_advantage(n) for n in BY_NAME}) == len(BY_NAME)
    assert repr(estimator) == f"{type(estimator).__name__}()"
    assert copy.deepcopy(estimator) == estimator
    assert pickle.loads(pickle.dumps(estimator)) == estimator  # noqa: S301  (our own)
    with pytest.raises(AttributeError):
        estimator.k = 3


def test_names():
    for wrong in ("gae", "GRPO", "ppo", None, ["grpo"]):
        with pytest.raises(ValueError, match=r"name .*'dgpo', .*'grpo', .*'rloo'"):
            get_advantage(wrong)
    assert set(ESTIMATORS) == set(BY_NAME)
    assert sorted(advantage.__all__) == sorted(set(advantage.__all__))
    assert all(hasattr(advantage, name) for name in advantage.__all__)
    functions = {f"{name}_advantage" for name in BY_NAME}
    over_time = {"gae_advantage", "reinforce_plus_plus_advantage", "turn_gae_advantage"}
    public = {n for n in advantage.__all__ if n.endswith("_advantage") and "segment_" not in n}
    assert public - {"get_advantage"} == functions | over_time  # every one has its case
    assert set(twinkle_jax.__all__) == {
        "GRPOAdvantage", "RLOOAdvantage", "__version__", "grpo_advantage", "rloo_advantage",
    }  # fmt: skip
    assert twinkle_jax.GRPOAdvantage is GRPOAdvantage


def test_a_class_of_a_user(monkeypatch):
    monkeypatch.setattr("twinkle_jax.advantage.estimators.ESTIMATORS", dict(ESTIMATORS))

    class Halved(Advantage, name="halved"):
        def __call__(
            self, rewards, num_generations=1, scale="group", *, where=None, lengths, bonus, **other
        ):
            return 0.5 * GRPOAdvantage()(rewards, num_generations, scale) + bonus

    halved = get_advantage("halved")
    assert isinstance(halved, Halved)
    assert halved([0.0, 2.0], 2, "none", lengths=[1, 1], bonus=1.0).tolist() == [0.5, 1.5]
    assert halved.needs == ("lengths",)
    assert halved.hyper_parameters == {"bonus": True}
    # it has no function whose settings others could ignore
    assert GRPOAdvantage()([0.0, 2.0], 2, "none", threshold=0.1).tolist() == [-1, 1]
    with pytest.raises(TypeError):
        Advantage()


def test_importing_is_light():
    heavy = "flax optax chex torch transformers matplotlib rich safetensors orbax scipy"
    code = (
        "import sys, twinkle_jax; from twinkle_jax.advantage import *; "
        "from twinkle_jax import GRPOAdvantage; GRPOAdvantage()([1.0, 2.0], num_generations=2); "
        f"print([m for m in '{heavy}'.split() if m in sys.modules])"
    )
    jax_alone = f"import sys, jax.numpy; print([m for m in '{heavy}'.split() if m in sys.modules])"
    outputs = [
        subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, check=True
        ).stdout.strip()
        for text in (jax_alone, code)
    ]
    assert outputs[1] == outputs[0]  # jax itself may import some (scipy); we add none
