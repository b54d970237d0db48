"""What the updates of a step did, in numbers, under the names that TRL has given them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from twinkle_jax.training.step.learner import Learnt


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
