"""All estimators through Twinkle's face: by name, swapped for each other, with what they need."""

import copy
import pickle

import jax
import numpy as np
import pytest

from tests.advantage.cases import (
    COUNT,
    DATA,
    ESTIMATORS,
    GREEDY,
    LENGTHS,
    PROMPTS,
    ROWS,
    SIZE,
    rewards_of,
)
from twinkle_jax import advantage
from twinkle_jax.advantage import Advantage, GRPOAdvantage, RLOOAdvantage, get_advantage

REWARDS = rewards_of("graded")


NAMES = sorted(ESTIMATORS)
NEEDS = {  # what a call needs besides rewards
    name: {key: DATA[key] for key in case.data}
    | {k: v for k, v in case.settings.items() if k == "k"}
    for name, case in ESTIMATORS.items()
}


def _function(name):
    return getattr(advantage, f"{name}_advantage")


@pytest.mark.parametrize("name", NAMES)
def test_calls_the_function(name):
    estimator, function, needs = get_advantage(name), _function(name), NEEDS[name]
    assert isinstance(estimator, Advantage)
    assert type(estimator).function is function
    assert getattr(advantage, type(estimator).__name__) is type(estimator)
    # the hyper-parameters of others change nothing, so that estimators can be swapped
    others = {"gamma": 0.9, "gae_lambda": 0.5, "normalize": True, "k": 3} | needs
    scaled = name in ("grpo", "rloo")
    for scale in ("group", "batch", "none"):
        expected = function(
            REWARDS, num_generations=SIZE, **needs, **({"scale": scale} if scaled else {})
        )
        result = estimator(REWARDS.tolist(), num_generations=SIZE, scale=scale, **others)
        assert isinstance(result, jax.Array)
        np.testing.assert_array_equal(result, expected)
    missing = REWARDS.tolist()
    missing[2] = missing[9] = None
    where = ~np.isin(np.arange(COUNT), (2, 9))
    expected = function(REWARDS, num_generations=SIZE, where=where, **needs)
    np.testing.assert_array_equal(estimator(missing, SIZE, **needs), expected)
    again = estimator(missing, SIZE, where=np.arange(COUNT) != 4, **needs)
    assert again[4] == 0


@pytest.mark.parametrize("name", NAMES)
def test_one_generation_by_default(name):
    estimator, needs = get_advantage(name), NEEDS[name]
    if name == "remax":  # a greedy completion for each
        result = estimator(REWARDS[:PROMPTS], **needs)
        np.testing.assert_array_equal(result, REWARDS[:PROMPTS] - GREEDY)
    elif name in ("grpo", "reinforce"):
        np.testing.assert_array_equal(estimator(REWARDS), REWARDS)
    else:
        with pytest.raises(ValueError, match="num_generations must be at least 2, got 1"):
            estimator(REWARDS, **needs)


def test_own_hyper_parameters_arrive():
    for name in ("grpo", "rloo", "maxrl", "dgpo", "mc_grpo", "gdpo"):
        result = get_advantage(name)(REWARDS, SIZE, epsilon=10.0)
        np.testing.assert_array_equal(result, _function(name)(REWARDS, SIZE, epsilon=10.0))
    loo = get_advantage("pkpo")(REWARDS, SIZE, k=3, baseline="leave_one_out")
    np.testing.assert_array_equal(loo, ROWS["pkpo, leave one out"](REWARDS, where=None))
    low = get_advantage("pass_at_k")(REWARDS, SIZE, k=3, threshold=0.1)
    np.testing.assert_array_equal(low, ROWS["pass_at_k"](REWARDS, where=None, threshold=0.1))
    pair = np.stack([REWARDS, REWARDS[::-1]], axis=1)
    weighted = get_advantage("gdpo")(pair, SIZE, reward_weights=[1.0, 2.0])
    np.testing.assert_array_equal(weighted, ROWS["gdpo"](pair, reward_weights=[1.0, 2.0]))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_refused(name):
    estimator, needs = get_advantage(name), NEEDS[name]
    kind = type(estimator).__name__
    for wrong in ("mask", "values", "segment_ids", "reward_weight", "xyz"):
        with pytest.raises(TypeError, match=rf"{kind} got an unexpected .*'{wrong}'"):
            estimator(REWARDS, SIZE, **needs, **{wrong: REWARDS})
    for needed in needs:
        with pytest.raises(TypeError, match=rf"{kind} needs {needed}="):
            estimator(REWARDS, SIZE, **{k: v for k, v in needs.items() if k != needed})
    with pytest.raises(ValueError, match="scale must be one of"):
        estimator(REWARDS, SIZE, "std", **needs)
    for data in {"lengths", "greedy_rewards"} - set(needs):
        with pytest.raises(TypeError, match=rf"{data}.*which takes? {data}"):
            estimator(REWARDS, SIZE, **needs, **{data: LENGTHS})


def test_the_others_ignore_settings_but_no_data():
    for estimator in (GRPOAdvantage(), RLOOAdvantage()):
        result = estimator(REWARDS, SIZE, k=3, threshold=0.5, baseline="mean")
        np.testing.assert_array_equal(result, estimator(REWARDS, SIZE))
        with pytest.raises(TypeError, match="OPOAdvantage"):
            estimator(REWARDS, SIZE, lengths=LENGTHS)
        with pytest.raises(TypeError, match="ReMaxAdvantage"):
            estimator(REWARDS, SIZE, greedy_rewards=GREEDY)


@pytest.mark.parametrize("name", NAMES)
def test_objects_are_values(name):
    estimator, same = get_advantage(name), get_advantage(name)
    assert estimator == same and hash(estimator) == hash(same)
    assert len({get_advantage(n) for n in NAMES}) == len(NAMES)
    assert repr(estimator) == f"{type(estimator).__name__}()"
    assert copy.deepcopy(estimator) == estimator
    assert pickle.loads(pickle.dumps(estimator)) == estimator  # noqa: S301  (our own)
    with pytest.raises(AttributeError):
        estimator.k = 3


def test_names():
    for wrong in ("gae", "GRPO", "ppo", None, ["grpo"]):
        with pytest.raises(ValueError, match=r"'dgpo', .*'grpo', .*'pkpo', .*'rloo', got"):
            get_advantage(wrong)
    assert sorted(advantage.__all__) == sorted(set(advantage.__all__))
    assert all(hasattr(advantage, name) for name in advantage.__all__)
    functions = {f"{name}_advantage" for name in NAMES}
    over_time = {"gae_advantage", "reinforce_plus_plus_advantage"}
    found = {n for n in advantage.__all__ if n.endswith("_advantage") and "segment_" not in n}
    assert found - {"get_advantage"} == functions | over_time  # every one has its case


def test_a_class_of_a_user_has_a_name_if_it_wants_one():
    class Halved(Advantage, name="halved"):
        def __call__(self, rewards, num_generations=1, scale="group", **kwargs):
            return 0.5 * GRPOAdvantage()(rewards, num_generations, scale)

    assert isinstance(get_advantage("halved"), Halved)
    # it has no function whose settings others could ignore
    assert GRPOAdvantage()([0.0, 2.0], 2, "none", threshold=0.1).tolist() == [-1, 1]
