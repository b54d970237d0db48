"""Metrics of a step, under TRL's names."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from twinkle_jax.data import IGNORE, Batch
from twinkle_jax.loss import PolicyMetrics, PreferenceMetrics, SamplerMismatch, kl_k3
from twinkle_jax.rollout import Rollout, episode_metrics, has_signal
from twinkle_jax.training.config import TrainConfig
from twinkle_jax.training.gradient import StepSummary
from twinkle_jax.training.state import UpdateInfo


@jax.jit
def rollout_facts(
    batch: Batch, teacher_logps: Float[Array, "rows time"] | None = None
) -> dict[str, Float[Array, ""]]:
    """Estimate entropy and the divergences from reference policy and teacher from samples."""
    assert batch.old_logps is not None
    kept = batch.labels != IGNORE
    tokens = jnp.maximum(jnp.sum(kept, dtype=jnp.float32), 1)
    facts = {"entropy": -jnp.sum(jnp.where(kept, batch.old_logps, 0)) / tokens}
    if batch.ref_logps is not None:
        divergence = kl_k3(batch.old_logps, batch.ref_logps, kept)
        facts["kl"] = jnp.sum(jnp.where(kept, divergence, 0)) / tokens
    if teacher_logps is not None:
        ratio = jnp.where(kept, batch.old_logps - teacher_logps, 0)
        facts["teacher/kl"] = jnp.sum(ratio) / tokens
    return facts


@jax.jit
def mismatch_metrics(mismatch: SamplerMismatch) -> dict[str, Float[Array, ""]]:
    """Compute the metrics of a mismatch on the device, to be read with the others."""
    return mismatch.metrics()


def rollout_metrics(
    drawn: Sequence[Rollout], config: TrainConfig, started: float
) -> dict[str, float]:
    """Metrics of all rollouts of a step, sampled since `started` (`time.perf_counter`).

    Examples have lengths alone: the tokens that are learned.
    """
    if config.examples is not None:
        return _length_metrics(drawn[0].lengths, started)
    samples = config.rollout.num_samples
    rewards = np.concatenate([r.scores for r in drawn]).astype(np.float64)
    lengths = np.concatenate([r.lengths for r in drawn])
    truncated = np.concatenate([r.truncated for r in drawn])
    signal = np.concatenate([has_signal(r, samples) for r in drawn])
    deviations = rewards.reshape(-1, samples).std(axis=1, ddof=1)
    episodes = [episode for r in drawn for episode in r.episodes or ()]
    if episodes:  # an episode that ends at the limit of turns is not truncated
        truncated = np.asarray([episode.ended == "length" for episode in episodes])
    kept = ~np.asarray([episode.failed for episode in episodes], bool)
    if not kept.all():  # failures of the environment are not the policy's
        groups = kept.reshape(-1, samples)
        several = groups.sum(axis=1) > 1
        deviations = rewards.reshape(-1, samples)[several].std(
            axis=1, ddof=1, where=groups[several]
        )
        rewards, lengths, truncated = rewards[kept], lengths[kept], truncated[kept]
        deviations = deviations if len(deviations) else np.zeros(1)
    if not len(rewards):
        return episode_metrics(episodes)
    metrics = _length_metrics(lengths, started)
    metrics["completions/clipped_ratio"] = float(truncated.mean())
    if not np.isnan(rewards).all():  # of completions that have one
        metrics |= {
            "reward": float(rewards.mean()),
            "reward_std": float(deviations.mean()),
            "frac_reward_zero_std": float(1 - signal.mean()),
        }
    if not truncated.all():
        metrics["completions/mean_terminated_length"] = float(lengths[~truncated].mean())
    for name in drawn[0].reward_parts:
        scores = np.concatenate([r.reward_parts[name] for r in drawn]).astype(np.float64)
        scores = scores[~np.isnan(scores)]  # rows that this reward does not apply to
        if scores.size:
            metrics[f"rewards/{name}/mean"] = float(scores.mean())
            # as `reward_std`: 0 for one reward, which has no deviation
            metrics[f"rewards/{name}/std"] = float(scores.std(ddof=min(scores.size - 1, 1)))
    return metrics | (episode_metrics(episodes) if episodes else {})


def _length_metrics(lengths: np.ndarray[Any, Any], started: float) -> dict[str, float]:
    return {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "time/sample": time.perf_counter() - started,
    }


class Learnt(NamedTuple):
    """What the updates of a step did; arrays on the device.

    Attributes:
        summaries: of each update's loss.
        infos: of each update: gradient norm, and whether it was applied.
        mismatch: differences between the sampler's log-probabilities and those of the policy before
            the first update; None if the batch has none.
    """

    summaries: list[StepSummary]
    infos: list[UpdateInfo]
    mismatch: SamplerMismatch | None


def update_metrics(learnt: Learnt) -> dict[str, float]:
    """Metrics averaged over the updates of a step, and the number of skipped updates."""

    def mean(values: Sequence[Any]) -> float:
        return float(np.mean(np.asarray(values, np.float64)))

    skipped = [info for info in learnt.infos if not info.applied]
    without_signal = sum(info.gradient_norm == 0 for info in skipped)
    metrics = {
        "loss": mean([s.loss_sum / max(float(s.denominator), 1.0) for s in learnt.summaries]),
        "grad_norm": mean([info.gradient_norm for info in learnt.infos]),
        "skipped_updates": float(len(skipped) - without_signal),
        "updates_without_signal": float(without_signal),
    }
    of_pairs = [s.metrics for s in learnt.summaries if isinstance(s.metrics, PreferenceMetrics)]
    if of_pairs:
        metrics |= {
            "rewards/chosen": mean([m.chosen_reward for m in of_pairs]),
            "rewards/rejected": mean([m.rejected_reward for m in of_pairs]),
            "rewards/margins": mean([m.margin for m in of_pairs]),
            "rewards/accuracies": mean([m.accuracy for m in of_pairs]),
        }
    losses = [s.metrics for s in learnt.summaries if isinstance(s.metrics, PolicyMetrics)]
    if losses:
        low = mean([m.clip_fraction_low for m in losses])
        high = mean([m.clip_fraction_high for m in losses])
        metrics |= {
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
            "approx_kl": mean([m.approximate_kl for m in losses]),
        }
    return metrics
