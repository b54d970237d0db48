"""The contract of an advantage, written a second time: float64, one group and sample at a time.

Nothing here is shared with the package. Whether a group holds a signal is decided in the type that
the package computes in, everything else in float64.
"""

import math

import numpy as np


def _mean(values):
    return math.fsum(values) / len(values)


def _std(values):
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def _signal(values, dtype):
    if len(values) < 2:
        return False
    narrow = np.asarray(values, dtype)
    return float(narrow.max() - narrow.min()) > 4 * float(np.spacing(np.abs(narrow).max()))


def members(ids, keep):
    """Places of the kept samples of each group, by its id."""
    places = {}
    for j, name in enumerate(ids):
        if keep[j]:
            places.setdefault(name, []).append(j)
    return places


def segment_reference(
    rewards, ids, scale, *, leave_one_out, keep=None, epsilon=1e-8, dtype=np.float32
):
    """Advantages of groups that share an id; `None` is no group."""
    rewards = [float(r) for r in np.asarray(rewards, dtype)]
    keep = [True] * len(rewards) if keep is None else list(keep)
    keep = [bool(k) and i is not None for k, i in zip(keep, ids, strict=True)]
    batch = _std([r for r, k in zip(rewards, keep, strict=True) if k])
    out = np.zeros(len(rewards))
    for places in members(ids, keep).values():
        group = [rewards[j] for j in places]
        if not _signal(group, dtype):
            continue
        divisor = {"none": 1.0, "group": _std(group) + epsilon, "batch": batch + epsilon}
        for place, j in enumerate(places):
            others = group[:place] + group[place + 1 :]
            baseline = _mean(others) if leave_one_out else _mean(group)
            out[j] = (rewards[j] - baseline) / divisor[scale]
    return out


def reference(
    rewards, num_generations, scale, *, leave_one_out, keep=None, epsilon=1e-8, dtype=np.float32
):
    """Advantages of groups of `num_generations` neighbours."""
    count = len(rewards)
    kept = np.ones(count, bool) if keep is None else np.asarray(keep)
    if num_generations == 1 and scale == "group":
        return np.where(kept, np.asarray(rewards, np.float64), 0)
    if num_generations == 1:
        ids, scale = [0] * count, "group" if scale == "batch" else "none"
    else:
        ids = [i // num_generations for i in range(count)]
    return segment_reference(
        rewards, ids, scale, leave_one_out=leave_one_out, keep=keep, epsilon=epsilon, dtype=dtype
    )
