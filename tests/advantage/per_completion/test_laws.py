"""The laws that estimators obey, as properties over drawn rewards."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.advantage.cases import (
    CASES,
    COUNT,
    DATA,
    GROUPED,
    IDS,
    KEEP,
    LENGTHS,
    PROMPTS,
    ROWS,
    SEGMENT_COUNT,
    SEGMENTS,
    SIZE,
    K,
    expected,
    obeying,
)


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
    for name in obeying(sums_to_zero=True):
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
    for name in obeying(shift=True):
        _close(ROWS[name](moved), ROWS[name](rewards))


@given(graded(), st.sampled_from([0.5, 2.0, 4.0]))
def test_scaling(rewards, factor):
    scaled = rewards * np.float32(factor)
    for name in obeying(scale="equivariant"):
        more = {key: DATA[key] * np.float32(factor) for key in CASES[name].data if key != "lengths"}
        _close(ROWS[name](scaled, **more), factor * np.asarray(ROWS[name](rewards)))
    for name in obeying(scale="invariant"):
        _close(ROWS[name](scaled), ROWS[name](rewards), roundings=256)


@given(graded(), st.permutations(range(SIZE)))
def test_permuting_a_group_permutes_its_advantages(rewards, order):
    order = np.concatenate([np.asarray(order), np.arange(SIZE, COUNT)])
    for name, estimator in ROWS.items():
        more = {"lengths": LENGTHS[order]} if "lengths" in CASES[name].data else {}
        _close(estimator(rewards[order], **more), np.asarray(estimator(rewards))[order])


@given(graded())
def test_order_of_rewards_is_order_of_advantages(rewards):
    for name, estimator in GROUPED.items():
        if not CASES[name].ordered:
            continue
        for group, result in zip(
            rewards.reshape(PROMPTS, SIZE),
            np.asarray(estimator(rewards)).reshape(PROMPTS, SIZE),
            strict=True,
        ):
            if CASES[name].batch_wide and not result.any():
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


@given(graded())
def test_group_relative_bounds_and_ratio(rewards):
    slack = 1 + 8 * 2.0**-23
    assert np.abs(ROWS["grpo, group"](rewards)).max() <= (SIZE - 1) / SIZE**0.5 * slack
    assert np.abs(ROWS["rloo, group"](rewards)).max() <= SIZE**0.5 * slack
    for scale in ("group", "batch", "none"):
        grpo = np.asarray(ROWS[f"grpo, {scale}"](rewards), np.float64)
        rloo = ROWS[f"rloo, {scale}"](rewards)
        np.testing.assert_allclose(rloo, SIZE / (SIZE - 1) * grpo, rtol=1e-6, atol=1e-30)


@given(graded(), st.permutations(range(PROMPTS)))
def test_prompts_do_not_see_each_other(rewards, order):
    moved = rewards.reshape(PROMPTS, SIZE)[list(order)].ravel()
    for name, estimator in ROWS.items():
        if CASES[name].batch_wide:
            continue
        more = {
            key: DATA[key].reshape(PROMPTS, -1)[list(order)].ravel() for key in CASES[name].data
        }
        plain = np.asarray(estimator(rewards)).reshape(PROMPTS, SIZE)
        np.testing.assert_array_equal(estimator(moved, **more), plain[list(order)].ravel())


@given(st.data())
def test_ragged_segments(data):
    rewards, most = data.draw(graded()), SEGMENT_COUNT
    drawn = data.draw(st.lists(st.integers(-2, most + 1), min_size=COUNT, max_size=COUNT))
    keep = np.asarray(data.draw(st.lists(st.booleans(), min_size=COUNT, max_size=COUNT)))
    ids = np.asarray(drawn)
    inside = (ids >= 0) & (ids < most)
    names = [
        int(i) if ok else f"outside {j}" for j, (i, ok) in enumerate(zip(ids, inside, strict=True))
    ]
    for name, estimator in SEGMENTS.items():
        wanted = expected(name, rewards, names, keep & inside)
        _close(estimator(rewards, ids, most, where=keep), wanted, roundings=512)


def test_segments_that_are_rows_in_any_order():
    rng = np.random.default_rng(0)
    rewards, order = rng.uniform(size=COUNT).astype(np.float32), rng.permutation(COUNT)
    for name, estimator in SEGMENTS.items():
        more = {key: DATA[key][order] for key in CASES[name].data}
        names = np.asarray([3, 0, 4, 2])[IDS]
        found = estimator(rewards[order], names[order], SEGMENT_COUNT, **more)
        _close(found, np.asarray(ROWS[name](rewards))[order])
