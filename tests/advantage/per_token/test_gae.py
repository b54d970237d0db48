"""GAE and discounted returns: Twinkle's golden numbers, the loop, masks, no signal, and laws."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.advantage.per_token import reference
from tests.advantage.per_token.token_rewards import (
    INF,
    KEEP,
    LAST,
    NAN,
    REWARDS,
    ROWS,
    TIME,
    VALUES,
)
from twinkle_jax.advantage import (
    GAE,
    GAEAdvantage,
    ReinforcePlusPlusAdvantage,
    discounted_returns,
    gae_advantage,
    reinforce_plus_plus_advantage,
)

GOLDEN = json.loads((pathlib.Path(__file__).parents[2] / "golden/advantage_cases.json").read_text())


def _padded(array, fill):
    """Bring a golden case to the shape of the rest of this file: padding is masked."""
    out = np.full((ROWS, TIME), fill, np.asarray(array).dtype)
    out[: len(array), : len(array[0])] = array
    return out


@pytest.mark.parametrize("case", GOLDEN["gae"], ids=lambda c: f"{len(c['rewards'][0])} steps")
def test_golden_numbers_of_twinkle(case):
    settings = {name: case[name] for name in ("gamma", "gae_lambda", "normalize")}
    overridden = settings | {"normalize": not case["normalize"]}
    arguments = _padded(case["rewards"], NAN), _padded(case["values"], INF)
    mask = _padded(case["mask"], False)
    for result in (
        GAEAdvantage(**settings)(*map(jnp.asarray, arguments), masks=mask),
        GAEAdvantage(**overridden)(*arguments, masks=mask, normalize=case["normalize"]),
        gae_advantage(*arguments, where=mask, **settings),
    ):
        for part, name in zip(result, ("advantages", "returns"), strict=True):
            np.testing.assert_allclose(part, _padded(case[name], 0.0), **GOLDEN["tolerance"])


def test_golden_numbers_as_lists():
    case = GOLDEN["gae"][1]
    estimator = GAEAdvantage(case["gamma"], case["gae_lambda"])
    advantages, returns = estimator(case["rewards"], case["values"], masks=case["mask"])
    np.testing.assert_allclose(advantages, case["advantages"], **GOLDEN["tolerance"])
    np.testing.assert_allclose(returns, case["returns"], **GOLDEN["tolerance"])


def test_by_hand():
    # gamma 1/2, lambda 1/2; errors 1 + 2 - 2 = 1, 0 + 0 - 4 = -4; 1 - 4 / 4 = 0
    result = gae_advantage([[1.0, 0.0]], [[2.0, 4.0]], gamma=0.5, gae_lambda=0.5, normalize=False)
    assert isinstance(result, GAE)
    assert result.advantages.tolist() == [[0, -4]]
    assert result.returns.tolist() == [[2, 0]]
    # what follows the last step is worth 8: errors 1, 0 + 4 - 4 = 0
    result = gae_advantage(
        [[1.0, 0.0]], [[2.0, 4.0]], gamma=0.5, gae_lambda=0.5, normalize=False, bootstrap_values=[8]
    )
    assert result.advantages.tolist() == [[1, 0]]
    # over one axis; the middle is skipped: errors 1 + 4/2 - 2 = 1, -4
    result = gae_advantage(
        [1.0, NAN, 0.0],
        [2.0, INF, 4.0],
        where=[True, False, True],
        gamma=0.5,
        gae_lambda=0.5,
        normalize=False,
    )
    assert result.advantages.tolist() == [0, 0, -4]
    assert result.returns.tolist() == [2, 0, 0]
    # advantages -1, -3 (mean -2, population standard deviation 1)
    result = gae_advantage([[0.0, 0.0]], [[1.0, 3.0]], gae_lambda=0.0, gamma=0.0)
    np.testing.assert_allclose(result.advantages, [[1, -1]], rtol=1e-6)
    assert result.returns.tolist() == [[0, 0]]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("last", [None, LAST])
def test_against_the_loop(masked, last):
    keep = KEEP if masked else np.ones_like(KEEP)
    where = KEEP if masked else None
    for gamma, trace_decay in ((1.0, 0.95), (0.9, 0.8), (0.99, 1.0), (1.0, 0.0), (0.0, 0.5)):
        settings = {"gamma": gamma, "gae_lambda": trace_decay, "bootstrap_values": last}
        expected, targets = reference.gae(REWARDS, VALUES, keep, gamma, trace_decay, last)
        for normalize in (False, True):
            result = gae_advantage(REWARDS, VALUES, where=where, normalize=normalize, **settings)
            np.testing.assert_allclose(result.returns, targets, rtol=1e-5, atol=2e-5)
            wanted = reference.whiten(expected, keep, 0) if normalize else expected
            np.testing.assert_allclose(result.advantages, wanted, rtol=1e-5, atol=2e-5)
        returns = discounted_returns(REWARDS, where=where, gamma=gamma, bootstrap_values=last)
        np.testing.assert_allclose(
            returns, reference.returns(REWARDS, keep, gamma, last), rtol=1e-5, atol=2e-5
        )


def test_reinforce_plus_plus():
    # returns 3 1 and 1: mean 5/3, squares 16/9 4/9 4/9, over 2: 4/3
    result = reinforce_plus_plus_advantage(
        [[2.0, 1.0], [1.0, NAN]], where=[[True, True], [True, False]]
    )
    expected = np.array([[4, -2], [-2, 0]]) / 3 / (4 / 3) ** 0.5
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    for gamma in (1.0, 0.9):
        for where, keep in ((None, np.ones_like(KEEP)), (KEEP, KEEP)):
            returns = reference.returns(REWARDS, keep, gamma)
            expected = reference.whiten(returns, keep, 1)
            result = reinforce_plus_plus_advantage(REWARDS, where=where, gamma=gamma)
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
            wrapped = ReinforcePlusPlusAdvantage(gamma)(REWARDS, masks=where)
            np.testing.assert_array_equal(wrapped, result)
    halved = reinforce_plus_plus_advantage([[2.0, 1.0]], epsilon=2**0.5)  # returns 3 1
    np.testing.assert_allclose(halved, [[0.5**0.5 / 2, -(0.5**0.5) / 2]], rtol=1e-6)


def test_garbage_under_the_mask_changes_no_bit():
    clean = [np.where(KEEP, x, 0) for x in (REWARDS, VALUES)]
    expected = jax.tree.leaves(gae_advantage(*clean, where=KEEP))
    expected += [discounted_returns(clean[0], where=KEEP, gamma=0.9)]
    expected += [reinforce_plus_plus_advantage(clean[0], where=KEEP)]
    for garbage in (NAN, INF, -INF, 1e30):
        dirty = [np.where(KEEP, x, np.float32(garbage)) for x in (REWARDS, VALUES)]
        for rewards, values in (dirty, map(jnp.asarray, dirty)):
            result = jax.tree.leaves(gae_advantage(rewards, values, where=KEEP))
            result += [discounted_returns(rewards, where=KEEP, gamma=0.9)]
            result += [reinforce_plus_plus_advantage(rewards, where=KEEP)]
            for one, other in zip(result, expected, strict=True):
                np.testing.assert_array_equal(one, other)
                assert not np.asarray(one)[~KEEP].any()


def test_nothing_left_is_zero_never_nan():
    nothing, garbage = np.zeros_like(KEEP), jnp.full(KEEP.shape, NAN)
    results = jax.tree.leaves(gae_advantage(garbage, garbage, where=nothing))
    results += [discounted_returns(garbage, where=nothing, bootstrap_values=LAST)]
    results += [reinforce_plus_plus_advantage(garbage, where=nothing)]
    for result in results:
        assert not np.asarray(result).any()


def test_unmasked_garbage_reaches_what_came_before_and_never_becomes_zero():
    rewards = REWARDS.copy()
    rewards[0, 6] = NAN
    rewards = jnp.asarray(rewards)
    for result in (
        np.asarray(discounted_returns(rewards, gamma=0.9)),
        np.asarray(gae_advantage(rewards, VALUES, gamma=0.9, normalize=False).advantages),
    ):
        assert np.isnan(result[0, :7]).all()
        assert np.isfinite(result[0, 7:]).all()
        assert np.isfinite(result[1:]).all()
    assert np.isnan(gae_advantage(rewards, VALUES).advantages).all()
    assert np.isnan(reinforce_plus_plus_advantage(rewards)).all()
    unknown = gae_advantage(REWARDS, VALUES, gamma=jnp.float32(NAN))
    assert np.isnan(np.asarray(unknown.returns)[:, :-1]).all()


@pytest.mark.parametrize("value", [0.0, 0.1, 0.7, 1e6 + 0.5])
def test_equal_advantages_normalise_to_zero(value):
    rewards = np.full((3, 4), value, np.float32)
    zeros = np.zeros_like(rewards)
    result = gae_advantage(rewards, zeros, gamma=0.0)
    assert result.advantages.tolist() == zeros.tolist()
    assert result.returns.tolist() == rewards.tolist()
    assert reinforce_plus_plus_advantage(rewards, gamma=0.0).tolist() == zeros.tolist()
    # a critic that is right everywhere, up to rounding: nothing is learnt from it
    ahead = np.cumsum(rewards, axis=1)[:, ::-1]
    assert not np.asarray(gae_advantage(rewards, ahead, epsilon=0.0).advantages).any()
    constant = gae_advantage(zeros, rewards, bootstrap_values=rewards[:, 0], epsilon=0.0)
    assert constant.advantages.tolist() == zeros.tolist()
    single = gae_advantage([[3.0, 5.0]], [[1.0, 2.0]], where=[[False, True]])
    assert single.advantages.tolist() == [[0, 0]]


@pytest.mark.parametrize("where", [None, KEEP])
def test_the_rounding_of_large_values_is_no_signal(where):
    # rewards are 5.1 more than the values, up to the rounding of numbers near 1000
    values = np.float32(1000) + 20 * np.abs(VALUES)
    rewards = values + np.float32(5.1)
    noisy = gae_advantage(rewards, values, where=where, gamma=0.0, normalize=False)
    assert len(np.unique(np.asarray(noisy.advantages)[KEEP])) > 1
    result = gae_advantage(rewards, values, where=where, gamma=0.0, epsilon=0.0)
    assert not np.asarray(result.advantages).any()
    # a critic that predicts exactly what comes
    right = discounted_returns(REWARDS, where=where, gamma=0.9)
    result = gae_advantage(REWARDS, right, where=where, gamma=0.9, epsilon=0.0)
    assert not np.asarray(result.advantages).any()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_small_signal_beside_large_values_is_kept(sign):
    # 8 units in the last place of 1024 are 2**-10; an advantage of 2**-8 is real
    values = np.full((4, 16), 1024, np.float32)
    rewards = np.zeros((4, 16), np.float32)
    rewards[0, 1] = sign * 2**-8
    settings = {"bootstrap_values": values[:, 0], "gae_lambda": 0.0}
    result = gae_advantage(rewards, values, **settings)
    expected = reference.whiten(rewards, np.ones((4, 16), bool), 0)
    np.testing.assert_allclose(result.advantages, expected, rtol=1e-4)
    # what counts is how far they are from the mean: here 6 units on either side, there 9
    for units, signal in ((6, False), (9, True)):
        rewards = np.tile(np.float32([1, -1]) * units * 2.0**-13, (4, 8)).astype(np.float32)
        result = gae_advantage(rewards, values, **settings)
        assert np.asarray(result.advantages).any() == signal


def test_rounding_is_told_by_the_values_too():
    # returns of 6 units in the last place of 1024 about 0, less values of 1024
    values = np.full((4, 16), 1024, np.float32)
    settings = {"bootstrap_values": values[:, 0], "gae_lambda": 0.0}
    rewards = np.tile(np.float32([1, -1]) * 6 * 2.0**-13, (4, 8)).astype(np.float32) - values
    result = gae_advantage(rewards, values, normalize=False, **settings)
    assert np.abs(result.returns).max() < 1e-3 and np.ptp(result.advantages) > 0
    assert not np.asarray(gae_advantage(rewards, values, **settings).advantages).any()


# Blocks of eight steps, eight of these, and so on: lengths at which one begins or ends.
FURTHER = (2, 7, 8, 63, 64, 71, 512)


@pytest.mark.parametrize(
    "lengths", [(1, 9, 65, 513), pytest.param(FURTHER, marks=pytest.mark.exhaustive)]
)
def test_every_length(lengths):
    rng = np.random.default_rng(3)
    rewards = rng.integers(-4, 5, (3, 513)).astype(np.float32)
    keep = rng.uniform(size=rewards.shape) < 0.8
    last = np.float32([64, -32, 16])

    @jax.jit
    def run(gamma):
        return [
            discounted_returns(rewards[:, :n], where=keep[:, :n], gamma=gamma, bootstrap_values=end)
            for n in lengths
            for end in (last, None)
        ]

    for gamma in (1.0, 0.5, 0.9):  # sums of whole numbers are exact
        results = iter(run(gamma))
        for n in lengths:
            for end in (last, None):
                expected = reference.returns(rewards[:, :n], keep[:, :n], gamma, end)
                tolerance = 0 if gamma == 1 else 1e-6
                np.testing.assert_allclose(next(results), expected, rtol=0, atol=40 * tolerance)


def test_long_sequences_stay_accurate():
    rewards = np.random.default_rng(1).normal(size=(2, 4096)).astype(np.float32)
    keep = np.random.default_rng(2).uniform(size=(2, 4096)) < 0.9
    for gamma in (1.0, 0.99):
        expected = reference.returns(rewards, keep, gamma)
        result = discounted_returns(rewards, gamma=gamma, where=keep)
        np.testing.assert_allclose(result, expected, atol=2e-6 * np.abs(expected).max())


@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 0.9]), st.sampled_from([0.0, 0.5, 1.0]))
def test_laws(seed, gamma, trace_decay):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, ROWS, TIME)).astype(np.float32)
    keep = rng.uniform(size=(ROWS, TIME)) < 0.6
    settings = {"gamma": gamma, "gae_lambda": trace_decay, "normalize": False}
    result = gae_advantage(rewards, values, where=keep, **settings)
    # with lambda 1, the returns are the discounted rewards, whatever the critic says
    if trace_decay == 1:
        returns = discounted_returns(rewards, where=keep, gamma=gamma)
        np.testing.assert_allclose(result.returns, returns, rtol=1e-4, atol=1e-4)
    # masked steps may as well not be there
    row = int(rng.integers(ROWS))
    short = np.zeros((1, TIME), np.float32), np.zeros((1, TIME), np.float32)
    count = int(keep[row].sum())
    short[0][0, :count], short[1][0, :count] = rewards[row, keep[row]], values[row, keep[row]]
    padded = [np.repeat(x, ROWS, axis=0) for x in short]
    compact = gae_advantage(*padded, where=np.tile(np.arange(TIME) < count, (ROWS, 1)), **settings)
    np.testing.assert_allclose(
        compact.advantages[0, :count], result.advantages[row, keep[row]], rtol=1e-5, atol=1e-5
    )
    # linear in rewards and values together
    doubled = gae_advantage(2 * rewards, 2 * values, where=keep, **settings)
    np.testing.assert_array_equal(doubled.advantages, 2 * np.asarray(result.advantages))
