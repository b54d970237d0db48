"""Sentences are there when a number would puzzle, and only then."""

import math

import pytest

from twinkle_jax.training.display import explain

USUAL = {
    "loss": 0.02, "grad_norm": 0.5, "reward": 0.4, "frac_reward_zero_std": 0.75,
    "completions/clipped_ratio": 0.5, "skipped_updates": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("metrics", "names"),
    [
        ({}, []),
        (USUAL, []),
        (USUAL | {"loss": 1e-9}, ["zero loss"]),
        (USUAL | {"loss": -1e-9}, ["zero loss"]),
        (USUAL | {"loss": 0.0, "grad_norm": 0.0}, []),
        (USUAL | {"loss": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0}, ["flat"]),
        (USUAL | {"frac_reward_zero_std": 1.0, "kl": 0.1}, ["flat"]),  # whose gradient it is
        (USUAL | {"frac_reward_zero_std": 1.0}, []),  # as of an estimator without a baseline
        (USUAL | {"completions/clipped_ratio": 0.51}, ["cut"]),
        (USUAL | {"skipped_updates": 1.0, "loss": math.nan, "grad_norm": math.nan}, ["skipped"]),
    ],
)
def test_when(metrics, names):
    assert list(explain(metrics)) == names


@pytest.mark.parametrize(
    ("reward", "why"), [(0.0, "too hard"), (1.0, "solves"), (0.5, "temperature"), (None, "More")]
)
def test_why_nothing_is_learnt(reward, why):
    metrics = {"frac_reward_zero_std": 1.0} | ({} if reward is None else {"reward": reward})
    sentence = explain(metrics)["flat"]
    assert sentence.startswith("Nothing to learn from in this step: every completion of a prompt")
    assert why in sentence


def test_whether_the_policy_changed():
    flat = {"frac_reward_zero_std": 1.0, "updates_without_signal": 2.0, "grad_norm": 0.0}
    assert "No update was made: parameters" in explain(flat)["flat"]
    assert "No update" not in explain(flat | {"grad_norm": 0.5, "kl": 0.1})["flat"]
