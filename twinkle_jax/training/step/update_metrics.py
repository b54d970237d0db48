"""What the updates of a step did, in numbers, under the names that TRL has given them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from twinkle_jax.training.step.learner import Learnt


def update_metrics(learnt: Learnt) -> dict[str, float]:
    """Average over the updates of a step, and count those that were skipped."""

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
    found = [s.metrics for s in learnt.summaries if s.metrics is not None]
    if found:
        low = mean([m.clip_fraction_low for m in found])
        high = mean([m.clip_fraction_high for m in found])
        metrics |= {
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
            "approx_kl": mean([m.approximate_kl for m in found]),
        }
    if learnt.logp_diff is not None:
        metrics["sampling/logp_diff/max"] = float(learnt.logp_diff)
    return metrics
