"""The variance example: its measurements obey the laws that are known, and every policy learns."""

import json

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest

from tests.examples import load

example = load("variance")
example.BATCHES, example.SEEDS, example.GROUP_SIZES = 2048, 16, (2, 8)

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("variance") / "made"
    measured, curves = example.main(["--output", str(folder), "--seed", "1"])
    return folder, measured, curves


@pytest.mark.parametrize("k", [2, 8])
def test_bias(run, k):
    facts = run[1][k]
    # no baseline, or one that leaves the sample out: unbiased
    for name in ("raw return", "RLOO"):
        assert facts[name]["bias"] < 2 * facts[name]["bias_error"]
        assert abs(facts[name]["size"] - 1) < 3 * facts[name]["bias_error"]
    # a baseline with the sample in it shrinks the gradient: by (K - 1) / K, or (N - 1) / N
    assert abs(facts["GRPO"]["size"] - (k - 1) / k) < 3 * facts["GRPO"]["bias_error"]
    assert facts["GRPO"]["bias"] > 0.9 / k
    expected = (example.SAMPLES - k) / example.SAMPLES  # the K samples of a prompt move together
    tolerance = 3 * facts["batch mean"]["bias_error"]
    assert min(abs(facts["batch mean"]["size"] - s) for s in (expected, 1)) < tolerance


@pytest.mark.parametrize("k", [2, 8])
def test_variance(run, k):
    facts = run[1][k]
    assert facts["RLOO"]["variance"] < facts["batch mean"]["variance"] / 2
    assert facts["batch mean"]["variance"] < facts["raw return"]["variance"] / 2
    # RLOO is GRPO times K / (K - 1), so relative to the signal they are the same
    np.testing.assert_allclose(facts["RLOO"]["noise"], facts["GRPO"]["noise"], rtol=1e-4)
    ratio = facts["RLOO"]["variance"] / facts["GRPO"]["variance"]
    np.testing.assert_allclose(ratio, (k / (k - 1)) ** 2, rtol=1e-4)


def test_the_exact_gradient_is_exact():
    gradient = jax.grad(example.expected_reward)(example.LOGITS)
    step = 1e-2
    for prompt, answer in ((0, 0), (3, 3), (7, 1)):
        moved = [
            example.expected_reward(example.LOGITS.at[prompt, answer].add(sign * step))
            for sign in (1, -1)
        ]
        difference = (moved[0] - moved[1]) / (2 * step)
        np.testing.assert_allclose(gradient[prompt, answer], difference, atol=2e-4)


def test_learning(run):
    curves = run[2]
    best = float(np.mean(np.max(example.REWARDS, axis=1)))
    for name, curve in curves.items():
        assert np.median(curve[:, 0]) == 2.0
        assert np.median(curve[:, -1]) > 2.4, name
    for name in ("GRPO", "RLOO"):
        assert np.percentile(curves[name][:, -1], 10) > best - 0.05
        assert np.std(curves[name][:, -1]) < np.std(curves["raw return"][:, -1]) / 4


def test_output(run, capsys):
    image = plt.imread(run[0] / "variance.png")
    assert image.std() > 0.05
    example.main(["--output", str(run[0])])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(last) == {*example.WEIGHTS, "seconds"}
