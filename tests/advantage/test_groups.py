"""Groups: what is a signal, how accurate sums are, segments by any ids, statistics of prompts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.advantage.cases import COUNT, NAN, PROMPTS, SIZE
from tests.model.families import each
from twinkle_jax import grpo_advantage
from twinkle_jax.advantage import (
    NOISE_ULPS,
    dynamic_sampling_filter,
    group_statistics,
    segment_grpo_advantage,
    segment_rloo_advantage,
)

SCALES = ("group", "batch", "none")
CONSTANTS = [0.1, 0.2, 0.3, 0.35, 0.6, 0.7, 0.9, 1.1, 2.2, -0.1, 1000.1, 1e-3, 1e6 + 0.1, 1e18, 0.0]
OTHERS = [(size, 1) for size in (2, 5, 8, 13, 31)] + [(5, 60), (13, 25)]


def _exactly_zero(advantages):
    advantages = np.asarray(advantages)
    assert not advantages.any()
    assert not np.signbit(advantages).any()  # 0, not -0


# --- signal ---------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("units", [1, NOISE_ULPS, NOISE_ULPS + 1])
@pytest.mark.parametrize(("size", "dtype"), [(3, np.float32), (70, np.float32), (3, np.float64)])
def test_four_units_are_noise_and_five_are_signal(units, dtype, size):
    values = [0.1, 0.35, 0.7, 1.5, 2.2, 1000.1, 1e6 + 0.5, -0.3, 1e18]
    # equal rewards, of which one is so many units in the last place nearer to zero
    groups = np.repeat(np.asarray(values, dtype)[:, None], size, axis=1)
    groups[:, 1] -= np.sign(groups[:, 1]) * units * np.spacing(np.abs(groups[:, 1]))
    signal = units > 4
    with jax.enable_x64(dtype == np.float64):
        statistics = group_statistics(groups.ravel(), size)
        assert statistics.has_signal.tolist() == [signal] * len(values)
        assert np.asarray(statistics.std).any() == signal
        for group in groups:  # one generation: the batch is the group
            assert np.asarray(grpo_advantage(group, 1, "batch")).any() == signal


@pytest.mark.parametrize("sign", [1, -1])
def test_the_unit_is_that_of_the_larger_magnitude(sign):
    # 4 units of 1.0 below it, where a unit is half as large: 8 units of the smaller number
    for units in (4, 5):
        rewards = np.float32(sign) * np.float32([1.0, 1.0 - units * 2.0**-23])
        assert np.asarray(grpo_advantage(rewards, 2)).any() == (units > 4)


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


def test_offset_by_hand():
    # mean 1e6 + 0.046875; deviations -0.046875, 0.015625, -0.046875, 0.078125, all exact
    rewards = np.float32([1e6, 1e6 + 0.0625, 1e6, 1e6 + 0.125])
    # the unit in the last place of 1e6 is 0.0625, so this spread of 2 units is no signal ...
    assert grpo_advantage(rewards, 4).tolist() == [0, 0, 0, 0]
    # ... and this one of 200 is
    result = grpo_advantage(np.float32([1e6, 1e6 + 6.25, 1e6, 1e6 + 12.5]), 4, "none")
    assert result.tolist() == [-4.6875, 1.5625, -4.6875, 7.8125]


# --- accurate sums --------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", each(["batch", "group", "none"]))
def test_large_batches_are_summed_accurately(scale):
    # 2**22 rewards about 0.5: a running float32 sum would lose the last digits
    rewards = np.random.default_rng(0).uniform(size=2**22).astype(np.float32)
    wide = rewards.astype(np.float64).reshape(-1, 8)
    centred = wide - wide.mean(1, keepdims=True)
    divisor = {"none": 1, "group": wide.std(1, ddof=1, keepdims=True), "batch": wide.std(ddof=1)}
    expected = (centred / divisor[scale]).ravel()
    np.testing.assert_allclose(grpo_advantage(rewards, 8, scale), expected, atol=2e-6)
    if scale != "group":
        one_group = (wide.ravel() - wide.mean()) / (1 if scale == "none" else wide.std(ddof=1))
        np.testing.assert_allclose(grpo_advantage(rewards, 1, scale), one_group, atol=2e-6)


@pytest.mark.parametrize("scale", SCALES)
def test_a_long_segment_is_summed_accurately(scale):
    rewards = np.random.default_rng(0).uniform(size=200_000).astype(np.float32)
    ids = (np.arange(200_000) >= 10).astype(int)
    wide = rewards[10:].astype(np.float64)
    divisor = {"none": 1, "group": wide.std(ddof=1), "batch": rewards.astype("f8").std(ddof=1)}
    result = np.asarray(segment_grpo_advantage(rewards, ids, 2, scale))[10:]
    np.testing.assert_allclose(result, (wide - wide.mean()) / divisor[scale], atol=1e-5)


# --- segments -------------------------------------------------------------------------------------


def test_segments_by_hand():
    # segment 3: 1, 3 (mean 2); segment 0: 0, 4, 8 (mean 4); segment 7: alone; id 9: outside
    rewards = [0.0, 1.0, 5.0, 4.0, 3.0, 8.0, 6.0, 2.0]
    ids = [0, 3, 7, 0, 3, 0, 9, -1]
    expected = np.array([-4, -1, 0, 0, 1, 4, 0, 0])
    assert segment_grpo_advantage(rewards, ids, 9, "none").tolist() == expected.tolist()
    others = segment_rloo_advantage(rewards, ids, 9, "none").tolist()
    assert others == [-6, -2, 0, 0, 2, 6, 0, 0]
    by_group = [-1, -(0.5**0.5), 0, 0, 0.5**0.5, 1, 0, 0]
    np.testing.assert_allclose(segment_grpo_advantage(rewards, ids, 9), by_group, rtol=1e-6)
    # the lone sample counts in the batch, those outside don't: 0 1 5 4 3 8, mean 3.5,
    # squares 12.25 6.25 2.25 .25 .25 20.25, sum 41.5, over 5: 8.3
    by_batch = segment_grpo_advantage(rewards, ids, 9, "batch")
    np.testing.assert_allclose(by_batch, expected / 8.3**0.5, rtol=1e-6)


def test_ids_outside_do_not_wrap_around():
    result = segment_grpo_advantage([1.0, 2.0, 3.0, 50.0], [1, 1, 1, -1], 2, "none")
    assert result.tolist() == [-1, 0, 1, 0]
    # an id of num_segments, on a device
    ids = jnp.asarray([0, 0, 2, 1, 1])
    result = segment_grpo_advantage([0.0, 2.0, 90.0, 4.0, 6.0], ids, 2, "batch")
    expected = segment_grpo_advantage([0.0, 2.0, 4.0, 6.0], [0, 0, 1, 1], 2, "batch")
    np.testing.assert_allclose(result, [*expected[:2], 0, *expected[2:]], rtol=1e-6)
    # small unsigned ones beside many segments
    ids = np.asarray([0, 255, 0, 255], np.uint8)
    result = segment_grpo_advantage([0.0, 1.0, 2.0, 3.0], ids, 1000, "none")
    assert result.tolist() == [-1, -1, 1, 1]
    # beyond 32 bits
    ids = np.asarray([0, 0, 2**32, 2**32 + 1])
    assert segment_grpo_advantage([0.0, 2.0, 5.0, 9.0], ids, 2, "none").tolist() == [-1, 1, 0, 0]
    with jax.enable_x64(True):
        result = segment_grpo_advantage([0.0, 2.0, 5.0, 9.0], jnp.asarray(ids), 2, "none")
        assert result.tolist() == [-1, 1, 0, 0]


def test_segments_inside_jit_vmap_and_grad():
    rewards = jax.random.normal(jax.random.key(0), (3, 8))
    ids = jnp.asarray([[0, 0, 0, 1, 1, 1, 1, 2], [2, 1, 0, 2, 1, 0, 2, 1], [0] * 8])
    mapped = jax.jit(jax.vmap(lambda r, i: segment_grpo_advantage(r, i, 3)))(rewards, ids)
    for row in range(3):
        alone = segment_grpo_advantage(rewards[row], ids[row], 3)
        np.testing.assert_allclose(mapped[row], alone, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(mapped[2], grpo_advantage(rewards[2], 8), rtol=1e-5, atol=1e-6)
    gradient = jax.grad(lambda r: jnp.sum(segment_grpo_advantage(r, ids[0], 3)))(rewards[0])
    assert gradient.tolist() == [0] * 8


# --- statistics of prompts, and the filter --------------------------------------------------------


def test_statistics_at_every_magnitude():
    for magnitude in (1e-2, 1.0, 1e10, 1e18):
        rewards = np.float32(np.random.default_rng(1).uniform(-1, 1, COUNT) * magnitude)
        groups = rewards.reshape(PROMPTS, SIZE).astype(np.float64)
        statistics = group_statistics(rewards, SIZE)
        np.testing.assert_allclose(statistics.std, groups.std(1, ddof=1), rtol=1e-5)
        np.testing.assert_allclose(statistics.mean, groups.mean(1), atol=1e-6 * magnitude)


def test_dynamic_sampling():
    # mixed, solved, failed, lone success, nothing left, NaN
    rewards = jnp.asarray([0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, NAN, 1.0])
    where = jnp.asarray([True] * 7 + [False] * 3 + [True] * 2)
    statistics = group_statistics(rewards, 2, where=where)
    assert statistics.count.tolist() == [2, 2, 2, 1, 0, 2]
    assert np.isnan(statistics.mean).tolist() == np.isnan(statistics.std).tolist()
    assert np.isnan(statistics.mean).tolist() == [False] * 5 + [True]
    mixed, solved, failed = [0, 5], [1, 3], [2]

    def kept(**options):
        return np.flatnonzero(dynamic_sampling_filter(statistics, **options)).tolist()

    assert kept() == mixed
    assert kept(keep_solved=True) == sorted(mixed + solved)
    assert kept(keep_failed=True) == sorted(mixed + failed)
    assert kept(keep_solved=True, keep_failed=True) == [0, 1, 2, 3, 5]
    assert kept(keep_solved=True, threshold=1.0) == mixed
    assert kept(keep_solved=True, threshold=jnp.float32(-1)) == [0, 1, 2, 3, 5]
    by_sample = dynamic_sampling_filter(statistics, 2)
    assert by_sample.tolist() == [True, True] + [False] * 8 + [True, True]
    assert by_sample.dtype == bool


def test_dynamic_sampling_as_a_mask():
    rewards = jnp.asarray([0.0, 1.0, 1.0, 0.1, 0.1, 0.1])

    @jax.jit
    def step(rewards):
        keep = dynamic_sampling_filter(group_statistics(rewards, 3), 3)
        return grpo_advantage(rewards, 3, "batch", where=keep)

    expected = grpo_advantage(rewards[:3], 3, "batch")
    np.testing.assert_allclose(step(rewards), [*expected.tolist(), 0, 0, 0], rtol=1e-6)
    mapped = jax.vmap(lambda r: dynamic_sampling_filter(group_statistics(r, 3)))(rewards[None, :])
    assert mapped.tolist() == [[True, False]]


@pytest.mark.parametrize(
    ("argument", "kind", "bad"),
    [
        ("statistics", TypeError, {"statistics": [0.0, 1.0]}),
        ("keep_solved", TypeError, {"keep_solved": 1}),
        ("keep_failed", TypeError, {"keep_failed": None}),
        ("num_generations", ValueError, {"num_generations": 0}),
        ("threshold", TypeError, {"threshold": None}),
    ],
)
def test_dynamic_sampling_refuses(argument, kind, bad):
    with pytest.raises(kind, match=argument):
        dynamic_sampling_filter(**{"statistics": group_statistics([0.0, 1.0], 2), **bad})
