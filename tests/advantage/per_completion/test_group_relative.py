"""GRPO and RLOO worked by hand, and Twinkle's own numbers; what all obey is in the other files."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax import grpo_advantage, rloo_advantage
from twinkle_jax.advantage import get_advantage, group_statistics

GOLDEN = json.loads((pathlib.Path(__file__).parents[2] / "golden/advantage_cases.json").read_text())
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "start", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 5))]
)
def test_golden_numbers_of_twinkle(start):
    """Every fifth case all day, in which both estimators have all scales; then the others."""
    functions = {"grpo": grpo_advantage, "rloo": rloo_advantage}
    for case in GOLDEN["cases"][start::5]:
        call = {"num_generations": case["num_generations"], "scale": case["scale"]}
        for function in (get_advantage(case["estimator"]), functions[case["estimator"]]):
            np.testing.assert_allclose(
                function(case["rewards"], **call),
                case["advantages"],
                **GOLDEN["tolerance"],
                err_msg=case["name"],
            )


def test_grpo():
    # group 1: mean 2, deviations -2 0 2, variance (4 + 0 + 4) / 2 = 4, standard deviation 2
    # group 2: mean 5, deviations -1 1 0, variance (1 + 1 + 0) / 2 = 1, standard deviation 1
    rewards = [0.0, 2.0, 4.0, 4.0, 6.0, 5.0]
    assert grpo_advantage(rewards, 3, "none").tolist() == [-2, 0, 2, -1, 1, 0]
    np.testing.assert_allclose(grpo_advantage(rewards, 3), [-1, 0, 1, -1, 1, 0], atol=1e-7)
    # all six: mean 3.5, squared deviations 12.25 2.25 .25 .25 6.25 2.25, sum 23.5, over 5: 4.7
    np.testing.assert_allclose(
        grpo_advantage(rewards, 3, "batch"), np.array([-2, 0, 2, -1, 1, 0]) / 4.7**0.5, rtol=1e-6
    )


def test_rloo():
    # group 1: others' means 3, 2, 1; group 2: 5.5, 4.5, 5
    rewards = [0.0, 2.0, 4.0, 4.0, 6.0, 5.0]
    expected = np.array([-3, 0, 3, -1.5, 1.5, 0])
    assert rloo_advantage(rewards, 3, "none").tolist() == expected.tolist()
    np.testing.assert_allclose(rloo_advantage(rewards, 3), expected / [2, 2, 2, 1, 1, 1], atol=1e-6)
    np.testing.assert_allclose(rloo_advantage(rewards, 3, "batch"), expected / 4.7**0.5, rtol=1e-6)


def test_one_generation_takes_the_batch_as_the_group():
    # mean 2, deviations -2 0 2, standard deviation 2
    rewards = [0.0, 2.0, 4.0]
    assert grpo_advantage(rewards).tolist() == rewards
    assert grpo_advantage(rewards, 1, "none").tolist() == [-2, 0, 2]
    np.testing.assert_allclose(grpo_advantage(rewards, 1, "batch"), [-1, 0, 1], atol=1e-7)
    assert grpo_advantage([3.0], 1, "group").tolist() == [3]
    assert grpo_advantage([3.0], 1, "none").tolist() == [0]
    assert grpo_advantage([3.0], 1, "batch").tolist() == [0]
    masked = {"where": [True, False, True, True]}
    assert grpo_advantage([0.0, 9.0, 2.0, 4.0], 1, "group", **masked).tolist() == [0, 0, 2, 4]
    assert grpo_advantage([0.0, 9.0, 2.0, 4.0], 1, "none", **masked).tolist() == [-2, 0, 0, 2]
    assert grpo_advantage([0.1] * 7, 1, "none").tolist() == [0] * 7
    assert grpo_advantage([0.1] * 7, 1, "batch").tolist() == [0] * 7
    unchecked = jnp.asarray([INF, 0.0, 1.0])
    assert grpo_advantage(unchecked, 1).tolist() == [INF, 0, 1]
    assert np.isnan(grpo_advantage(unchecked, 1, "none")).all()


def test_missing_rewards():
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


def test_an_unmasked_nan_alone_in_its_group_is_not_hidden():
    rewards, where = jnp.asarray([NAN, 1.0, 0.0, 1.0]), jnp.asarray([True, False, True, True])
    result = grpo_advantage(rewards, 2, "none", where=where).tolist()
    assert np.isnan(result[0])
    assert result[1:] == [0, -0.5, 0.5]


def test_epsilon_is_added_to_the_standard_deviation():
    # standard deviation 2, so 2 / (2 + 2) = 0.5
    for epsilon in (2, 2.0, np.float32(2), jnp.float32(2)):
        assert grpo_advantage([0.0, 2.0, 4.0], 3, epsilon=epsilon).tolist() == [-0.5, 0, 0.5]
        assert grpo_advantage([0.0, 2.0, 4.0], 3, "batch", epsilon=epsilon)[2] == 0.5
        assert grpo_advantage([0.0, 2.0, 4.0], 3, "none", epsilon=epsilon)[2] == 2
        on_device = grpo_advantage(jnp.asarray([0.0, 2.0, 4.0]), 3, epsilon=epsilon)
        assert on_device.tolist() == [-0.5, 0, 0.5]
    for scale in ("group", "batch"):  # the others are 3 away: 3 / (2 + 2) = 0.75
        assert rloo_advantage([0.0, 2.0, 4.0], 3, scale, epsilon=2.0).tolist() == [-0.75, 0, 0.75]
    assert grpo_advantage([1.0] * 3, 3, "batch", epsilon=0.0).tolist() == [0.0] * 3
    np.testing.assert_allclose(
        grpo_advantage([0.0, 2.0, 4.0], 3, epsilon=0.0), [-1, 0, 1], atol=1e-7
    )


def test_components_are_summed_with_weights():
    rewards = np.array([[0.0, 1.0], [2.0, 3.0], [4.0, 0.0], [8.0, 1.0]], np.float32)
    assert grpo_advantage(rewards, 2, "none").tolist() == [-2, 2, -2.5, 2.5]
    # 0 + 2, 2 + 6 | 4 + 0, 8 + 2
    weighted = grpo_advantage(rewards, 2, "none", reward_weights=[1.0, 2.0])
    assert weighted.tolist() == [-3, 3, -3, 3]
    integers = grpo_advantage(rewards.astype(int), 2, "none", reward_weights=np.array([1, 2]))
    assert integers.tolist() == [-3, 3, -3, 3]


def test_components_that_are_missing():
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


def test_no_gradient_flows_through_settings_or_turns_the_policys_to_nan():
    rewards = jnp.asarray([0.1, 0.1, 0.1, 0.0, 1.0, NAN])
    where = jnp.asarray([True] * 5 + [False])

    def loss(logits, weights, epsilon):
        pair = jnp.stack([jnp.where(where, rewards, 0)] * 2, axis=1)
        more = {"reward_weights": weights, "epsilon": epsilon}
        masked = grpo_advantage(rewards, 3, "batch", where=where, epsilon=epsilon)
        advantages = masked + rloo_advantage(pair, 3, **more)
        return jnp.sum(advantages * jax.nn.log_softmax(logits))

    arguments = jnp.linspace(-1.0, 1.0, 6), jnp.ones(2), jnp.float32(1e-8)
    of_logits, *others = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arguments)
    assert np.isfinite(of_logits).all() and np.asarray(of_logits).any()
    assert not any(np.asarray(gradient).any() for gradient in others)


@pytest.mark.parametrize(
    "scale", ["batch", *(pytest.param(s, marks=pytest.mark.exhaustive) for s in ("group", "none"))]
)
def test_large_batches_are_summed_accurately(scale):
    # 2**22 rewards about 0.5: a running float32 sum would lose the last digits
    rewards = np.random.default_rng(0).uniform(size=2**22).astype(np.float32)
    wide = rewards.astype(np.float64).reshape(-1, 8)
    centred = wide - wide.mean(1, keepdims=True)
    divisor = {"none": 1, "group": wide.std(1, ddof=1, keepdims=True), "batch": wide.std(ddof=1)}
    expected = (centred / divisor[scale]).ravel()
    np.testing.assert_allclose(grpo_advantage(rewards, 8, scale), expected, atol=2e-6)
    if scale != "group":
        whole = (wide.ravel() - wide.mean()) / (1 if scale == "none" else wide.std(ddof=1))
        np.testing.assert_allclose(grpo_advantage(rewards, 1, scale), whole, atol=2e-6)
