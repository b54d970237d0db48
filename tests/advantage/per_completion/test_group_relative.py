"""GRPO and RLOO: Twinkle's golden numbers, by hand, components, sizes, K = 1."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.advantage.reference import reference
from twinkle_jax import grpo_advantage, rloo_advantage
from twinkle_jax.advantage import get_advantage

GOLDEN = json.loads((pathlib.Path(__file__).parents[2] / "golden/advantage_cases.json").read_text())
SCALES = ("group", "batch", "none")
ESTIMATORS = {"grpo": grpo_advantage, "rloo": rloo_advantage}


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("scale", SCALES)
def test_golden_numbers_of_twinkle(estimator, scale):
    cases = [c for c in GOLDEN["cases"] if (c["estimator"], c["scale"]) == (estimator, scale)]
    assert len(cases) > 15
    for case in cases:
        call = {"num_generations": case["num_generations"], "scale": scale}
        for function in (get_advantage(estimator), ESTIMATORS[estimator]):
            np.testing.assert_allclose(
                function(case["rewards"], **call),
                case["advantages"],
                **GOLDEN["tolerance"],
                err_msg=case["name"],
            )


def test_grpo_by_hand():
    # group 1: mean 2, deviations -2 0 2, variance (4 + 0 + 4) / 2 = 4, standard deviation 2
    # group 2: mean 5, deviations -1 1 0, variance (1 + 1 + 0) / 2 = 1, standard deviation 1
    rewards = [0.0, 2.0, 4.0, 4.0, 6.0, 5.0]
    assert grpo_advantage(rewards, 3, "none").tolist() == [-2, 0, 2, -1, 1, 0]
    np.testing.assert_allclose(grpo_advantage(rewards, 3), [-1, 0, 1, -1, 1, 0], atol=1e-7)
    # all six: mean 3.5, squared deviations 12.25 2.25 .25 .25 6.25 2.25, sum 23.5, over 5: 4.7
    np.testing.assert_allclose(
        grpo_advantage(rewards, 3, "batch"), np.array([-2, 0, 2, -1, 1, 0]) / 4.7**0.5, rtol=1e-6
    )


def test_rloo_by_hand():
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


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("prompts", "size"), [(1, 2), (5, 3), (3, 7), (2, 64), (2, 65), (1, 300)])
def test_float64_reference(estimator, scale, prompts, size):
    rng = np.random.default_rng(size)
    for rewards in (
        rng.normal(size=prompts * size),
        rng.integers(0, 2, prompts * size).astype(float),
        rng.uniform(-1e3, 1e3, prompts * size),
    ):
        narrow = rewards.astype(np.float32)
        expected = reference(narrow, size, scale, leave_one_out=estimator == "rloo")
        result = ESTIMATORS[estimator](jnp.asarray(narrow), size, scale)
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("scale", SCALES)
def test_float64_stays_float64(estimator, scale):
    rewards = np.random.default_rng(0).normal(size=15)
    with jax.enable_x64(True):
        result = ESTIMATORS[estimator](rewards, 5, scale)
        assert result.dtype == jnp.float64
        expected = reference(rewards, 5, scale, leave_one_out=estimator == "rloo", dtype=np.float64)
        np.testing.assert_allclose(result, expected, rtol=1e-13, atol=1e-14)
        assert ESTIMATORS[estimator](rewards.tolist(), 5, scale).dtype == jnp.float64
        assert ESTIMATORS[estimator]([0.1] * 6, 3, scale).tolist() == [0.0] * 6


def test_epsilon_is_added_to_the_standard_deviation():
    # standard deviation 2, so 2 / (2 + 2) = 0.5
    for epsilon in (2, 2.0, np.float32(2), jnp.float32(2)):
        assert grpo_advantage([0.0, 2.0, 4.0], 3, epsilon=epsilon).tolist() == [-0.5, 0, 0.5]
        assert grpo_advantage([0.0, 2.0, 4.0], 3, "batch", epsilon=epsilon)[2] == 0.5
        assert grpo_advantage([0.0, 2.0, 4.0], 3, "none", epsilon=epsilon)[2] == 2
        on_device = grpo_advantage(jnp.asarray([0.0, 2.0, 4.0]), 3, epsilon=epsilon)
        assert on_device.tolist() == [-0.5, 0, 0.5]
    constant = grpo_advantage([1.0] * 4, 2, "batch", epsilon=0.0)
    assert constant.tolist() == [0.0] * 4
    np.testing.assert_allclose(
        grpo_advantage([0.0, 2.0, 4.0], 3, epsilon=0.0), [-1, 0, 1], atol=1e-7
    )


def test_components_are_summed_with_weights():
    rewards = np.array([[0.0, 1.0], [2.0, 3.0], [4.0, 0.0], [8.0, 1.0]], np.float32)
    assert grpo_advantage(rewards, 2, "none").tolist() == [-2, 2, -2.5, 2.5]
    # 0 + 2, 2 + 6 | 4 + 0, 8 + 2
    weighted = grpo_advantage(rewards, 2, "none", reward_weights=[1.0, 2.0])
    assert weighted.tolist() == [-3, 3, -3, 3]
    assert weighted.tolist() == grpo_advantage(rewards @ np.array([1, 2], "f4"), 2, "none").tolist()
    integers = grpo_advantage(rewards.astype(int), 2, "none", reward_weights=np.array([1, 2]))
    assert integers.tolist() == [-3, 3, -3, 3]


@pytest.mark.parametrize("scale", SCALES)
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
