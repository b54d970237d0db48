"""Each estimator worked by hand, and GRPO and RLOO against Twinkle's own numbers."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from tests.advantage import reference
from tests.advantage.cases import (
    COUNT,
    IDS,
    INF,
    KEEP,
    NAN,
    PROMPTS,
    SIZE,
    close,
    rewards_of,
)
from tests.model.families import each
from twinkle_jax import grpo_advantage, rloo_advantage
from twinkle_jax.advantage import (
    dgpo_advantage,
    gdpo_advantage,
    get_advantage,
    maxrl_advantage,
    mc_grpo_advantage,
    opo_advantage,
    reinforce_advantage,
    reinforce_plus_plus_baseline_advantage,
    remax_advantage,
)

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden/advantage_cases.json").read_text())


@pytest.mark.parametrize("start", each(range(5)))
def test_golden_numbers_of_twinkle(start):
    # every fifth case by default, in which both estimators have all scales; then the others
    functions = {"grpo": grpo_advantage, "rloo": rloo_advantage}
    for case in GOLDEN["cases"][start::5]:
        call = {"num_generations": case["num_generations"], "scale": case["scale"]}
        for function in (get_advantage(case["estimator"]), functions[case["estimator"]]):
            np.testing.assert_allclose(
                function(case["rewards"], **call),
                case["advantages"],
                **GOLDEN["tolerance"],
                err_msg=case["name"],
            )


def test_grpo():
    # group 1: mean 2, deviations -2 0 2, variance (4 + 0 + 4) / 2 = 4, standard deviation 2
    # group 2: mean 5, deviations -1 1 0, variance (1 + 1 + 0) / 2 = 1, standard deviation 1
    rewards = [0.0, 2.0, 4.0, 4.0, 6.0, 5.0]
    assert grpo_advantage(rewards, 3, "none").tolist() == [-2, 0, 2, -1, 1, 0]
    np.testing.assert_allclose(grpo_advantage(rewards, 3), [-1, 0, 1, -1, 1, 0], atol=1e-7)
    # all six: mean 3.5, squared deviations 12.25 2.25 .25 .25 6.25 2.25, sum 23.5, over 5: 4.7
    np.testing.assert_allclose(
        grpo_advantage(rewards, 3, "batch"), np.array([-2, 0, 2, -1, 1, 0]) / 4.7**0.5, rtol=1e-6
    )


def test_rloo():
    # group 1: others' means 3, 2, 1; group 2: 5.5, 4.5, 5
    rewards = [0.0, 2.0, 4.0, 4.0, 6.0, 5.0]
    expected = np.array([-3, 0, 3, -1.5, 1.5, 0])
    assert rloo_advantage(rewards, 3, "none").tolist() == expected.tolist()
    np.testing.assert_allclose(rloo_advantage(rewards, 3), expected / [2, 2, 2, 1, 1, 1], atol=1e-6)
    np.testing.assert_allclose(rloo_advantage(rewards, 3, "batch"), expected / 4.7**0.5, rtol=1e-6)


def test_one_generation_takes_the_batch_as_the_group():
    # mean 2, deviations -2 0 2, standard deviation 2
    rewards = [0.0, 2.0, 4.0]
    assert grpo_advantage(rewards).tolist() == rewards
    assert grpo_advantage(rewards, 1, "none").tolist() == [-2, 0, 2]
    np.testing.assert_allclose(grpo_advantage(rewards, 1, "batch"), [-1, 0, 1], atol=1e-7)
    assert grpo_advantage([3.0], 1, "group").tolist() == [3]
    assert grpo_advantage([3.0], 1, "none").tolist() == [0]
    assert grpo_advantage([3.0], 1, "batch").tolist() == [0]
    masked = {"where": [True, False, True, True]}
    assert grpo_advantage([0.0, 9.0, 2.0, 4.0], 1, "group", **masked).tolist() == [0, 0, 2, 4]
    assert grpo_advantage([0.0, 9.0, 2.0, 4.0], 1, "none", **masked).tolist() == [-2, 0, 0, 2]
    assert grpo_advantage([0.1] * 7, 1, "none").tolist() == [0] * 7
    assert grpo_advantage([0.1] * 7, 1, "batch").tolist() == [0] * 7
    unchecked = jnp.asarray([INF, 0.0, 1.0])
    assert grpo_advantage(unchecked, 1).tolist() == [INF, 0, 1]
    assert np.isnan(grpo_advantage(unchecked, 1, "none")).all()


def test_missing_rewards():
    # kept: 1, 3 (mean 2) and 0, 4, 8 (mean 4)
    rewards = [1.0, NAN, 3.0, 0.0, 4.0, 8.0]
    where = [True, False, True, True, True, True]
    assert grpo_advantage(rewards, 3, "none", where=where).tolist() == [-1, 0, 1, -4, 0, 4]
    # others' means: 3, 1 | 6, 4, 2
    assert rloo_advantage(rewards, 3, "none", where=where).tolist() == [-2, 0, 2, -6, 0, 6]
    # standard deviations: sqrt(2) with two left, 4 with three
    np.testing.assert_allclose(
        grpo_advantage(rewards, 3, where=where), [-(0.5**0.5), 0, 0.5**0.5, -1, 0, 1], rtol=1e-6
    )
    # kept batch: 1 3 0 4 8, mean 3.2, squares 4.84 .04 10.24 .64 23.04, sum 38.8, over 4: 9.7
    np.testing.assert_allclose(
        grpo_advantage(rewards, 3, "batch", where=where),
        np.array([-1, 0, 1, -4, 0, 4]) / 9.7**0.5,
        rtol=1e-6,
    )


@pytest.mark.parametrize("estimator", [grpo_advantage, rloo_advantage])
def test_a_lone_survivor_is_zero_but_counts_in_the_batch(estimator):
    rewards, where = [5.0, 9.0, 0.0, 2.0], [True, False, True, True]
    for scale in ("group", "none"):
        assert estimator(rewards, 2, scale, where=where).tolist()[:2] == [0, 0]
    # kept batch: 5 0 2, mean 7/3, squares 64/9 49/9 1/9, sum 114/9, over 2: 57/9
    batch = np.asarray(estimator(rewards, 2, "batch", where=where))
    centred = 2 if estimator is rloo_advantage else 1
    np.testing.assert_allclose(batch, [0, 0, -centred / (57 / 9) ** 0.5, -batch[2]], rtol=1e-6)


def test_an_unmasked_nan_alone_in_its_group_is_not_hidden():
    rewards, where = jnp.asarray([NAN, 1.0, 0.0, 1.0]), jnp.asarray([True, False, True, True])
    result = grpo_advantage(rewards, 2, "none", where=where).tolist()
    assert np.isnan(result[0])
    assert result[1:] == [0, -0.5, 0.5]


def test_epsilon_is_added_to_the_standard_deviation():
    # standard deviation 2, so 2 / (2 + 2) = 0.5
    for epsilon in (2, 2.0, np.float32(2), jnp.float32(2)):
        assert grpo_advantage([0.0, 2.0, 4.0], 3, epsilon=epsilon).tolist() == [-0.5, 0, 0.5]
        assert grpo_advantage([0.0, 2.0, 4.0], 3, "batch", epsilon=epsilon)[2] == 0.5
        assert grpo_advantage([0.0, 2.0, 4.0], 3, "none", epsilon=epsilon)[2] == 2
        on_device = grpo_advantage(jnp.asarray([0.0, 2.0, 4.0]), 3, epsilon=epsilon)
        assert on_device.tolist() == [-0.5, 0, 0.5]
    for scale in ("group", "batch"):  # the others are 3 away: 3 / (2 + 2) = 0.75
        assert rloo_advantage([0.0, 2.0, 4.0], 3, scale, epsilon=2.0).tolist() == [-0.75, 0, 0.75]
    assert grpo_advantage([1.0] * 3, 3, "batch", epsilon=0.0).tolist() == [0.0] * 3
    np.testing.assert_allclose(
        grpo_advantage([0.0, 2.0, 4.0], 3, epsilon=0.0), [-1, 0, 1], atol=1e-7
    )


def test_remax():
    result = remax_advantage([1.0, 0.0, 2.0, 4.0], [0.5, 3.0], 2)
    assert result.tolist() == [0.5, -0.5, -1, 1]
    assert remax_advantage([1.0, 0.0], [0.5, 3.0]).tolist() == [0.5, -3]
    # components 1 + 2 * 2, 0 + 2 * 1 against 3 + 2 * 1
    pairs = remax_advantage([[1.0, 2.0], [0.0, 1.0]], [[3.0, 1.0]], 2, reward_weights=[1.0, 2.0])
    assert pairs.tolist() == [0, -3]
    # the baseline has all components: 1 - (3 + 1), 0 + 1 - (3 + 1)
    some = remax_advantage(
        [[1.0, 9.0], [0.0, 1.0]], [[3.0, 1.0]], 2, where=[[True, False], [True, True]]
    )
    assert some.tolist() == [-3, -3]
    # 4 units in the last place are no difference, 5 are
    unit = np.spacing(np.float32(0.7))
    near = np.float32(0.7) - np.asarray([0, 4, 5, -4, -5], np.float32) * unit
    result = np.asarray(remax_advantage(near, np.float32([0.7]), 5))
    assert (result != 0).tolist() == [False, False, True, False, True]
    # units of the larger one: those of 1, not of what lies below
    assert remax_advantage([1 - 2**-21], [1.0]).tolist() == [0]


def test_reinforce():
    assert reinforce_advantage([3.0, 3.0, -1.5]).tolist() == [3, 3, -1.5]
    assert reinforce_advantage([3.0, 3.0], 2, where=[False, True]).tolist() == [0, 3]
    # components 1 + 2 * 2, 0 + 2 * 1
    pairs = reinforce_advantage([[1.0, 2.0], [0.0, 1.0]], 2, reward_weights=[1.0, 2.0])
    assert pairs.tolist() == [5, 2]


def test_opo():
    # (10 * 0 + 30 * 4) / 40 = 3; (5 * 1 + 0 * 9) / 5 = 1; no tokens at all: 0
    result = opo_advantage([0.0, 4.0, 1.0, 9.0, 2.0, 3.0], [10, 30, 5, 0, 0, 0], 2)
    assert result.tolist() == [-3, 1, 0, 8, 0, 0]
    rewards = rewards_of("real")
    equal = opo_advantage(rewards, np.full(COUNT, 17), SIZE)
    np.testing.assert_allclose(equal, grpo_advantage(rewards, SIZE, "none"), atol=2e-7)


def test_maxrl():
    # mean 1/4: 0.75 / 0.25, -0.25 / 0.25; mean 1/2
    result = maxrl_advantage([1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0], 4)
    assert result.tolist() == [3, -1, -1, -1, 1, -1, -1, 1]
    assert maxrl_advantage([-1.0, 0.0, -1.0, 1.0], 2).tolist() == [0, 0, 0, 0]
    # rewards that cancel up to rounding: their mean is not a success rate
    cancelling = np.float32(np.random.default_rng(0).normal(size=(200, 3)))
    cancelling[:, 2] = -(cancelling[:, 0] + cancelling[:, 1])
    assert np.abs(maxrl_advantage(cancelling.ravel(), 3)).max() == 0
    assert maxrl_advantage([1.0, 0.0], 2, epsilon=0.5).tolist() == [0.5, -0.5]


def test_dgpo():
    # mean 2, deviations -2 -2 4 0, mean distance 2
    assert dgpo_advantage([0.0, 0.0, 6.0, 2.0], 4).tolist() == [-1, -1, 2, 0]
    assert dgpo_advantage([0.0, 0.0, 6.0, 2.0], 4, epsilon=2.0).tolist() == [-0.5, -0.5, 1, 0]


def test_mc_grpo():
    # odd: median 3, distances 3 1 0 1 96, median 1; even: the lower middle, 2, of 0 2 4 9
    assert mc_grpo_advantage([0.0, 2.0, 3.0, 4.0, 99.0], 5, epsilon=0.0).tolist() == [
        -3, -1, 0, 1, 96,
    ]  # fmt: skip
    # distances from 2: 2 0 2 7, lower middle 2
    assert mc_grpo_advantage([4.0, 2.0, 0.0, 9.0], 4, epsilon=0.0).tolist() == [1, 0, -1, 3.5]
    # most equal the median: mean distance 1/4, or 2 / 8 with epsilon 1/4
    assert mc_grpo_advantage([0.0, 1.0, 0.0, 0.0], 4, epsilon=0.0).tolist() == [0, 4, 0, 0]
    assert mc_grpo_advantage([0.0, 1.0, 0.0, 0.0], 4, epsilon=0.25).tolist() == [0, 2, 0, 0]
    # ... also if they equal it only up to rounding
    almost = np.float32(0.3) + np.float32([0, 1, 2, 2**25]) * np.spacing(np.float32(0.3))
    assert np.abs(mc_grpo_advantage(almost, 4, epsilon=0.0)).max() < 5
    # one masked: median of 2 4 9 is 4, distances 2 0 5
    masked = mc_grpo_advantage(
        [4.0, 2.0, -9.0, 9.0], 4, epsilon=0.0, where=[True, True, False, True]
    )
    assert masked.tolist() == [0, -1, 0, 2.5]


def test_reinforce_plus_plus_baseline():
    # deviations -2, 2 on 1 and 1 tokens, 0 on 7: mean 0, squares 8, over 8
    result = reinforce_plus_plus_baseline_advantage([0.0, 4.0, 7.0, 7.0], [1, 1, 1, 6], 2)
    assert result.tolist() == [-2, 2, 0, 0]
    # deviations -2 on 3 tokens, 2 on 1: mean -1, squares 3 + 9, over 3: standard deviation 2
    result = reinforce_plus_plus_baseline_advantage([0.0, 4.0], [3, 1], 2)
    np.testing.assert_allclose(result, [-0.5, 1.5], rtol=1e-6)
    result = reinforce_plus_plus_baseline_advantage([0.0, 4.0], [3, 1], 2, epsilon=2.0)
    np.testing.assert_allclose(result, [-0.25, 0.75], rtol=1e-6)
    # nobody but samples without tokens differs: nothing to normalise, nothing to learn
    half_without_tokens = {"lengths": [3, 0, 2, 0], "num_generations": 2, "epsilon": 0.0}
    result = reinforce_plus_plus_baseline_advantage([0.0, 4.0, 1.0, 5.0], **half_without_tokens)
    assert result.tolist() == [0, 0, 0, 0]
    rounding = [0.1, 0.8, 0.3, 1.0]  # deviations of 0.35, nearly
    result = reinforce_plus_plus_baseline_advantage(rewards=rounding, **half_without_tokens)
    assert result.tolist() == [0, 0, 0, 0]
    # no tokens, no advantage: deviations -2 2 on 1 and 1 tokens, -3 on 2, 3 on none
    # mean -1.5, squares .25 12.25 2.25 2.25, over 3: 17 / 3
    result = reinforce_plus_plus_baseline_advantage([0.0, 4.0, 1.0, 7.0], [1, 1, 2, 0], 2)
    np.testing.assert_allclose(result, np.array([-0.5, 3.5, -1.5, 0]) / (17 / 3) ** 0.5, rtol=1e-6)
    # a group without signal beside one whose token mean is not 0
    result = reinforce_plus_plus_baseline_advantage([0.0, 4.0, 0.1, 0.1], [3, 1, 5, 5], 2)
    assert result.tolist()[2:] == [0, 0]
    assert result.tolist()[0] < 0 < result.tolist()[1]


def test_gdpo_keeps_combinations_apart():
    # Sums 1 and 1: equal to GRPO. One by one, the rarer reward counts for more.
    rewards = np.float32([[1, 0], [0, 1], [0, 0], [0, 0], [0, 1], [0, 1]])
    summed = grpo_advantage(rewards, 6)
    assert summed[0] == summed[1]
    apart = np.asarray(gdpo_advantage(rewards, 6))
    assert apart[0] > apart[1] == apart[4]


def test_gdpo_against_the_reference():
    rng = np.random.default_rng(2)
    rewards = rng.integers(0, 3, (COUNT, 3)).astype(np.float32)
    rewards[:SIZE, 1] = 0.1  # a component without signal
    everything = np.ones((COUNT, 3), bool)
    cells = rng.uniform(size=(COUNT, 3)) < 0.7
    for keep in (everything, cells):
        for weights in (None, np.float32([1.0, 0.5, -2.0])):
            expected = reference.gdpo(rewards, IDS, keep, weights=weights)
            result = gdpo_advantage(rewards, SIZE, where=keep, reward_weights=weights)
            close(result, expected, roundings=64)
    by_sample = gdpo_advantage(rewards, SIZE, where=KEEP)
    close(by_sample, reference.gdpo(rewards, IDS, np.repeat(KEEP[:, None], 3, 1)), roundings=64)
    close(gdpo_advantage(rewards, SIZE), reference.gdpo(rewards, IDS, everything), roundings=64)


def test_gdpo_components_that_cancel_are_no_signal():
    rng = np.random.default_rng(4)
    first = rng.uniform(size=COUNT).astype(np.float32)
    opposite = np.stack([first, 1 - first], axis=1)
    assert not np.asarray(gdpo_advantage(opposite, SIZE)).any()
    # nearly is not quite
    nearly = opposite + np.stack([np.zeros(COUNT), 0.01 * rng.normal(size=COUNT)], 1)
    expected = reference.gdpo(nearly.astype(np.float32), IDS, np.ones((COUNT, 2), bool))
    result = gdpo_advantage(nearly.astype(np.float32), SIZE)
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3)
    # in one prompt only: the others keep their signal
    opposite[SIZE:, 1] = rng.uniform(size=COUNT - SIZE)
    result = np.asarray(gdpo_advantage(opposite, SIZE)).reshape(PROMPTS, SIZE)
    assert result.any(axis=1).tolist() == [False, True, True, True]
