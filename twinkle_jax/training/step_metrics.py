"""What a step says of itself in numbers, under the names that TRL has given them."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from twinkle_jax.training.dynamic_sampling import has_signal
from twinkle_jax.training.recipe import Recipe
from twinkle_jax.training.sample_and_score import Sampled
from twinkle_jax.training.update import Learnt


def sample_metrics(drawn: Sequence[Sampled], recipe: Recipe, began: float) -> dict[str, float]:
    """Describe all that a step has sampled, under the names that TRL has given them."""
    rewards = np.concatenate([s.rewards for s in drawn]).astype(np.float64)
    lengths = np.concatenate([s.lengths for s in drawn])
    truncated = np.concatenate([s.truncated for s in drawn])
    signal = np.concatenate([has_signal(s, recipe) for s in drawn])
    groups = rewards.reshape(-1, recipe.num_samples)
    metrics = {
        "reward": float(rewards.mean()),
        "reward_std": float(groups.std(axis=1, ddof=1).mean()),
        "frac_reward_zero_std": float(1 - signal.mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(truncated.mean()),
        "time/sample": time.perf_counter() - began,
    }
    if not truncated.all():
        metrics["completions/mean_terminated_length"] = float(lengths[~truncated].mean())
    return metrics


def update_metrics(learnt: Learnt) -> dict[str, float]:
    """Average over the updates of a step; the first tells how far sampler and trainer differ."""

    def mean(values: Sequence[Any]) -> float:
        return float(np.mean(np.asarray(values, np.float64)))

    updates = zip(learnt.summaries, learnt.infos, strict=True)
    skipped = [not info.applied and summary.tokens > 0 for summary, info in updates]
    metrics = {
        "loss": mean([s.loss_sum / max(float(s.denominator), 1.0) for s in learnt.summaries]),
        "grad_norm": mean([info.gradient_norm for info in learnt.infos]),
        "skipped_updates": float(sum(skipped)),
    }
    found = [s.metrics for s in learnt.summaries if s.metrics is not None]
    if found:
        low = mean([m.clip_fraction_low for m in found])
        high = mean([m.clip_fraction_high for m in found])
        ratios = np.asarray([found[0].ratio_min, found[0].ratio_max], np.float64)
        metrics |= {
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
            "approx_kl": mean([m.approximate_kl for m in found]),
            "sampling/logp_diff/max": float(np.max(np.abs(np.log(ratios)))),
        }
    return metrics
