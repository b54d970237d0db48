"""4 units in the last place are no signal, 5 are one; `test_masks.py` asks all estimators."""

import jax
import numpy as np
import pytest

from twinkle_jax import grpo_advantage
from twinkle_jax.advantage import group_statistics

CONSTANTS = [0.1, 0.2, 0.3, 0.35, 0.6, 0.7, 0.9, 1.1, 2.2, -0.1, 1000.1, 1e-3, 1e6 + 0.1, 1e18, 0.0]
VALUES = [0.1, 0.35, 0.7, 1.5, 2.2, 1000.1, 1e6 + 0.5, -0.3, 1e18]
OTHERS = [(size, 1) for size in (2, 5, 8, 13, 31)] + [(5, 60), (13, 25)]


def _exactly_zero(advantages):
    advantages = np.asarray(advantages)
    assert not advantages.any()
    assert not np.signbit(advantages).any()  # 0, not -0


@pytest.mark.parametrize(
    ("size", "copies"),
    [(3, 1), (64, 1), (8, 40), *(pytest.param(*x, marks=pytest.mark.exhaustive) for x in OTHERS)],
)
def test_constant_groups_are_exactly_zero(size, copies):
    constants = np.tile(np.float32(CONSTANTS), copies)
    rewards = np.repeat(constants, size)
    _exactly_zero(grpo_advantage(rewards, size, "batch"))
    statistics = group_statistics(rewards, size)
    assert statistics.mean.tolist() == constants.tolist()
    assert not np.asarray(statistics.std).any()
    assert not np.asarray(statistics.has_signal).any()
    keep = np.arange(len(rewards)) % size > 0
    _exactly_zero(grpo_advantage(np.where(keep, rewards, np.float32(7)), size, where=keep))


def _largest_first(size, units, dtype):
    """Groups of equal rewards, of which one is so many units in the last place nearer to zero."""
    groups = np.repeat(np.asarray(VALUES, dtype)[:, None], size, axis=1)
    groups[:, 1] -= np.sign(groups[:, 1]) * units * np.spacing(np.abs(groups[:, 1]))
    return groups


@pytest.mark.parametrize("units", [1, 4, 5])
@pytest.mark.parametrize(("size", "dtype"), [(3, np.float32), (70, np.float32), (3, np.float64)])
def test_four_units_are_noise_and_five_are_signal(units, dtype, size):
    signal = units > 4
    with jax.enable_x64(dtype == np.float64):
        groups = _largest_first(size, units, dtype)
        found = group_statistics(groups.ravel(), size)
        assert found.has_signal.tolist() == [signal] * len(VALUES)
        assert np.asarray(found.std).any() == signal
        for group in groups:  # one generation: the batch is the group
            assert np.asarray(grpo_advantage(group, 1, "batch")).any() == signal


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
        _exactly_zero(grpo_advantage(rewards, 4))


def test_tiny_signals_are_not_lost():
    # a spread of 1e-3 on 0.1 is 134,000 units in the last place: a clear signal
    result = np.asarray(grpo_advantage([0.1, 0.101], 2))
    np.testing.assert_allclose(np.abs(result), 0.5**0.5, rtol=1e-4)
    # below epsilon the standard deviation no longer matters: 0.5e-20 / 1e-8
    np.testing.assert_allclose(grpo_advantage([0.0, 1e-20], 2), [-5e-13, 5e-13], rtol=1e-5)
