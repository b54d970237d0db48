"""Every estimator written a second time from the papers: float64, one group and sample at a time.

Where a formula averages over subsets, all of them are enumerated. Nothing is shared with the
package. Rewards are lists of floats; `keep` tells which of them count. Whether a group of GRPO and
RLOO holds a signal is decided in the type that the package computes in, all else in float64.
"""

import itertools
import math
import statistics

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


def group_relative(scale, *, leave_one_out):
    """GRPO or RLOO as `reference(rewards, ids, keep)`."""
    return lambda rewards, ids, keep: segment_reference(
        rewards, ids, scale, leave_one_out=leave_one_out, keep=keep
    )


def per_group(rule):
    """Make `reference(rewards, ids, keep, **data)` of a rule for one group without masks.

    The rule gets the kept rewards of a group, and of each array in `data` their entries; groups
    that are all equal, or of one, are 0.
    """

    def reference(rewards, ids, keep, *, coefficients=(), **data):
        out = np.zeros(len(rewards))
        for places in members(ids, keep).values():
            group = [float(rewards[j]) for j in places]
            if len(group) < 2 or max(group) == min(group):
                continue
            own = {key: [float(value[j]) for j in places] for key, value in data.items()}
            out[places] = rule(group, **own, **dict(coefficients))
        return out

    return reference


@per_group
def maxrl(group, epsilon=0.0):
    mean = math.fsum(group) / len(group)
    return [(r - mean) / (mean + epsilon) if mean > 0 else 0.0 for r in group]


@per_group
def opo(group, lengths):
    if not sum(lengths):
        return [0.0] * len(group)
    baseline = math.fsum(n * r for n, r in zip(lengths, group, strict=True)) / math.fsum(lengths)
    return [r - baseline for r in group]


@per_group
def dgpo(group, epsilon=0.0):
    mean = math.fsum(group) / len(group)
    total = math.fsum(abs(r - mean) for r in group)
    return [len(group) * (r - mean) / (total + len(group) * epsilon) for r in group]


@per_group
def mc_grpo(group, epsilon=1e-3):
    median = statistics.median_low(group)
    distances = [abs(r - median) for r in group]
    scale = statistics.median_low(distances) or math.fsum(distances) / len(group)
    return [(r - median) / (scale + epsilon) for r in group]


@per_group
def pass_at_k(group, k, threshold=0.5):
    """Standard scores of all subsets of k, averaged over those that hold a sample."""
    subsets = list(itertools.combinations(range(len(group)), k))
    passed = [float(any(group[i] > threshold for i in subset)) for subset in subsets]
    if not subsets or len(set(passed)) == 1:
        return [0.0] * len(group)
    mean, std = statistics.mean(passed), statistics.pstdev(passed)
    scores = [(p - mean) / std for p in passed]
    return [
        statistics.mean(s for s, subset in zip(scores, subsets, strict=True) if i in subset)
        for i in range(len(group))
    ]


def _best(values, k):
    """Mean of the largest over all subsets of k."""
    return statistics.mean(max(subset) for subset in itertools.combinations(values, k))


@per_group
def pkpo(group, k, baseline="mean"):
    count = len(group)
    too_few = {"mean": count < k, "leave_one_out": count <= k, "leave_one_out_minus_one": count < k}
    if too_few[baseline]:
        return [0.0] * count
    subsets = list(itertools.combinations(range(count), k))
    credit = [
        math.fsum(max(group[j] for j in subset) for subset in subsets if i in subset) / len(subsets)
        for i in range(count)
    ]
    if baseline == "mean":
        return [c - statistics.mean(credit) for c in credit]
    size = k if baseline == "leave_one_out" else k - 1
    return [c - k / count * _best(group[:i] + group[i + 1 :], size) for i, c in enumerate(credit)]


def reinforce_plus_plus_baseline(rewards, ids, keep, *, lengths, epsilon=0.0):
    """Write the deviation of a sample once for each of its tokens, and whiten the tokens."""
    deviations = per_group(lambda g: [r - math.fsum(g) / len(g) for r in g])(rewards, ids, keep)
    tokens = [
        d for d, n, k in zip(deviations, lengths, keep, strict=True) if k for _ in range(int(n))
    ]
    if not tokens or max(tokens) == min(tokens):
        return np.zeros(len(rewards))
    mean, std = statistics.mean(tokens), statistics.stdev(tokens)
    used = [bool(k and n) for k, n in zip(keep, lengths, strict=True)]
    distinct = {
        name: len({float(rewards[j]) for j in places})
        for name, places in members(ids, keep).items()
    }
    signal = [distinct.get(i, 0) > 1 for i in ids]
    return np.where(
        np.asarray(used) & np.asarray(signal), (deviations - mean) / (std + epsilon), 0.0
    )


def gdpo(rewards, ids, keep, *, weights=None, epsilon=0.0):
    """Rewards and keep are `[N, C]`."""
    rewards, keep = np.asarray(rewards, np.float64), np.asarray(keep)
    weights = np.ones(rewards.shape[1]) if weights is None else weights
    standard = per_group(lambda g: [(r - statistics.mean(g)) / (_std(g) + epsilon) for r in g])
    sums = np.zeros(len(rewards))
    for column, weight in enumerate(weights):
        sums += weight * standard(rewards[:, column], ids, keep[:, column])
    kept = keep.any(axis=1)
    std = _std(list(sums[kept]))
    return np.where(kept, sums / (std + epsilon), 0.0) if std else np.zeros(len(rewards))


def remax(rewards, keep, greedy, size):
    baseline = np.repeat(np.asarray(greedy, np.float64), size)
    return np.where(keep, np.asarray(rewards, np.float64) - baseline, 0.0)


def reinforce(rewards, ids, keep):
    del ids
    return np.where(keep, np.asarray(rewards, np.float64), 0.0)
