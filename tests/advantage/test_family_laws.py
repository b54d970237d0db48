"""The laws that the family obeys, as properties over drawn rewards."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.advantage.family import COUNT, GROUPED, KEEP, LENGTHS, PROMPTS, ROWS, SIZE, K

SUM_TO_ZERO = ("gdpo", "maxrl", "dgpo", "pass_at_k", "pkpo, mean")
SHIFT = ("opo", "gdpo", "dgpo", "mc_grpo", "pkpo, mean", "pkpo, minus one", "reinforce++")
EQUIVARIANT = ("remax", "opo", "pkpo, mean", "pkpo, leave one out", "pkpo, minus one")
INVARIANT = ("gdpo", "maxrl", "dgpo", "reinforce++")


def graded():
    """Rewards of 0, 1/64, ... 4: their sums, and twice them, are exact."""
    cells = st.lists(st.integers(0, 256), min_size=COUNT, max_size=COUNT)
    return cells.map(lambda values: np.asarray(values, np.float32) / 64)


def _close(result, expected, roundings=64):
    result, expected = np.asarray(result, np.float64), np.asarray(expected, np.float64)
    bound = roundings * 2.0**-23 * max(np.abs(expected).max(), np.abs(result).max())
    np.testing.assert_allclose(result, expected, rtol=0, atol=bound)


@given(graded())
def test_sums(rewards):
    for name in SUM_TO_ZERO:
        result = np.asarray(ROWS[name](rewards), np.float64).reshape(PROMPTS, SIZE)
        bound = 32 * 2.0**-23 * np.abs(result).sum(axis=1)
        assert np.all(np.abs(result.sum(axis=1)) <= bound), name
    weighted = np.asarray(ROWS["opo"](rewards), np.float64) * LENGTHS
    bound = 32 * 2.0**-23 * np.abs(weighted).reshape(PROMPTS, SIZE).sum(axis=1)
    assert np.all(np.abs(weighted.reshape(PROMPTS, SIZE).sum(axis=1)) <= bound)
    gained = np.asarray(ROWS["pkpo, minus one"](rewards))
    assert (gained >= 0).all()
    balanced = np.abs(ROWS["dgpo"](rewards)).reshape(PROMPTS, SIZE).sum(axis=1)
    assert np.all(np.isclose(balanced, SIZE, rtol=1e-5) | (balanced == 0))


@given(graded(), st.integers(-64, 64))
def test_adding_a_constant_changes_nothing(rewards, constant):
    moved = rewards + np.float32(constant)
    for name in SHIFT:
        _close(ROWS[name](moved), ROWS[name](rewards))


@given(graded(), st.sampled_from([0.5, 2.0, 4.0]))
def test_scaling(rewards, factor):
    scaled = rewards * np.float32(factor)
    for name in EQUIVARIANT:
        more = {}
        if name == "remax":
            more = {"greedy_rewards": np.float32([0.25, 1.0, -0.5, 0.0]) * np.float32(factor)}
        _close(ROWS[name](scaled, **more), factor * np.asarray(ROWS[name](rewards)))
    for name in INVARIANT:
        _close(ROWS[name](scaled), ROWS[name](rewards), roundings=256)


@given(graded(), st.permutations(range(SIZE)))
def test_permuting_a_group_permutes_its_advantages(rewards, order):
    order = np.concatenate([np.asarray(order), np.arange(SIZE, COUNT)])
    for name, estimator in ROWS.items():
        more = {"lengths": LENGTHS[order]} if name in ("opo", "reinforce++") else {}
        _close(estimator(rewards[order], **more), np.asarray(estimator(rewards))[order])


@given(graded())
def test_order_of_rewards_is_order_of_advantages(rewards):
    for name, estimator in GROUPED.items():
        if name == "pass_at_k":
            continue
        for group, result in zip(
            rewards.reshape(PROMPTS, SIZE),
            np.asarray(estimator(rewards)).reshape(PROMPTS, SIZE),
            strict=True,
        ):
            if name.startswith(("gdpo", "reinforce")) and not result.any():
                continue
            order = np.argsort(group, kind="stable")
            slack = 64 * 2.0**-23 * max(np.abs(result).max(), 1e-9)
            assert (np.diff(result[order]) >= -slack).all(), name


@given(graded())
def test_masked_rows_change_nothing(rewards):
    other = np.where(KEEP, rewards, rewards[::-1] + 3).astype(np.float32)
    for estimator in ROWS.values():
        np.testing.assert_array_equal(estimator(rewards, where=KEEP), estimator(other, where=KEEP))


def test_better_than_every_subset_needs():
    # More successes than K - k failures leave room for: every subset passes.
    rewards = np.zeros(COUNT, np.float32)
    rewards.reshape(PROMPTS, SIZE)[:, : SIZE - K + 1] = 1
    assert not np.asarray(ROWS["pass_at_k"](rewards)).any()
    rewards.reshape(PROMPTS, SIZE)[:, SIZE - K] = 0
    assert np.asarray(ROWS["pass_at_k"](rewards)).all()


@pytest.mark.parametrize("name", ROWS)
def test_one_program_for_lists_and_arrays(name):
    rewards = np.arange(COUNT, dtype=np.float32) % 5 / 4
    expected = ROWS[name](jnp.asarray(rewards))
    np.testing.assert_array_equal(ROWS[name](rewards.tolist()), expected)
    np.testing.assert_array_equal(ROWS[name](rewards.astype(np.float64)), expected)
