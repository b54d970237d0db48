"""Values of the family: worked by hand, and against the float64 reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.advantage import family_reference as reference
from tests.advantage.family import (
    COUNT,
    IDS,
    KEEP,
    LENGTHS,
    PROMPTS,
    REFERENCES,
    ROWS,
    SEGMENTS,
    SIZE,
    rewards_of,
)
from twinkle_jax.advantage import (
    dgpo_advantage,
    gdpo_advantage,
    grpo_advantage,
    maxrl_advantage,
    mc_grpo_advantage,
    opo_advantage,
    reinforce_plus_plus_baseline_advantage,
    remax_advantage,
)

KINDS = ("binary", "graded", "real")
pytestmark = pytest.mark.as_users_compile


def _close(result, expected, roundings=32):
    bound = roundings * 2.0**-23 * max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(result, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("name", ROWS)
def test_reference(name):
    for kind in KINDS:
        rewards = rewards_of(kind)
        for keep in (np.ones(COUNT, bool), KEEP):
            _close(ROWS[name](rewards, where=keep), REFERENCES[name](rewards, IDS, keep))
        unmasked = ROWS[name](rewards, where=None)
        _close(unmasked, REFERENCES[name](rewards, IDS, np.ones(COUNT, bool)))


@pytest.mark.parametrize("name", SEGMENTS)
def test_segments_in_any_order(name):
    ids = np.random.default_rng(5).integers(-1, 6, COUNT)
    named = [int(i) if 0 <= i < 5 else f"outside {j}" for j, i in enumerate(ids)]
    for kind in KINDS:
        rewards = rewards_of(kind)
        inside = (ids >= 0) & (ids < 5)
        for keep in (inside, inside & KEEP):
            result = SEGMENTS[name](rewards, ids, 5, where=keep | ~inside)
            _close(result, REFERENCES[name](rewards, named, keep))
        unmasked = SEGMENTS[name](rewards, ids, 5, where=None)
        _close(unmasked, REFERENCES[name](rewards, named, inside))


@pytest.mark.parametrize("name", SEGMENTS)
def test_segments_that_are_rows(name):
    rewards = rewards_of("real")
    by_rows = ROWS[name](rewards, where=KEEP)
    by_id = SEGMENTS[name](rewards, IDS, PROMPTS, where=KEEP)
    np.testing.assert_allclose(by_id, by_rows, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["remax", "gdpo", "pkpo, mean", "reinforce++"])
def test_float64_stays_float64(name):
    rewards = np.random.default_rng(0).uniform(size=COUNT)
    with jax.enable_x64(True):
        result = ROWS[name](rewards, where=KEEP)
        assert result.dtype == jnp.float64
        expected = REFERENCES[name](rewards, IDS, KEEP)
        np.testing.assert_allclose(result, expected, rtol=1e-7, atol=1e-7)  # epsilon is 1e-8


@pytest.mark.parametrize("name", ["remax", "gdpo", "maxrl"])  # one of each core
def test_narrow_types_are_computed_in_float32(name):
    rewards = rewards_of("binary")
    rewards[SIZE : 2 * SIZE] = 1
    expected = ROWS[name](rewards)
    for kind in (jnp.bfloat16, jnp.bool_) if name == "maxrl" else (jnp.float16,):
        result = ROWS[name](jnp.asarray(rewards).astype(kind))
        assert result.dtype == jnp.float32
        np.testing.assert_array_equal(result, expected)


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
            _close(result, expected, roundings=64)
    by_sample = gdpo_advantage(rewards, SIZE, where=KEEP)
    _close(by_sample, reference.gdpo(rewards, IDS, np.repeat(KEEP[:, None], 3, 1)), roundings=64)
    _close(gdpo_advantage(rewards, SIZE), reference.gdpo(rewards, IDS, everything), roundings=64)


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


def test_lengths_may_be_anything_that_counts():
    rewards = rewards_of("real")
    expected = ROWS["opo"](rewards, where=None)
    for lengths in (LENGTHS.tolist(), jnp.asarray(LENGTHS), LENGTHS.astype(np.float16)):
        result = opo_advantage(rewards, lengths, SIZE)
        # another type is another program, which may round in another order
        np.testing.assert_allclose(result, expected, rtol=1e-6)
