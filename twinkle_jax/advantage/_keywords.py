"""Which keyword arguments an estimator takes, ignores, or refuses with a suggestion.

Estimators can be swapped without touching the call, so a hyper-parameter of another estimator is
ignored. Data is never ignored: a mask that nobody applies would change what is learnt.
"""

import difflib
from typing import Any

# What every group-relative estimator takes.
SHARED = ("where", "reward_weights", "epsilon", "axis_name")

# Hyper-parameters that only some estimators of the family know.
OTHERS = frozenset(
    {"gamma", "gae_lambda", "normalize", "epsilon", "axis_name", "k", "threshold", "baseline"}
)

_INSTEAD = {
    "mask": "where= (True = keep)",
    "masks": "where= (True = keep)",
    "completion_mask": "where= (True = keep), one entry a sample",
    "loss_mask": "where= (True = keep), one entry a sample",
    "values": "GAEAdvantage, which takes values",
    "lengths": "OPOAdvantage or ReinforcePlusPlusBaselineAdvantage, which take lengths",
    "greedy_rewards": "ReMaxAdvantage, which takes greedy_rewards",
    "segment_ids": "segment_grpo_advantage or segment_rloo_advantage",
    "num_segments": "segment_grpo_advantage or segment_rloo_advantage",
    "group_ids": "segment_grpo_advantage or segment_rloo_advantage",
    "index": "segment_grpo_advantage or segment_rloo_advantage",
    "weights": "reward_weights=",
    "eps": "epsilon=",
    "group_size": "num_generations=",
    "num_samples": "num_generations=",
}


def accepted(
    estimator: str, kwargs: dict[str, Any], own: tuple[str, ...] = SHARED
) -> dict[str, Any]:
    """Keep what `estimator` takes, drop hyper-parameters of others, refuse the rest by name."""
    unknown = [name for name in kwargs if name not in own and name not in OTHERS]
    if unknown:
        name = unknown[0]
        close = difflib.get_close_matches(name, [*own, "num_generations", "scale"], n=1)
        hint = _INSTEAD.get(name) or (f"{close[0]}=" if close else "")
        raise TypeError(
            f"{estimator} got an unexpected keyword argument {name!r}"
            + (f"; use {hint}" if hint else f"; it takes {', '.join(own)}")
        )
    return {name: value for name, value in kwargs.items() if name in own}
