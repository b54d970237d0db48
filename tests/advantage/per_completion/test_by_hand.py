"""Estimators worked by hand."""

import numpy as np

from tests.advantage.cases import COUNT, SIZE, rewards_of
from twinkle_jax.advantage import (
    dgpo_advantage,
    grpo_advantage,
    maxrl_advantage,
    mc_grpo_advantage,
    opo_advantage,
    reinforce_advantage,
    reinforce_plus_plus_baseline_advantage,
    remax_advantage,
)


def test_remax_by_hand():
    result = remax_advantage([1.0, 0.0, 2.0, 4.0], [0.5, 3.0], 2)
    assert result.tolist() == [0.5, -0.5, -1, 1]
    assert remax_advantage([1.0, 0.0], [0.5, 3.0]).tolist() == [0.5, -3]
    # components 1 + 2 * 2, 0 + 2 * 1 against 3 + 2 * 1
    pairs = remax_advantage([[1.0, 2.0], [0.0, 1.0]], [[3.0, 1.0]], 2, reward_weights=[1.0, 2.0])
    assert pairs.tolist() == [0, -3]
    # 4 units in the last place are no difference, 5 are
    unit = np.spacing(np.float32(0.7))
    near = np.float32(0.7) - np.asarray([0, 4, 5, -4, -5], np.float32) * unit
    result = np.asarray(remax_advantage(near, np.float32([0.7]), 5))
    assert (result != 0).tolist() == [False, False, True, False, True]
    # units of the larger one: those of 1, not of what lies below
    assert remax_advantage([1 - 2**-21], [1.0]).tolist() == [0]


def test_reinforce_by_hand():
    assert reinforce_advantage([3.0, 3.0, -1.5]).tolist() == [3, 3, -1.5]
    assert reinforce_advantage([3.0, 3.0], 2, where=[False, True]).tolist() == [0, 3]
    # components 1 + 2 * 2, 0 + 2 * 1
    pairs = reinforce_advantage([[1.0, 2.0], [0.0, 1.0]], 2, reward_weights=[1.0, 2.0])
    assert pairs.tolist() == [5, 2]


def test_opo_by_hand():
    # (10 * 0 + 30 * 4) / 40 = 3; (5 * 1 + 0 * 9) / 5 = 1; no tokens at all: 0
    result = opo_advantage([0.0, 4.0, 1.0, 9.0, 2.0, 3.0], [10, 30, 5, 0, 0, 0], 2)
    assert result.tolist() == [-3, 1, 0, 8, 0, 0]
    rewards = rewards_of("real")
    equal = opo_advantage(rewards, np.full(COUNT, 17), SIZE)
    np.testing.assert_allclose(equal, grpo_advantage(rewards, SIZE, "none"), atol=2e-7)


def test_maxrl_by_hand():
    # mean 1/4: 0.75 / 0.25, -0.25 / 0.25; mean 1/2
    result = maxrl_advantage([1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0], 4)
    assert result.tolist() == [3, -1, -1, -1, 1, -1, -1, 1]
    assert maxrl_advantage([-1.0, 0.0, -1.0, 1.0], 2).tolist() == [0, 0, 0, 0]
    # rewards that cancel up to rounding: their mean is not a success rate
    cancelling = np.float32(np.random.default_rng(0).normal(size=(200, 3)))
    cancelling[:, 2] = -(cancelling[:, 0] + cancelling[:, 1])
    assert np.abs(maxrl_advantage(cancelling.ravel(), 3)).max() == 0
    assert maxrl_advantage([1.0, 0.0], 2, epsilon=0.5).tolist() == [0.5, -0.5]


def test_dgpo_by_hand():
    # mean 2, deviations -2 -2 4 0, mean distance 2
    assert dgpo_advantage([0.0, 0.0, 6.0, 2.0], 4).tolist() == [-1, -1, 2, 0]
    assert dgpo_advantage([0.0, 0.0, 6.0, 2.0], 4, epsilon=2.0).tolist() == [-0.5, -0.5, 1, 0]


def test_mc_grpo_by_hand():
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


def test_reinforce_plus_plus_baseline_by_hand():
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
