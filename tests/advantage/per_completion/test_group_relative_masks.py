"""Missing rewards: what is left out takes part in nothing, and what is left follows the rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.advantage.estimates import SCALES, every_estimate, every_segment_estimate
from twinkle_jax import grpo_advantage, rloo_advantage
from twinkle_jax.advantage import group_statistics

NAN, INF = float("nan"), float("inf")


def test_by_hand():
    # kept: 1, 3 (mean 2) and 0, 4, 8 (mean 4)
    rewards = [1.0, NAN, 3.0, 0.0, 4.0, 8.0]
    where = [True, False, True, True, True, True]
    assert grpo_advantage(rewards, 3, "none", where=where).tolist() == [-1, 0, 1, -4, 0, 4]
    # others' means: 3, 1 | 6, 4, 2
    assert rloo_advantage(rewards, 3, "none", where=where).tolist() == [-2, 0, 2, -6, 0, 6]
    # standard deviations: sqrt(2) with two left, 4 with three
    np.testing.assert_allclose(
        grpo_advantage(rewards, 3, where=where), [-(0.5**0.5), 0, 0.5**0.5, -1, 0, 1], rtol=1e-6
    )
    # kept batch: 1 3 0 4 8, mean 3.2, squares 4.84 .04 10.24 .64 23.04, sum 38.8, over 4: 9.7
    np.testing.assert_allclose(
        grpo_advantage(rewards, 3, "batch", where=where),
        np.array([-1, 0, 1, -4, 0, 4]) / 9.7**0.5,
        rtol=1e-6,
    )


@pytest.mark.parametrize("estimator", [grpo_advantage, rloo_advantage])
def test_a_lone_survivor_is_zero_but_counts_in_the_batch(estimator):
    rewards, where = [5.0, 9.0, 0.0, 2.0], [True, False, True, True]
    for scale in ("group", "none"):
        assert estimator(rewards, 2, scale, where=where).tolist()[:2] == [0, 0]
    # kept batch: 5 0 2, mean 7/3, squares 64/9 49/9 1/9, sum 114/9, over 2: 57/9
    batch = np.asarray(estimator(rewards, 2, "batch", where=where))
    centred = 2 if estimator is rloo_advantage else 1
    np.testing.assert_allclose(batch, [0, 0, -centred / (57 / 9) ** 0.5, -batch[2]], rtol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 48])
@pytest.mark.parametrize("garbage", [NAN, INF])
def test_nothing_left_is_zero_never_nan(size, garbage):
    rewards = jnp.full(48, garbage)
    where = jnp.zeros(48, bool)
    by_id = every_segment_estimate(rewards, jnp.zeros(48, int), 1, where)
    for estimates in (every_estimate(rewards, size, where), by_id):
        for advantages in estimates.values():
            assert advantages.tolist() == [0] * 48
    statistics = group_statistics(rewards, size, where=where)
    for field in statistics:
        assert field.tolist() == [0] * (48 // size)


def test_components():
    rewards = [[1.0, NAN], [2.0, 3.0], [NAN, INF], [4.0, 1.0]]
    where = [[True, False], [True, True], [False, False], [True, True]]
    # sums 1, 5, missing, 5
    assert grpo_advantage(rewards, 4, "none", where=where).tolist() == pytest.approx(
        [-8 / 3, 4 / 3, 0, 4 / 3], rel=1e-6
    )
    weighted = grpo_advantage(rewards, 4, "none", where=where, reward_weights=[2.0, 1.0])
    assert weighted.tolist() == [-4, 1, 0, 3]  # 2, 7, missing, 9: mean 6
    assert group_statistics(rewards, 4, where=where).count.tolist() == [3]
    by_sample = grpo_advantage(rewards, 2, "none", where=[False, True, False, True])
    assert by_sample.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("size", [3, 33])
def test_unmasked_garbage_on_a_device_poisons_its_group_and_never_becomes_zero(bad, size):
    rewards = np.zeros(3 * size, np.float32)
    rewards[0], rewards[size] = bad, 1
    rewards = jnp.asarray(rewards)
    by_id = every_segment_estimate(rewards, np.repeat([2, 0, 1], size), 3)
    for estimates in (every_estimate(rewards, size), by_id):
        for (_, scale), advantages in estimates.items():
            if scale == "batch":
                assert np.isnan(advantages).all()
                continue
            result = np.asarray(advantages).reshape(3, size)
            assert np.isnan(result[0]).all()
            assert np.isfinite(result[1]).all()
            assert result[1].any()
            assert not result[2].any()
    statistics = group_statistics(rewards, size)
    assert statistics.has_signal.tolist() == [True, True, False]
    assert np.isnan(statistics.mean).tolist() == [True, False, False]
    assert np.isnan(statistics.std).tolist() == [True, False, False]
    whole = every_estimate(rewards, 1)
    for scale in ("batch", "none"):
        assert np.isnan(whole["grpo", scale]).all()
    single = np.asarray(whole["grpo", "group"])
    assert np.isnan(single[0]) if np.isnan(bad) else single[0] == bad
    assert single[1:].tolist() == rewards[1:].tolist()


def test_a_group_of_garbage_is_nan_although_its_rewards_are_equal():
    rewards = jnp.asarray([INF, INF, NAN, NAN, -INF, -INF, 1.0, 1.0])
    for (_, scale), advantages in every_estimate(rewards, 2).items():
        sound = scale != "batch"  # which one group of garbage spoils for all
        assert np.isnan(advantages).tolist() == [True] * 6 + [not sound] * 2


def test_an_unmasked_nan_alone_in_its_group_is_not_hidden():
    rewards, where = jnp.asarray([NAN, 1.0, 0.0, 1.0]), jnp.asarray([True, False, True, True])
    result = grpo_advantage(rewards, 2, "none", where=where).tolist()
    assert np.isnan(result[0])
    assert result[1:] == [0, -0.5, 0.5]


@pytest.mark.parametrize("scale", SCALES)
def test_no_gradient_flows_and_nothing_turns_nan(scale):
    rewards = jnp.asarray([0.1, 0.1, 0.1, 0.0, 1.0, NAN])
    where = jnp.asarray([True] * 5 + [False])
    logits = jnp.linspace(-1.0, 1.0, 6)

    def loss(rewards, logits):
        return jnp.sum(grpo_advantage(rewards, 3, scale, where=where) * jax.nn.log_softmax(logits))

    of_rewards, of_logits = jax.grad(loss, argnums=(0, 1))(rewards, logits)
    assert of_rewards.tolist() == [0] * 6
    assert np.isfinite(of_logits).all()
    assert np.asarray(of_logits).any()

    def through_settings(weights, epsilon):
        pair = jnp.stack([jnp.where(where, rewards, 0)] * 2, axis=1)
        return jnp.sum(
            jnp.square(rloo_advantage(pair, 3, scale, reward_weights=weights, epsilon=epsilon))
        )

    gradients = jax.grad(through_settings, argnums=(0, 1))(jnp.ones(2), jnp.float32(1e-8))
    assert all(not np.asarray(g).any() for g in gradients)
    _, tangent = jax.jvp(lambda r: grpo_advantage(r, 3, scale), (rewards,), (rewards,))
    assert tangent.tolist() == [0] * 6
