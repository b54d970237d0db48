"""Estimators over time, written a second time as loops in float64."""

import numpy as np


def returns(rewards, keep, gamma, last=None):
    """Reward-to-go by a loop over `[batch, time]`."""
    rewards = np.where(keep, np.asarray(rewards, np.float64), 0)
    out = np.zeros(rewards.shape)
    for row in range(len(rewards)):
        after = 0.0 if last is None else float(last[row])
        for t in reversed(range(rewards.shape[1])):
            if keep[row, t]:
                after = rewards[row, t] + gamma * after
                out[row, t] = after
    return out


def gae(rewards, values, keep, gamma, trace_decay, last=None):
    """Advantages and returns by a loop over `[batch, time]`, not normalised."""
    advantages, targets = np.zeros(keep.shape), np.zeros(keep.shape)
    for row in range(len(keep)):
        value = 0.0 if last is None else float(last[row])
        advantage = 0.0
        for t in reversed(range(keep.shape[1])):
            if keep[row, t]:
                reward, own = float(rewards[row, t]), float(values[row, t])
                advantage = reward + gamma * value - own + gamma * trace_decay * advantage
                advantages[row, t], targets[row, t] = advantage, advantage + own
                value = own
    return advantages, targets


def whiten(tokens, keep, correction, epsilon=0.0):
    kept = np.asarray(tokens, np.float64)[keep]
    if kept.size < 2 or np.ptp(kept) == 0:
        return np.zeros(keep.shape)
    scores = (np.where(keep, tokens, 0) - kept.mean()) / (kept.std(ddof=correction) + epsilon)
    return np.where(keep, scores, 0)
