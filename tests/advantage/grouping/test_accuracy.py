"""All estimators under an offset and at every magnitude, and the types that are computed in."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.advantage.cases import (
    CASES,
    COUNT,
    DATA,
    IDS,
    PROMPTS,
    ROWS,
    SEGMENT_COUNT,
    SEGMENTS,
    SIZE,
    expected,
    obeying,
    rewards_of,
)
from twinkle_jax import grpo_advantage, rloo_advantage
from twinkle_jax.advantage import group_statistics, segment_grpo_advantage

EVERYONE = np.ones(COUNT, bool)


def _close(result, wanted, atol=1e-5):
    np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=atol * np.abs(wanted).max())


@pytest.mark.parametrize("name", obeying(shift=True))
def test_a_large_common_part_does_not_hurt(name):
    for offset in (1e3, -1e6, 12345678.0, 1e8):
        # differences of 100 units in the last place and more
        unit = float(np.spacing(np.float32(abs(offset))))
        steps = np.random.default_rng(3).integers(-400, 400, COUNT) * unit
        steps[::SIZE], steps[1::SIZE] = -100 * unit, 100 * unit
        rewards = np.float32(offset + steps)
        wanted = expected(name, rewards, IDS, EVERYONE)
        _close(ROWS[name](rewards), wanted)
        if name in SEGMENTS:
            _close(SEGMENTS[name](rewards, IDS, SEGMENT_COUNT), wanted)


@pytest.mark.parametrize("name", [*obeying(scale="equivariant"), *obeying(scale="invariant")])
def test_magnitudes(name):
    """Powers of two, so that nothing but overflow could make a difference; epsilon is 1e-8."""
    rewards = rewards_of("real")
    plain = np.asarray(ROWS[name](rewards))
    for factor in np.float32([2.0**-7, 2.0**33, 2.0**60]):
        own = {key: DATA[key] * factor for key in CASES[name].data if key != "lengths"}
        wanted = plain * factor if CASES[name].scale == "equivariant" else plain
        _close(ROWS[name](rewards * factor, **own), wanted)


def test_statistics_at_every_magnitude():
    for magnitude in (1e-2, 1.0, 1e10, 1e18):
        rewards = np.float32(np.random.default_rng(1).uniform(-1, 1, COUNT) * magnitude)
        groups = rewards.reshape(PROMPTS, SIZE).astype(np.float64)
        statistics = group_statistics(rewards, SIZE)
        np.testing.assert_allclose(statistics.std, groups.std(1, ddof=1), rtol=1e-5)
        np.testing.assert_allclose(statistics.mean, groups.mean(1), atol=1e-6 * magnitude)


def test_offset_example_by_hand():
    # mean 1e6 + 0.046875; deviations -0.046875, 0.015625, -0.046875, 0.078125, all exact
    rewards = np.float32([1e6, 1e6 + 0.0625, 1e6, 1e6 + 0.125])
    # the unit in the last place of 1e6 is 0.0625, so this spread of 2 units is no signal ...
    assert grpo_advantage(rewards, 4).tolist() == [0, 0, 0, 0]
    # ... and this one of 200 is
    result = grpo_advantage(np.float32([1e6, 1e6 + 6.25, 1e6, 1e6 + 12.5]), 4, "none")
    assert result.tolist() == [-4.6875, 1.5625, -4.6875, 7.8125]


OTHERS = [jnp.float16, np.float32, np.float64, np.int8, np.uint8]


@pytest.mark.parametrize(
    "dtype",
    [
        jnp.bfloat16,
        np.int64,
        bool,
        *(pytest.param(x, marks=pytest.mark.exhaustive) for x in OTHERS),
    ],
)
def test_types_are_computed_and_returned_in_float32(dtype):
    rewards = np.array([0, 1, 0, 1, 1, 0, 0, 0]).astype(dtype)
    expected = grpo_advantage(rewards.astype(np.float32), 4)
    for given_rewards in (rewards, jnp.asarray(rewards)):
        result = grpo_advantage(given_rewards, 4)
        assert result.dtype == jnp.float32
        assert np.array_equal(result, expected)
    assert group_statistics(rewards, 4).mean.dtype == jnp.float32
    assert segment_grpo_advantage(rewards, np.repeat([0, 1], 4), 2).dtype == jnp.float32


def test_bfloat16_is_widened_before_any_arithmetic():
    # in bfloat16 the mean of these would round to 1
    rewards = jnp.asarray([1, 1, 1, 1.0078125], jnp.bfloat16)
    # (epsilon is 2.6e-6 of the standard deviation, 2**-8)
    np.testing.assert_allclose(grpo_advantage(rewards, 4), [-0.5, -0.5, -0.5, 1.5], rtol=1e-5)
    components = jnp.asarray([[256, 1], [256, 2], [256, 3], [256, 4]], jnp.bfloat16)
    assert grpo_advantage(components, 4, "none").tolist() == [-1.5, -0.5, 0.5, 1.5]


@pytest.mark.parametrize("integer", [np.int32, np.uint8])
def test_differences_of_integers_do_not_wrap(integer):
    assert grpo_advantage(np.array([0, 200], integer), 2, "none").tolist() == [-100, 100]
    assert rloo_advantage(jnp.asarray([200, 0], integer), 2, "none").tolist() == [200, -200]
