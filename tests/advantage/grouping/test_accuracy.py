"""Accuracy under an offset, at every magnitude, and in every type."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.advantage.estimates import SCALES, every_estimate, every_segment_estimate
from tests.advantage.reference import reference, segment_reference
from twinkle_jax import grpo_advantage, rloo_advantage
from twinkle_jax.advantage import group_statistics, segment_grpo_advantage


@given(
    offset=st.sampled_from([1e3, 1e6, -1e6, 12345678.0, 1e8]),
    size=st.sampled_from([3, 4, 7, 70]),
    seed=st.integers(0, 1000),
)
def test_a_large_common_part_does_not_hurt(offset, size, seed):
    # differences of 100 units in the last place and more
    unit = float(np.spacing(np.float32(abs(offset))))
    steps = np.random.default_rng(seed).integers(-400, 400, 2 * size) * unit
    steps[::size], steps[1::size] = -100 * unit, 100 * unit
    rewards = np.float32(offset + steps)
    for (name, scale), advantages in every_estimate(rewards, size).items():
        expected = reference(rewards, size, scale, leave_one_out=name == "rloo")
        atol = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=atol)
    ids = np.repeat([1, 0], size)
    for (name, scale), advantages in every_segment_estimate(rewards, ids, 2).items():
        expected = segment_reference(rewards, ids.tolist(), scale, leave_one_out=name == "rloo")
        atol = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=atol)


def test_offset_example_by_hand():
    # mean 1e6 + 0.046875; deviations -0.046875, 0.015625, -0.046875, 0.078125, all exact
    rewards = np.float32([1e6, 1e6 + 0.0625, 1e6, 1e6 + 0.125])
    # the unit in the last place of 1e6 is 0.0625, so this spread of 2 units is no signal ...
    assert grpo_advantage(rewards, 4).tolist() == [0, 0, 0, 0]
    # ... and this one of 200 is
    result = grpo_advantage(np.float32([1e6, 1e6 + 6.25, 1e6, 1e6 + 12.5]), 4, "none")
    assert result.tolist() == [-4.6875, 1.5625, -4.6875, 7.8125]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("size", [2, 8, 128])
@pytest.mark.parametrize("magnitude", [1e-2, 1.0, 1e10, 1e18])
def test_magnitudes(scale, size, magnitude):
    rewards = np.float32(np.random.default_rng(size).uniform(-1, 1, 128 * size) * magnitude)
    rewards[:2] = -magnitude, magnitude
    expected = reference(rewards, size, scale, leave_one_out=True)
    result = np.asarray(rloo_advantage(rewards, size, scale))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    groups = rewards.reshape(-1, size).astype(np.float64)
    statistics = group_statistics(rewards, size)
    np.testing.assert_allclose(statistics.std, groups.std(1, ddof=1), rtol=1e-5)
    np.testing.assert_allclose(statistics.mean, groups.mean(1), atol=1e-6 * magnitude)


@pytest.mark.parametrize(
    "dtype", [jnp.float16, jnp.bfloat16, np.float32, np.float64, np.int8, np.uint8, np.int64, bool]
)
def test_types_are_computed_and_returned_in_float32(dtype):
    rewards = np.array([0, 1, 0, 1, 1, 0, 0, 0]).astype(dtype)
    expected = grpo_advantage(rewards.astype(np.float32), 4)
    for given_rewards in (rewards, jnp.asarray(rewards)):
        result = grpo_advantage(given_rewards, 4)
        assert result.dtype == jnp.float32
        assert np.array_equal(result, expected)
        assert group_statistics(given_rewards, 4).mean.dtype == jnp.float32
        ids = np.repeat([0, 1], 4)
        assert segment_grpo_advantage(given_rewards, ids, 2).dtype == jnp.float32


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
