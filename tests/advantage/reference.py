"""Every estimator a second time, from the papers, over whole arrays in float64 NumPy.

Nothing is shared with the package. `ids` are the groups of samples, from 0; `keep` tells which
samples count. Rewards are meant to be exact in float32. `test_by_hand.py` checks the
estimators over subsets against an enumeration of all subsets besides.
"""

import math

import numpy as np


def combine(rewards, weights, where):
    """Turn `[N]` or `[N, C]` rewards into one a sample, and say which samples count."""
    rewards = np.asarray(rewards, np.float64)
    if rewards.ndim == 1:
        return rewards, np.ones(len(rewards), bool) if where is None else where
    cells = np.ones(rewards.shape, bool)
    if where is not None:
        cells = np.broadcast_to(where.reshape(len(where), -1), rewards.shape)
    weights = np.ones(rewards.shape[1]) if weights is None else weights
    return np.where(cells, rewards, 0) @ np.asarray(weights, np.float64), cells.any(axis=1)


class Groups:
    """Sums and extremes of each group, repeated for each of its samples."""

    def __init__(self, ids, keep):
        self.ids, self.keep, self.groups = np.asarray(ids), np.asarray(keep), int(np.max(ids)) + 1
        self.count = self.total(np.ones(len(ids)))

    def total(self, values):
        weights = np.where(self.keep, values, 0.0)
        return np.bincount(self.ids, weights, self.groups)[self.ids]

    def mean(self, values):
        return self.total(values) / np.maximum(self.count, 1)

    def std(self, values):
        squares = self.total((values - self.mean(values)) ** 2)
        return np.sqrt(squares / np.maximum(self.count - 1, 1))

    def ranks(self, values):
        """Place of each sample in its group, 0 the largest; masked samples come last."""
        falling = np.lexsort((-np.where(self.keep, values, -np.inf), self.ids))
        places = np.empty(len(values), int)
        places[falling] = np.arange(len(values))
        starts = np.full(self.groups, len(values))
        np.minimum.at(starts, self.ids, places)
        return places - starts[self.ids]

    def signal(self, values):
        top, bottom = np.full(self.groups, -np.inf), np.full(self.groups, np.inf)
        np.maximum.at(top, self.ids[self.keep], values[self.keep])
        np.minimum.at(bottom, self.ids[self.keep], values[self.keep])
        return (top > bottom)[self.ids] & self.keep


def _batch(keep):
    return Groups(np.zeros(len(keep), int), keep)


def _divided(values, divisor):
    """The quotient; 0 where the divisor is 0."""
    return np.divide(values, divisor, out=np.zeros(len(values)), where=divisor != 0)


def grpo(rewards, ids, keep, *, scale):
    groups = Groups(ids, keep)
    std = {"group": groups.std, "batch": _batch(keep).std}.get(scale, np.ones_like)(rewards)
    centred = rewards - groups.mean(rewards)
    return np.where(groups.signal(rewards), _divided(centred, std), 0)


def rloo(rewards, ids, keep, *, scale):
    groups = Groups(ids, keep)
    std = {"group": groups.std, "batch": _batch(keep).std}.get(scale, np.ones_like)(rewards)
    others = (groups.total(rewards) - rewards) / np.maximum(groups.count - 1, 1)
    return np.where(groups.signal(rewards), _divided(rewards - others, std), 0)


def reinforce(rewards, ids, keep):
    del ids
    return np.where(keep, rewards, 0)


def remax(rewards, ids, keep, *, greedy_rewards):
    return np.where(keep, rewards - greedy_rewards[ids], 0)


def opo(rewards, ids, keep, *, lengths):
    groups = Groups(ids, keep)
    baseline = _divided(groups.total(lengths * rewards), groups.total(lengths))
    tokens = groups.total(lengths) > 0
    return np.where(groups.signal(rewards) & tokens, rewards - baseline, 0)


def maxrl(rewards, ids, keep):
    groups = Groups(ids, keep)
    mean = groups.mean(rewards)
    return np.where(groups.signal(rewards), _divided(rewards - mean, np.maximum(mean, 0)), 0)


def dgpo(rewards, ids, keep):
    groups = Groups(ids, keep)
    centred = rewards - groups.mean(rewards)
    return np.where(groups.signal(rewards), _divided(centred, groups.mean(np.abs(centred))), 0)


