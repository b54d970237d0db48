"""Metrics of a step, by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax.data import Batch
from twinkle_jax.loss import PolicyMetrics
from twinkle_jax.rollout import Rollout
from twinkle_jax.training import (
    Learnt,
    RolloutConfig,
    StepSummary,
    TrainConfig,
    UpdateConfig,
    UpdateInfo,
)
from twinkle_jax.training.metrics import (
    rollout_facts,
    rollout_metrics,
    update_metrics,
)

CONFIG = TrainConfig(
    rollout=RolloutConfig(prompts=2, num_samples=2), update=UpdateConfig(mini_batches=1)
)


def rollout(rewards, truncated, lengths=(8, 8, 8, 8), **others):
    """Two prompts with two completions each."""
    return Rollout(
        batch=Batch(np.zeros((4, 8), np.int32), np.zeros((4, 8), np.int32)),
        trajectories=[],
        ground_truths=[],
        lengths=np.asarray(lengths),
        row_lengths=np.asarray(lengths),
        truncated=np.asarray(truncated),
        rewards=np.asarray(rewards, np.float32),
        **others,
    )


LAST_TRUNCATED = [False, False, False, True]


def test_metrics_of_a_rollout():
    parts = {
        "part": np.array([np.nan, 1.0, 0.0, 2.0]),
        "rare": np.array([np.nan, 0.5, np.nan, np.nan]),
    }
    drawn = rollout([0.0, 1.0, 0.5, 0.5], LAST_TRUNCATED, [2, 4, 6, 8], reward_parts=parts)
    metrics = rollout_metrics([drawn], CONFIG, 0.0)
    assert metrics.pop("time/sample") > 0
    assert metrics == pytest.approx(
        {
            "reward": 0.5,
            "reward_std": np.sqrt(0.5) / 2,  # of each prompt, with Bessel's correction: √0.5 and 0
            "frac_reward_zero_std": 0.5,
            "completions/mean_length": 5.0,
            "completions/min_length": 2.0,
            "completions/max_length": 8.0,
            "completions/clipped_ratio": 0.25,
            "completions/mean_terminated_length": 4.0,
            "rewards/part/mean": 1.0,  # without the row that has none
            "rewards/part/std": 1.0,  # √((0² + 1² + 1²) / 2), with Bessel's correction too
            "rewards/rare/mean": 0.5,
            "rewards/rare/std": 0.0,  # of one reward
        }
    )


@pytest.mark.parametrize(("masked", "share"), [(False, 1 / 4), (True, 2 / 4)])
def test_prompts_without_a_signal_are_counted_in_all_rollouts_of_a_step(masked, share):
    """Of four prompts one has equal rewards; a truncated completion leaves another one reward."""
    counted = ~np.asarray(LAST_TRUNCATED) if masked else None
    drawn = [
        rollout([0.0, 1.0, 0.0, 1.0], [False] * 4),
        rollout([0.5, 0.5, 0.0, 1.0], LAST_TRUNCATED, counted=counted),
    ]
    assert rollout_metrics(drawn, CONFIG, 0.0)["frac_reward_zero_std"] == share


def test_entropy_and_divergence_are_means_over_labels():
    """Log-ratios to the reference are 0 and 1: k3 is 0 and e - 2."""
    batch = Batch(
        jnp.zeros((1, 3), jnp.int32),
        jnp.array([[5, 6, -100]]),
        old_logps=jnp.array([[-1.0, -3.0, 9.0]]),
        ref_logps=jnp.array([[-1.0, -2.0, 0.0]]),
    )
    facts = rollout_facts(batch)
    assert facts["entropy"] == 2.0
    assert facts["kl"] == pytest.approx((np.e - 2) / 2, rel=1e-6)


def test_updates_are_averaged_each_over_what_its_loss_divides_by():
    """Two sequences of five tokens in all, one of seven, and an update that had none."""
    numbers = [(6.0, 2.0, 5.0), (4.0, 1.0, 7.0), (0.0, 0.0, 0.0)]
    infos = [UpdateInfo(1.0, True), UpdateInfo(np.nan, False), UpdateInfo(0.0, False)]
    summaries = [StepSummary(*map(np.float32, x), metrics=None) for x in numbers]
    averaged = update_metrics(Learnt(summaries, infos, None))
    assert averaged["loss"] == (6 / 2 + 4 / 1 + 0) / 3
    assert (averaged["skipped_updates"], averaged["updates_without_signal"]) == (1, 1)


def test_clipped_shares_are_averaged_over_updates():
    shares = [(0.25, 0.5, 0.0), (0.75, 0.0, 0.5)]
    losses = [PolicyMetrics(*x, entropy=None, ratio_min=1.0, ratio_max=1.0) for x in shares]
    summaries = [StepSummary(1.0, 1.0, 1.0, metrics=x) for x in losses]
    averaged = update_metrics(Learnt(summaries, [UpdateInfo(1.0, True)] * 2, None))
    names = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "approx_kl")
    assert [averaged[name] for name in names] == [0.5, 0.25, 0.75, 0.25]
