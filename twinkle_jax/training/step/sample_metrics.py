"""What a step has sampled, in numbers, under the names that TRL has given them."""

import time
from collections.abc import Sequence

import numpy as np

from twinkle_jax.training.step.dynamic_sampling import has_signal
from twinkle_jax.training.step.recipe import Recipe
from twinkle_jax.training.step.sample_and_score import Sampled


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
