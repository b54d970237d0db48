"""All estimators under a mask, without a signal, and with rewards that nobody can check."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.advantage.cases import (
    CASES,
    COUNT,
    GREEDY,
    GROUPED,
    IDS,
    KEEP,
    LENGTHS,
    PROMPTS,
    ROWS,
    SEGMENT_COUNT,
    SEGMENTS,
    SIZE,
    UNGROUPED,
    rewards_of,
)
from twinkle_jax.advantage import gdpo_advantage, opo_advantage, remax_advantage

NAN, INF = float("nan"), float("inf")
CONSTANTS = [0.1, 0.35, -0.7, 1e18]


@pytest.mark.parametrize("name", ROWS)
def test_garbage_under_the_mask_changes_no_bit(name):
    rewards = rewards_of("real")
    clean = ROWS[name](jnp.where(KEEP, rewards, 0), where=KEEP)
    assert not np.asarray(clean)[~KEEP].any()
    for garbage in (NAN, INF, -INF, 1e30):
        dirty = jnp.where(KEEP, rewards, np.float32(garbage))
        np.testing.assert_array_equal(ROWS[name](dirty, where=KEEP), clean)
        if name in SEGMENTS:
            by_id = SEGMENTS[name](dirty, IDS, SEGMENT_COUNT, where=KEEP)
            zeroed = SEGMENTS[name](jnp.where(KEEP, rewards, 0), IDS, SEGMENT_COUNT, where=KEEP)
            np.testing.assert_array_equal(by_id, zeroed)


def test_garbage_in_other_data_under_the_mask_changes_no_bit():
    rewards, lengths = rewards_of("real"), LENGTHS.astype(np.float32)
    dirty = np.where(KEEP, lengths, np.float32(NAN))
    for name in ("opo", "reinforce++"):
        expected = ROWS[name](rewards, where=KEEP)
        for given in (dirty, np.where(KEEP, lengths, -5), jnp.asarray(dirty)):
            result = ROWS[name](rewards, where=KEEP, lengths=given)
            np.testing.assert_array_equal(result, expected)
    # a prompt that is left out needs no greedy completion
    nothing = np.where(IDS == 2, False, True)
    expected = ROWS["remax"](rewards, where=nothing)
    greedy = np.where(np.arange(PROMPTS) == 2, np.float32(NAN), GREEDY)
    for given in (greedy, jnp.asarray(greedy)):
        result = ROWS["remax"](rewards, where=nothing, greedy_rewards=given)
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("name", ROWS)
def test_nothing_left_is_zero_never_nan(name):
    for garbage in (NAN, INF):
        rewards, where = jnp.full(COUNT, garbage), jnp.zeros(COUNT, bool)
        assert ROWS[name](rewards, where=where).tolist() == [0] * COUNT
        if name in SEGMENTS:
            by_id = SEGMENTS[name](rewards, IDS, SEGMENT_COUNT, where=where)
            assert by_id.tolist() == [0] * COUNT


@pytest.mark.parametrize("name", GROUPED)
def test_equal_rewards_are_exactly_zero(name):
    rewards = np.repeat(np.float32(CONSTANTS), SIZE)
    unit = np.spacing(np.abs(rewards))
    wobbly = rewards - np.sign(rewards) * unit * np.tile([0, 4, 1, 0, 3, 4], PROMPTS)
    constant = np.full(COUNT, 0.1, np.float32)
    for given in (rewards, wobbly.astype(np.float32), constant):
        left = GROUPED[name](np.where(KEEP, given, 7), where=KEEP)
        for result in map(np.asarray, (GROUPED[name](given), left)):
            assert not result.any()
            assert not np.signbit(result).any()
        if name in SEGMENTS:
            assert not np.asarray(SEGMENTS[name](given, IDS, SEGMENT_COUNT)).any()
    # one that is five units above the others is a signal
    five = rewards - np.sign(rewards) * unit * np.tile([0, 5, 5, 5, 5, 5], PROMPTS)
    if CASES[name].ordered:  # the others ask for success; and MaxRL for positive rewards
        result = np.asarray(GROUPED[name](five.astype(np.float32))).reshape(PROMPTS, SIZE)
        assert result[np.float32(CONSTANTS) > 0].any(axis=1).all()
    # beside prompts with a signal, and for a lone survivor
    mixed = rewards_of("real")
    mixed[:SIZE] = 0.1
    result = np.asarray(GROUPED[name](mixed, where=KEEP)).reshape(PROMPTS, SIZE)
    assert not result[:3].any()
    if name != "pass_at_k":  # whose rewards may all lie on one side of the threshold
        assert result[3].any()


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_unmasked_garbage_on_a_device_poisons_its_group_and_never_becomes_zero(name, bad):
    rewards = jnp.asarray(rewards_of("graded")).at[2].set(bad)
    result = np.asarray(ROWS[name](rewards)).reshape(PROMPTS, SIZE)
    equal = jnp.asarray(rewards_of("graded")).at[:SIZE].set(bad)
    assert not np.isfinite(np.asarray(ROWS[name](equal))[:SIZE]).any()
    if name in SEGMENTS:
        by_id = np.asarray(SEGMENTS[name](rewards, IDS, SEGMENT_COUNT))
        np.testing.assert_array_equal(np.isnan(by_id), np.isnan(result.ravel()))
    if CASES[name].batch_wide:
        assert np.isnan(result).all()
    elif name in UNGROUPED:  # no sample has a part in another
        assert not np.isfinite(result[0, 2]) and np.isfinite(np.delete(result.ravel(), 2)).all()
    else:
        assert np.isnan(result[0]).all()
        assert np.isfinite(result[1:]).all()


def test_garbage_in_other_data_on_a_device():
    rewards = rewards_of("real")
    lengths = jnp.asarray(LENGTHS.astype(np.float32)).at[2].set(NAN)
    result = np.asarray(ROWS["opo"](rewards, lengths=lengths)).reshape(PROMPTS, SIZE)
    assert np.isnan(result[0]).all() and np.isfinite(result[1:]).all()
    assert np.isnan(ROWS["reinforce++"](rewards, lengths=lengths)).any()
    greedy = jnp.asarray(GREEDY).at[2].set(NAN)
    result = np.asarray(ROWS["remax"](rewards, greedy_rewards=greedy)).reshape(PROMPTS, SIZE)
    assert np.isnan(result[2]).all() and np.isfinite(np.delete(result, 2, axis=0)).all()
    both = remax_advantage(jnp.asarray([INF, 1.0]), jnp.asarray([INF]), 2)
    assert np.isnan(both[0]) and both[1] == -INF


@pytest.mark.parametrize("name", ["grpo, batch", "remax", "gdpo", "maxrl", "pkpo, mean", "mc_grpo"])
def test_no_gradient_flows_and_nothing_turns_nan(name):
    dirty = jnp.where(KEEP, rewards_of("real"), np.float32(NAN))

    def loss(rewards):
        return jnp.sum(jnp.square(ROWS[name](rewards, where=KEEP)))

    assert not np.asarray(jax.grad(loss)(dirty)).any()


def test_no_gradient_flows_through_other_data():
    rewards = jnp.asarray(rewards_of("real"))

    def loss(lengths, greedy, weights, epsilon):
        pair = jnp.stack([rewards, jnp.square(rewards[::-1])], axis=1)
        return (
            jnp.sum(jnp.square(ROWS["opo"](rewards, lengths=lengths)))
            + jnp.sum(jnp.square(ROWS["reinforce++"](rewards, lengths=lengths, epsilon=epsilon)))
            + jnp.sum(jnp.square(ROWS["remax"](rewards, greedy_rewards=greedy)))
            + jnp.sum(gdpo_advantage(pair, SIZE, reward_weights=weights) * rewards)
            + jnp.sum(jnp.square(ROWS["dgpo"](rewards, epsilon=epsilon)))
        )

    arguments = jnp.asarray(LENGTHS, jnp.float32), jnp.asarray(GREEDY), jnp.ones(2)
    gradients = jax.grad(loss, argnums=range(4))(*arguments, jnp.float32(1e-3))
    assert not any(np.asarray(g).any() for g in gradients)


def test_components_under_a_mask():
    rewards = [[1.0, NAN], [2.0, 3.0], [NAN, INF], [4.0, 1.0]]
    where = [[True, False], [True, True], [False, False], [True, True]]
    # sums 1, 5, missing, 5, of 2, 1 and 1 tokens: baseline 12 / 4
    result = opo_advantage(rewards, [2, 1, -3, 1], 4, where=where)
    np.testing.assert_allclose(result, [-2, 2, 0, 2], rtol=1e-6)
    # columns 1 2 4 (mean 7/3, variance 7/3) and 3 1 (mean 2, variance 2)
    first, second = np.array([-4, -1, 0, 5]) / 3 / (7 / 3) ** 0.5, np.array([0, 1, 0, -1]) / 2**0.5
    sums = first + second
    expected = sums / sums[[0, 1, 3]].std(ddof=1)
    np.testing.assert_allclose(gdpo_advantage(rewards, 4, where=where), expected, rtol=1e-5)
