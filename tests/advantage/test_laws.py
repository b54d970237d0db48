"""The laws of the contract, as properties over drawn rewards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.advantage.estimates import ROWS, SCALES, every_estimate, every_segment_estimate
from tests.advantage.reference import reference, segment_reference

pytestmark = pytest.mark.as_users_compile
ROUNDING = 2.0**-23
# A few sizes, so that compiled programs are shared between examples.
PROMPTS, SIZES = 3, (2, 5, 8)


@st.composite
def batches(draw, exact=False):
    """Rewards of three prompts: binary, graded, or real; integers / 64 where sums must be exact."""
    size = draw(st.sampled_from(SIZES))
    kinds = [
        st.integers(0, 1),
        st.integers(-64, 64).map(lambda v: v / 64),
        st.integers(-(2**15), 2**15).map(lambda v: v / 64),
    ]
    if not exact:
        kinds.append(st.floats(-1e3, 1e3, width=32))
    cells = st.lists(draw(st.sampled_from(kinds)), min_size=PROMPTS * size, max_size=PROMPTS * size)
    return np.asarray(draw(cells), np.float32), size


def _spread_enough(rewards, size):
    """Every group is constant, or spreads over 100 units in the last place with sigma >= 1e-3."""
    groups = rewards.reshape(-1, size).astype(np.float64)
    unit = np.spacing(np.abs(rewards.reshape(-1, size)).max(axis=1))
    spread = np.ptp(groups, axis=1)
    return bool(np.all((spread == 0) | ((spread > 100 * unit) & (groups.std(1, ddof=1) >= 1e-3))))


def _close(result, expected, roundings=8):
    result, expected = np.asarray(result, np.float64), np.asarray(expected, np.float64)
    bound = roundings * ROUNDING * max(np.abs(expected).max(), np.abs(result).max())
    np.testing.assert_allclose(result, expected, rtol=0, atol=bound)


@given(batches())
def test_reference(batch):
    rewards, size = batch
    assume(_spread_enough(rewards, size))
    for (name, scale), advantages in every_estimate(rewards, size).items():
        expected = reference(rewards, size, scale, leave_one_out=name == "rloo")
        _close(advantages, expected, roundings=16)


@given(batches())
def test_rloo_is_grpo_times_k_over_k_minus_1(batch):
    rewards, size = batch
    estimates = every_estimate(rewards, size)
    for scale in SCALES:
        expected = size / (size - 1) * np.asarray(estimates["grpo", scale], np.float64)
        np.testing.assert_allclose(estimates["rloo", scale], expected, rtol=1e-6)


@given(batches())
def test_every_group_sums_to_zero(batch):
    rewards, size = batch
    for advantages in every_estimate(rewards, size).values():
        result = np.asarray(advantages, np.float64).reshape(-1, size)
        bound = 8 * ROUNDING * np.abs(result).sum(axis=1)
        assert np.all(np.abs(result.sum(axis=1)) <= bound)


@given(batches(exact=True), st.sampled_from([-1000.0, -0.5, 0.25, 4096.0]))
def test_a_constant_added_changes_nothing(batch, constant):
    rewards, size = batch
    shifted = rewards + np.float32(constant)
    assume(np.array_equal(shifted.astype(np.float64), rewards.astype(np.float64) + constant))
    assume(_spread_enough(rewards, size) and _spread_enough(shifted, size))
    plain = every_estimate(rewards, size)
    for which, advantages in every_estimate(shifted, size).items():
        _close(advantages, plain[which])


@given(batches(exact=True), st.sampled_from([0.5, 2.0, 3.0, 1024.0, -4.0]))
def test_scaling_rewards(batch, factor):
    rewards, size = batch
    scaled = rewards * np.float32(factor)
    assume(_spread_enough(rewards, size) and _spread_enough(scaled, size))
    plain = every_estimate(rewards, size)
    for (name, scale), advantages in every_estimate(scaled, size).items():
        before = np.asarray(plain[name, scale])
        if scale == "none":
            _close(advantages, factor * before)
        else:  # epsilon is 1e-5 of the smallest standard deviation allowed here
            np.testing.assert_allclose(advantages, np.sign(factor) * before, rtol=2e-5, atol=2e-5)


@given(batches(), st.randoms(use_true_random=False))
def test_permuting_a_group_permutes_its_advantages(batch, random):
    rewards, size = batch
    order = np.concatenate(
        [
            start + np.asarray(random.sample(range(size), size))
            for start in range(0, rewards.size, size)
        ]
    )
    plain = every_estimate(rewards, size)
    for which, advantages in every_estimate(rewards[order], size).items():
        _close(advantages, np.asarray(plain[which])[order])


@given(batches(), st.randoms(use_true_random=False))
def test_prompts_do_not_see_each_other(batch, random):
    rewards, size = batch
    order = np.asarray(random.sample(range(PROMPTS), PROMPTS))
    plain = every_estimate(rewards, size)
    moved = every_estimate(rewards.reshape(-1, size)[order].ravel(), size)
    for name in ROWS:
        for scale in ("group", "none"):
            expected = np.asarray(plain[name, scale]).reshape(-1, size)[order].ravel()
            assert np.array_equal(moved[name, scale], expected)


@given(batches())
def test_bounds(batch):
    rewards, size = batch
    slack = 1 + 8 * ROUNDING
    estimates = every_estimate(rewards, size)
    assert np.abs(estimates["grpo", "group"]).max() <= (size - 1) / size**0.5 * slack
    assert np.abs(estimates["rloo", "group"]).max() <= size**0.5 * slack


@given(batches(), st.data())
def test_masked_rewards_change_nothing(batch, data):
    rewards, size = batch
    assume(_spread_enough(rewards, size))
    keep = np.asarray(
        data.draw(st.lists(st.booleans(), min_size=rewards.size, max_size=rewards.size))
    )
    garbage = data.draw(st.sampled_from([np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0]))
    dirty = np.where(keep, rewards, np.float32(garbage))
    soiled = every_estimate(dirty, size, keep)
    for (name, scale), advantages in every_estimate(rewards, size, keep).items():
        clean = np.asarray(advantages)
        assert np.array_equal(soiled[name, scale], clean)
        assert not clean[~keep].any()
        kept = np.where(keep, rewards, 0)
        expected = reference(kept, size, scale, leave_one_out=name == "rloo", keep=keep)
        np.testing.assert_allclose(clean, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("estimator", ROWS.values())
@pytest.mark.parametrize("scale", SCALES)
def test_called_on_the_host_and_on_a_device_masked_rewards_change_nothing(estimator, scale):
    rewards = np.random.default_rng(0).normal(size=15).astype(np.float32)
    keep = np.arange(15) % 4 > 0
    clean = np.asarray(estimator(rewards, 5, scale, where=keep))
    for garbage in (np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0):
        dirty = np.where(keep, rewards, np.float32(garbage))
        assert np.array_equal(estimator(dirty, 5, scale, where=keep), clean)
        on_device = estimator(jnp.asarray(dirty), 5, scale, where=jnp.asarray(keep))
        assert np.array_equal(on_device, clean)


@given(batches(), st.randoms(use_true_random=False))
def test_segments_of_equal_size_are_groups_in_any_order(batch, random):
    rewards, size = batch
    order = np.asarray(random.sample(range(rewards.size), rewards.size))
    ids = np.repeat(np.asarray([7, 0, 4]), size)
    rows = every_estimate(rewards, size)
    for which, advantages in every_segment_estimate(rewards[order], ids[order], 9).items():
        _close(advantages, np.asarray(rows[which])[order], roundings=16)


@given(st.data())
def test_ragged_segments(data):
    count, most = 12, 5
    values = st.integers(-64, 64).map(lambda v: v / 8)
    rewards = np.float32(data.draw(st.lists(values, min_size=count, max_size=count)))
    ids = np.asarray(data.draw(st.lists(st.integers(-2, most + 1), min_size=count, max_size=count)))
    keep = np.asarray(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    names = [int(i) if 0 <= i < most else None for i in ids]
    for (name, scale), result in every_segment_estimate(rewards, ids, most, keep).items():
        expected = segment_reference(rewards, names, scale, leave_one_out=name == "rloo", keep=keep)
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("estimator", ROWS.values())
def test_vmap_over_batches_equals_a_loop(estimator, scale):
    rewards = jax.random.normal(jax.random.key(0), (4, 12))
    keep = jax.random.bernoulli(jax.random.key(1), 0.7, (4, 12))
    mapped = jax.vmap(lambda r, k: estimator(r, 3, scale, where=k))(rewards, keep)
    for row in range(4):
        alone = estimator(rewards[row], 3, scale, where=keep[row])
        np.testing.assert_allclose(mapped[row], alone, rtol=1e-6, atol=1e-6)
