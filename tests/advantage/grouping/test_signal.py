"""No signal means exactly 0, and 4 units in the last place are no signal."""

import jax
import numpy as np
import pytest

from tests.advantage.estimates import SCALES, every_estimate, every_segment_estimate
from twinkle_jax import grpo_advantage, rloo_advantage
from twinkle_jax.advantage import group_statistics

CONSTANTS = [0.1, 0.2, 0.3, 0.35, 0.6, 0.7, 0.9, 1.1, 2.2, -0.1, 1000.1, 1e-3, 1e6 + 0.1, 1e18, 0.0]
ESTIMATORS = (grpo_advantage, rloo_advantage)


def _exactly_zero(advantages):
    advantages = np.asarray(advantages)
    assert not advantages.any()
    assert not np.signbit(advantages).any()  # 0, not -0


# Few samples are reduced as rows, many as columns unless their groups are large.
FEW = [(size, 1) for size in (2, 3, 5, 8, 13, 31, 64)]
MANY = [(5, 60), (8, 40), (13, 25)]


@pytest.mark.parametrize(("size", "copies"), FEW + MANY)
def test_constant_groups_are_exactly_zero(size, copies):
    constants = np.tile(np.float32(CONSTANTS), copies)
    rewards = np.repeat(constants, size)
    for advantages in every_estimate(rewards, size).values():
        _exactly_zero(advantages)
    statistics = group_statistics(rewards, size)
    assert statistics.mean.tolist() == constants.tolist()
    assert not np.asarray(statistics.std).any()
    assert not np.asarray(statistics.has_signal).any()


@pytest.mark.parametrize(("size", "copies"), [(2, 1), (8, 1), (64, 1), *MANY])
def test_what_is_left_of_constant_groups_is_exactly_zero(size, copies):
    rewards = np.repeat(np.tile(np.float32(CONSTANTS), copies), size)
    keep = np.arange(len(rewards)) % size > 0
    rewards[~keep] = 7
    for advantages in every_estimate(rewards, size, keep).values():
        _exactly_zero(advantages)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("scale", SCALES)
def test_called_one_by_one_they_are_exactly_zero(estimator, scale):
    for copies in (1, 40):
        rewards = np.repeat(np.tile(np.float32(CONSTANTS), copies), 8)
        _exactly_zero(estimator(rewards, 8, scale))


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13, 31, 64])
def test_constant_segments_are_exactly_zero(size):
    rewards = np.repeat(np.float32(CONSTANTS), size)
    ids = np.repeat(np.arange(len(CONSTANTS)), size)
    for advantages in every_segment_estimate(rewards, ids, len(CONSTANTS)).values():
        _exactly_zero(advantages)


@pytest.mark.parametrize("size", [1, 2, 7, 30])
def test_a_constant_batch_is_exactly_zero(size):
    for value in CONSTANTS:
        estimates = every_estimate(np.full(3 * size, value, np.float32), size)
        if size == 1:  # the whole batch is the group, and the scale 'group' is the reward itself
            assert estimates.pop(("grpo", "group")).tolist() == [np.float32(value)] * 3
        for advantages in estimates.values():
            _exactly_zero(advantages)


def _apart(value, units, dtype):
    """`value` and the number so many units in the last place (of the larger) below it."""
    top = np.asarray(value, dtype)
    return top, (top - units * np.spacing(np.abs(top))).astype(dtype)


VALUES = [0.1, 0.35, 0.7, 1.5, 2.2, 1000.1, 1e6 + 0.5, -0.3, 1e18]


@pytest.mark.parametrize("units", [1, 4, 5])
@pytest.mark.parametrize(("size", "dtype"), [(3, np.float32), (70, np.float32), (3, np.float64)])
def test_four_units_are_noise_and_five_are_signal(units, dtype, size):
    signal = units > 4
    with jax.enable_x64(dtype == np.float64):
        groups = np.repeat(np.asarray(VALUES, dtype)[:, None], size, axis=1)
        # the other end lies nearer to zero, so the unit is that of the value itself
        unit = np.spacing(np.abs(groups[:, 1]))
        groups[:, 1] -= np.sign(groups[:, 1]) * units * unit
        rewards = groups.ravel()
        ids = np.repeat(np.arange(len(VALUES)), size)
        assert group_statistics(rewards, size).has_signal.tolist() == [signal] * len(VALUES)
        results = every_estimate(rewards, size).values()
        by_id = every_segment_estimate(rewards, ids, len(VALUES)).values()
        for result in (*results, *by_id):
            if not signal:
                _exactly_zero(result)
            assert np.asarray(result).reshape(groups.shape).any(axis=1).tolist() == (
                [signal] * len(VALUES)
            )
        for group in groups:  # one generation: the batch is the group
            one = every_estimate(group, 1)
            assert np.asarray(one["grpo", "batch"]).any() == signal
            assert np.asarray(one["grpo", "none"]).any() == signal


@pytest.mark.parametrize("sign", [1, -1])
def test_the_unit_is_that_of_the_larger_magnitude(sign):
    # 4 units of 1.0 below it, where a unit is half as large: 8 units of the smaller number
    rewards = np.float32(sign) * np.float32([1.0, 1.0 - 4 * 2.0**-23])
    _exactly_zero(grpo_advantage(rewards, 2))
    rewards = np.float32(sign) * np.float32([1.0, 1.0 - 5 * 2.0**-23])
    assert np.asarray(grpo_advantage(rewards, 2)).any()


def test_components_added_in_another_order_are_no_signal():
    parts = np.float32([0.1, 0.7, 0.2, 1.1])
    orders = np.stack([np.roll(parts, k) for k in range(4)])
    sums = np.asarray(orders.cumsum(axis=1, dtype=np.float32)[:, -1])
    assert len(set(sums.tolist())) > 1  # the sums do differ
    for rewards in (orders, sums):
        for advantages in every_estimate(rewards, 4).values():
            _exactly_zero(advantages)


def test_a_constant_group_beside_others_stays_zero():
    rewards = np.float32([0.1, 0.1, 0.1, 0.0, 0.5, 1.0])
    for advantages in every_estimate(rewards, 3).values():
        _exactly_zero(advantages[:3])
        assert advantages[3] < 0 < advantages[5]


def test_tiny_signals_are_not_lost():
    # a spread of 1e-3 on 0.1 is 134,000 units in the last place: a clear signal
    result = np.asarray(grpo_advantage([0.1, 0.101], 2))
    np.testing.assert_allclose(np.abs(result), 0.5**0.5, rtol=1e-4)
    # below epsilon the standard deviation no longer matters: 0.5e-20 / 1e-8
    np.testing.assert_allclose(grpo_advantage([0.0, 1e-20], 2), [-5e-13, 5e-13], rtol=1e-5)
