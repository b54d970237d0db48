"""GDPO with several components, which only it keeps apart."""

import numpy as np

from tests.advantage import reference
from tests.advantage.cases import COUNT, IDS, KEEP, PROMPTS, SIZE
from twinkle_jax.advantage import gdpo_advantage, grpo_advantage


def _close(result, expected, roundings=32):
    bound = roundings * 2.0**-23 * max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(result, expected, rtol=0, atol=bound)


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
