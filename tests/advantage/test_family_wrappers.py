"""The family through Twinkle's face: by name, swapped for each other, with what each one needs."""

import copy
import pickle

import jax
import numpy as np
import pytest

from tests.advantage.family import COUNT, GREEDY, LENGTHS, ROWS, SIZE, rewards_of
from twinkle_jax import advantage
from twinkle_jax.advantage import Advantage, GRPOAdvantage, RLOOAdvantage, get_advantage

# Name for get_advantage: class, the same in ROWS, and what the call needs besides.
FAMILY = {
    "remax": ("ReMaxAdvantage", "remax", {"greedy_rewards": GREEDY}),
    "opo": ("OPOAdvantage", "opo", {"lengths": LENGTHS}),
    "gdpo": ("GDPOAdvantage", "gdpo", {}),
    "maxrl": ("MaxRLAdvantage", "maxrl", {}),
    "dgpo": ("DGPOAdvantage", "dgpo", {}),
    "mc_grpo": ("MCGRPOAdvantage", "mc_grpo", {}),
    "pass_at_k": ("PassAtKAdvantage", "pass_at_k", {"k": 3}),
    "pkpo": ("PKPOAdvantage", "pkpo, mean", {"k": 3}),
    "reinforce_plus_plus_baseline": (
        "ReinforcePlusPlusBaselineAdvantage",
        "reinforce++",
        {"lengths": LENGTHS},
    ),
}
REWARDS = rewards_of("graded")


@pytest.mark.parametrize("name", FAMILY)
def test_calls_the_function(name):
    kind, row, needs = FAMILY[name]
    estimator = get_advantage(name)
    assert type(estimator) is getattr(advantage, kind)
    assert isinstance(estimator, Advantage)
    expected = ROWS[row](REWARDS, where=None)
    # scale and the hyper-parameters of others change nothing, so that estimators can be swapped
    others = {"gamma": 0.9, "gae_lambda": 0.5, "normalize": True} | {"k": 3} | needs
    for scale in ("group", "batch", "none"):
        result = estimator(REWARDS.tolist(), num_generations=SIZE, scale=scale, **others)
        assert isinstance(result, jax.Array)
        np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(estimator(REWARDS, SIZE, **needs), expected)
    missing = REWARDS.tolist()
    missing[2] = missing[9] = None
    where = ~np.isin(np.arange(COUNT), (2, 9))
    result = estimator(missing, SIZE, **needs)
    np.testing.assert_array_equal(result, ROWS[row](REWARDS, where=where))
    again = estimator(missing, SIZE, where=np.arange(COUNT) != 4, **needs)
    assert again[4] == 0


def test_own_hyper_parameters_arrive():
    for name in ("maxrl", "dgpo", "mc_grpo", "gdpo"):
        result = get_advantage(name)(REWARDS, SIZE, epsilon=10.0)
        np.testing.assert_array_equal(result, ROWS[name](REWARDS, where=None, epsilon=10.0))
    loo = get_advantage("pkpo")(REWARDS, SIZE, k=3, baseline="leave_one_out")
    np.testing.assert_array_equal(loo, ROWS["pkpo, leave one out"](REWARDS, where=None))
    low = get_advantage("pass_at_k")(REWARDS, SIZE, k=3, threshold=0.1)
    np.testing.assert_array_equal(low, ROWS["pass_at_k"](REWARDS, where=None, threshold=0.1))
    pair = np.stack([REWARDS, REWARDS[::-1]], axis=1)
    weighted = get_advantage("gdpo")(pair, SIZE, reward_weights=[1.0, 2.0])
    np.testing.assert_array_equal(weighted, ROWS["gdpo"](pair, reward_weights=[1.0, 2.0]))


@pytest.mark.parametrize("name", FAMILY)
def test_what_is_refused(name):
    kind, _, needs = FAMILY[name]
    estimator = get_advantage(name)
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


@pytest.mark.parametrize("name", FAMILY)
def test_objects_are_values(name):
    estimator = get_advantage(name)
    same = get_advantage(name)
    assert estimator == same and hash(estimator) == hash(same)
    assert estimator != GRPOAdvantage()
    assert len({get_advantage(n) for n in FAMILY}) == len(FAMILY)
    assert repr(estimator) == f"{FAMILY[name][0]}()"
    assert copy.deepcopy(estimator) == estimator
    assert pickle.loads(pickle.dumps(estimator)) == estimator  # noqa: S301  (our own)
    with pytest.raises(AttributeError):
        estimator.k = 3


def test_names():
    with pytest.raises(ValueError, match=r"'dgpo', .*'grpo', .*'pkpo', .*'rloo', got 'gae'"):
        get_advantage("gae")
    assert sorted(advantage.__all__) == sorted(set(advantage.__all__))
    assert all(hasattr(advantage, name) for name in advantage.__all__)
