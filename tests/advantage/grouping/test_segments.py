"""Segments: any order, any gaps, any sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax import grpo_advantage
from twinkle_jax.advantage import segment_grpo_advantage, segment_rloo_advantage


def test_by_hand():
    # segment 3: 1, 3 (mean 2); segment 0: 0, 4, 8 (mean 4); segment 7: alone; id 9: outside
    rewards = [0.0, 1.0, 5.0, 4.0, 3.0, 8.0, 6.0, 2.0]
    ids = [0, 3, 7, 0, 3, 0, 9, -1]
    expected = [-4, -1, 0, 0, 1, 4, 0, 0]
    assert segment_grpo_advantage(rewards, ids, 9, "none").tolist() == expected
    doubled = segment_rloo_advantage(rewards, ids, 9, "none").tolist()
    assert doubled == [-6, -2, 0, 0, 2, 6, 0, 0]
    np.testing.assert_allclose(
        segment_grpo_advantage(rewards, ids, 9),
        [-1, -(0.5**0.5), 0, 0, 0.5**0.5, 1, 0, 0],
        rtol=1e-6,
    )
    # the lone sample counts in the batch, those outside don't: 0 1 5 4 3 8, mean 3.5,
    # squares 12.25 6.25 2.25 .25 .25 20.25, sum 41.5, over 5: 8.3
    np.testing.assert_allclose(
        segment_grpo_advantage(rewards, ids, 9, "batch"), np.array(expected) / 8.3**0.5, rtol=1e-6
    )


def test_negative_ids_do_not_wrap_around():
    result = segment_grpo_advantage([1.0, 2.0, 3.0, 50.0], [1, 1, 1, -1], 2, "none")
    assert result.tolist() == [-1, 0, 1, 0]


def test_an_id_of_num_segments_is_outside_on_a_device_too():
    ids = jnp.asarray([0, 0, 2, 1, 1])
    result = segment_grpo_advantage([0.0, 2.0, 90.0, 4.0, 6.0], ids, 2, "batch")
    expected = segment_grpo_advantage([0.0, 2.0, 4.0, 6.0], [0, 0, 1, 1], 2, "batch")
    np.testing.assert_allclose(result, [*expected[:2], 0, *expected[2:]], rtol=1e-6)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.int64])
def test_kinds_of_ids(kind):
    ids = np.asarray([0, 1, 0, 1], kind)
    for given in (ids, jnp.asarray(ids), ids.tolist()):
        assert segment_grpo_advantage([0.0, 1.0, 2.0, 3.0], given, 2, "none").tolist() == [
            -1, -1, 1, 1,
        ]  # fmt: skip


def test_small_unsigned_ids_with_many_segments():
    ids = np.asarray([0, 255, 0, 255], np.uint8)
    result = segment_grpo_advantage([0.0, 1.0, 2.0, 3.0], ids, 1000, "none")
    assert result.tolist() == [-1, -1, 1, 1]


def test_ids_beyond_32_bits_do_not_wrap_into_range():
    ids = np.asarray([0, 0, 2**32, 2**32 + 1])
    assert segment_grpo_advantage([0.0, 2.0, 5.0, 9.0], ids, 2, "none").tolist() == [-1, 1, 0, 0]
    with jax.enable_x64(True):
        result = segment_grpo_advantage([0.0, 2.0, 5.0, 9.0], jnp.asarray(ids), 2, "none")
        assert result.tolist() == [-1, 1, 0, 0]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_long_segment_is_summed_accurately(scale):
    rewards = np.random.default_rng(0).uniform(size=200_000).astype(np.float32)
    ids = (np.arange(200_000) >= 10).astype(int)
    wide = rewards[10:].astype(np.float64)
    divisor = {"none": 1, "group": wide.std(ddof=1), "batch": rewards.astype("f8").std(ddof=1)}
    np.testing.assert_allclose(
        np.asarray(segment_grpo_advantage(rewards, ids, 2, scale))[10:],
        (wide - wide.mean()) / divisor[scale],
        atol=1e-5,
    )


def test_inside_jit_vmap_and_grad():
    rewards = jax.random.normal(jax.random.key(0), (3, 8))
    ids = jnp.asarray([[0, 0, 0, 1, 1, 1, 1, 2], [2, 1, 0, 2, 1, 0, 2, 1], [0] * 8])

    @jax.jit
    def run(rewards, ids):
        return jax.vmap(lambda r, i: segment_grpo_advantage(r, i, 3))(rewards, ids)

    mapped = run(rewards, ids)
    for row in range(3):
        alone = segment_grpo_advantage(rewards[row], ids[row], 3)
        np.testing.assert_allclose(mapped[row], alone, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(mapped[2], grpo_advantage(rewards[2], 8), rtol=1e-5, atol=1e-6)
    gradient = jax.grad(lambda r: jnp.sum(segment_grpo_advantage(r, ids[0], 3)))(rewards[0])
    assert gradient.tolist() == [0] * 8
