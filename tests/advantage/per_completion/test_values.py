"""All estimators against the slow float64 references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.advantage.cases import (
    COUNT,
    IDS,
    KEEP,
    LENGTHS,
    ROWS,
    SEGMENT_COUNT,
    SEGMENTS,
    SIZE,
    expected,
    rewards_of,
)
from twinkle_jax.advantage import opo_advantage

KINDS = ("binary", "graded", "real")


def _close(result, wanted, roundings=32):
    bound = roundings * 2.0**-23 * max(1.0, np.abs(wanted).max())
    np.testing.assert_allclose(result, wanted, rtol=0, atol=bound)


@pytest.mark.parametrize("name", ROWS)
def test_reference(name):
    for kind in KINDS:
        rewards = rewards_of(kind)
        for keep in (np.ones(COUNT, bool), KEEP):
            _close(ROWS[name](rewards, where=keep), expected(name, rewards, IDS, keep))
        unmasked = ROWS[name](rewards, where=None)
        _close(unmasked, expected(name, rewards, IDS, np.ones(COUNT, bool)))


@pytest.mark.parametrize("name", SEGMENTS)
def test_segments_in_any_order(name):
    ids = np.random.default_rng(5).integers(-1, 6, COUNT)
    named = [int(i) if 0 <= i < SEGMENT_COUNT else f"outside {j}" for j, i in enumerate(ids)]
    for kind in KINDS:
        rewards = rewards_of(kind)
        inside = (ids >= 0) & (ids < SEGMENT_COUNT)
        for keep in (inside, inside & KEEP):
            result = SEGMENTS[name](rewards, ids, SEGMENT_COUNT, where=keep | ~inside)
            _close(result, expected(name, rewards, named, keep))
        unmasked = SEGMENTS[name](rewards, ids, SEGMENT_COUNT, where=None)
        _close(unmasked, expected(name, rewards, named, inside))


@pytest.mark.parametrize("name", ["grpo, batch", "remax", "gdpo", "pkpo, mean", "reinforce++"])
def test_float64_stays_float64(name):
    rewards = np.random.default_rng(0).uniform(size=COUNT)
    with jax.enable_x64(True):
        result = ROWS[name](rewards, where=KEEP)
        assert result.dtype == jnp.float64
        wanted = expected(name, rewards, IDS, KEEP)
        np.testing.assert_allclose(result, wanted, rtol=1e-7, atol=1e-7)  # epsilon is 1e-8
        assert ROWS[name](rewards.tolist(), where=KEEP).dtype == jnp.float64


@pytest.mark.parametrize("name", ["grpo, group", "remax", "gdpo", "maxrl"])
def test_narrow_types_are_computed_in_float32(name):
    rewards = rewards_of("binary")
    rewards[SIZE : 2 * SIZE] = 1
    wanted = ROWS[name](rewards)
    for kind in (jnp.bfloat16, jnp.bool_) if name == "maxrl" else (jnp.float16,):
        result = ROWS[name](jnp.asarray(rewards).astype(kind))
        assert result.dtype == jnp.float32
        np.testing.assert_array_equal(result, wanted)


def test_lengths_may_be_anything_that_counts():
    rewards = rewards_of("real")
    wanted = ROWS["opo"](rewards, where=None)
    for lengths in (LENGTHS.tolist(), jnp.asarray(LENGTHS), LENGTHS.astype(np.float16)):
        result = opo_advantage(rewards, lengths, SIZE)
        # another type is another program, which may round in another order
        np.testing.assert_allclose(result, wanted, rtol=1e-6)