def _median(values, groups):
    """The lower middle of each group."""
    middle = groups.keep & (groups.ranks(values) == groups.count // 2)
    return np.bincount(groups.ids[middle], values[middle], groups.groups)[groups.ids]


def mc_grpo(rewards, ids, keep, *, epsilon=1e-3):
    groups = Groups(ids, keep)
    centred = rewards - _median(rewards, groups)
    typical = _median(np.abs(centred), groups)
    typical = np.where(typical > 0, typical, groups.mean(np.abs(centred)))
    return np.where(groups.signal(rewards), centred / (typical + epsilon), 0)


def reinforce_plus_plus_baseline(rewards, ids, keep, *, lengths):
    groups, tokens = Groups(ids, keep), np.where(keep, lengths, 0.0)
    signal = groups.signal(rewards)
    deviations = np.where(signal, rewards - groups.mean(rewards), 0)
    mean = np.sum(tokens * deviations) / np.sum(tokens)
    std = np.sqrt(np.sum(tokens * (deviations - mean) ** 2) / (np.sum(tokens) - 1))
    scores = _divided(deviations - mean, np.full(len(rewards), std))
    return np.where(signal & (tokens > 0), scores, 0)


def gdpo(rewards, ids, cells, *, weights=None):
    """Rewards and cells are `[N, C]`, or `[N]` for one component."""
    rewards = np.asarray(rewards, np.float64).reshape(len(rewards), -1)
    cells = np.broadcast_to(np.asarray(cells).reshape(len(cells), -1), rewards.shape)
    weights = np.ones(rewards.shape[1]) if weights is None else weights
    sums = sum(
        weight * grpo(rewards[:, c], ids, cells[:, c], scale="group")
        for c, weight in enumerate(weights)
    )
    kept = cells.any(axis=1)
    return np.where(kept, _divided(sums, _batch(kept).std(sums)), 0)


_FACTORIALS = np.cumsum(np.log(np.maximum(np.arange(200), 1)))


def _choose(n, k):
    """Binomial coefficients, element by element; 0 outside of the triangle."""
    n, k = np.broadcast_arrays(np.asarray(n, int), np.asarray(k, int))
    inside = (k >= 0) & (k <= n)
    n, k = np.where(inside, n, 0), np.where(inside, k, 0)
    return np.where(inside, np.exp(_FACTORIALS[n] - _FACTORIALS[k] - _FACTORIALS[n - k]), 0)


def pass_at_k(rewards, ids, keep, *, k, threshold=0.5):
    groups = Groups(ids, keep)
    passes = keep & (rewards > threshold)
    count, passed = groups.count, groups.total(passes)
    none = _divided(_choose(count - passed, k), _choose(count, k))
    success = np.sqrt(_divided(none, 1 - none))
    failure = -success * _divided(passed, count - passed)
    varies = keep & (none > 0) & (passed > 0)
    return np.where(varies, np.where(passes, success, failure), 0)


def pkpo(rewards, ids, keep, *, k, baseline):
    """Weigh each reward by the number of subsets in which it is the best."""
    groups = Groups(ids, keep)
    count, rank = groups.count.astype(int), groups.ranks(rewards)
    order = np.lexsort((rank, ids))

    def ahead(values):
        """Sum over the better samples of the group."""
        running = np.empty(len(values))
        running[order] = np.cumsum(np.where(keep, values, 0)[order])
        first = np.full(groups.groups, np.inf)
        running -= np.where(keep, values, 0)
        np.minimum.at(first, ids[rank == 0], running[rank == 0])
        return running - first[ids]

    def best_of(size, among):
        """Sum of the best of all `size`-subsets of the others of each sample."""
        better = rewards * _choose(among - 1 - rank, size - 1)
        worse = rewards * _choose(among - rank, size - 1)
        return ahead(better) + groups.total(worse) - ahead(worse) - np.where(keep, worse, 0)

    credit = ahead(rewards * _choose(count - 2 - rank, k - 2))
    credit = credit + rewards * _choose(count - 1 - rank, k - 1)
    credit = _divided(credit, _choose(count, k))
    if baseline == "mean":
        subtracted = groups.mean(credit)
    else:
        size = k if baseline == "leave_one_out" else k - 1
        best = _divided(best_of(size, count - 1), _choose(count - 1, size))
        subtracted = k / np.maximum(count, 1) * best
    enough = count >= k + (baseline == "leave_one_out")
    return np.where(groups.signal(rewards) & enough, credit - subtracted, 0)


def _start(rows, last):
    return np.zeros(len(rows)) if last is None else np.asarray(last, np.float64)


def returns(rewards, keep, gamma, last=None):
    """Reward-to-go over `[batch, time]`; masked steps are skipped."""
    out, after = np.zeros(rewards.shape), _start(rewards, last)
    for t in reversed(range(rewards.shape[1])):
        after = np.where(keep[:, t], rewards[:, t] + gamma * after, after)
        out[:, t] = np.where(keep[:, t], after, 0)
    return out


def gae(rewards, values, keep, gamma, trace_decay, last=None):
    """Advantages, not normalised, and returns."""
    rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    advantages, advantage = np.zeros(keep.shape), np.zeros(len(keep))
    value = _start(keep, last)
    for t in reversed(range(keep.shape[1])):
        error = rewards[:, t] + gamma * value - values[:, t]
        advantage = np.where(keep[:, t], error + gamma * trace_decay * advantage, advantage)
        value = np.where(keep[:, t], values[:, t], value)
        advantages[:, t] = np.where(keep[:, t], advantage, 0)
    return advantages, np.where(keep, advantages + values, 0)


def whiten(tokens, keep, correction, epsilon=0.0):
    kept = np.asarray(tokens, np.float64)[keep]
    mean = math.fsum(kept) / kept.size
    std = math.sqrt(math.fsum((kept - mean) ** 2) / (kept.size - correction))
    return np.where(keep, (tokens - mean) / (std + epsilon), 0)
