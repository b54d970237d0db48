"""The losses a second time: float64, plain Python, one token after the other.

Nothing here is shared with the package, and nothing is vectorised: a masked token is not visited.
"""

import math


def clamp(x, low, high):
    return min(max(x, low), high)


def kept(mask):
    """Positions of the tokens that count."""
    return [(i, t) for i, row in enumerate(mask) for t, keep in enumerate(row) if keep]


def advantage(advantages, i, t):
    row = advantages[i]
    return float(row[t]) if hasattr(row, "__len__") else float(row)


def per_token(mask, value):
    out = [[0.0] * len(row) for row in mask]
    for i, t in kept(mask):
        out[i][t] = value(i, t)
    return out


def token_log_ratio(new, old, mask):
    return per_token(mask, lambda i, t: clamp(float(new[i][t]) - float(old[i][t]), -20, 20))


def sequence_log_ratio(new, old, mask):
    ratios = token_log_ratio(new, old, mask)
    lengths = [sum(bool(keep) for keep in row) for row in mask]
    return per_token(mask, lambda i, t: math.fsum(ratios[i]) / lengths[i])


def clipped(log_ratio, advantages, mask, epsilon=0.2, epsilon_high=None, dual_clip=None):
    high = epsilon if epsilon_high is None else epsilon_high

    def value(i, t):
        ratio, a = math.exp(log_ratio[i][t]), advantage(advantages, i, t)
        loss = -min(ratio * a, clamp(ratio, 1 - epsilon, 1 + high) * a)
        return min(loss, -dual_clip * a) if dual_clip is not None and a < 0 else loss

    return per_token(mask, value)


def soft_gate(log_ratio, advantages, mask, tau_pos=1.0, tau_neg=1.0):
    def value(i, t):
        a = advantage(advantages, i, t)
        tau = tau_pos if a > 0 else tau_neg
        x = tau * (math.exp(log_ratio[i][t]) - 1)
        gate = 1 / (1 + math.exp(-x)) if x > -700 else 0.0
        return -4 / tau * gate * a

    return per_token(mask, value)


def clipped_importance(log_ratio, new, advantages, mask, epsilon=None, epsilon_high=0.2):
    def value(i, t):
        weight = min(math.exp(log_ratio[i][t]), 1 + epsilon_high)
        if epsilon is not None:
            weight = max(weight, 1 - epsilon)
        return -weight * advantage(advantages, i, t) * float(new[i][t])

    return per_token(mask, value)


def policy_gradient(new, advantages, mask):
    return per_token(mask, lambda i, t: -advantage(advantages, i, t) * float(new[i][t]))


def importance_weights(trainer, sampler, mask, maximum=2.0):
    ratios = token_log_ratio(trainer, sampler, mask)
    return per_token(mask, lambda i, t: min(math.exp(ratios[i][t]), maximum))


def sequence_weights(trainer, sampler, mask, maximum=2.0):
    ratios = token_log_ratio(trainer, sampler, mask)
    return per_token(
        mask, lambda i, t: min(math.exp(clamp(math.fsum(ratios[i]), -20, 20)), maximum)
    )


def masked_weights(trainer, sampler, mask, minimum=0.5, maximum=5.0):
    def value(i, t):
        ratio = math.exp(clamp(float(trainer[i][t]) - float(sampler[i][t]), -20, 20))
        return ratio if minimum <= ratio <= maximum else 0.0

    return per_token(mask, value)


def masked_sequence_weights(trainer, sampler, mask, minimum=0.0, maximum=3.0):
    ratios = token_log_ratio(trainer, sampler, mask)

    def value(i, t):
        ratio = math.exp(clamp(math.fsum(ratios[i]), -20, 20))
        return ratio if minimum <= ratio <= maximum else 0.0

    return per_token(mask, value)


def total_variation_mask(new, old, advantages, mask, delta=0.15, delta_high=None):
    def value(i, t):
        rise = math.exp(float(new[i][t])) - math.exp(float(old[i][t]))
        if advantage(advantages, i, t) > 0:
            return rise <= (delta if delta_high is None else delta_high)
        return -rise <= delta

    return per_token(mask, value)


def binary_kl_mask(new, old, advantages, mask, delta=0.05, delta_high=None):
    def value(i, t):
        p, q = math.exp(float(old[i][t])), math.exp(float(new[i][t]))
        others = max(1 - p, 1e-8), max(1 - q, 1e-8)
        kl = p * math.log(p / q) + others[0] * math.log(others[0] / others[1])
        if advantage(advantages, i, t) > 0:
            return not (q > p and kl > (delta if delta_high is None else delta_high))
        return not (q < p and kl > delta)

    return per_token(mask, value)


def off_policy_sequence_mask(new, sampler, advantages, mask, delta):
    def value(i, t):
        tokens = [u for u, keep in enumerate(mask[i]) if keep]
        moved = math.fsum(float(sampler[i][u]) - float(new[i][u]) for u in tokens) / len(tokens)
        return advantage(advantages, i, t) >= 0 or moved <= delta

    return per_token(mask, value)


def top_entropy_mask(entropies, mask, fraction=0.2):
    chosen = sorted((float(entropies[i][t]) for i, t in kept(mask)), reverse=True)
    last = chosen[math.floor(fraction * (len(chosen) - 1) + 1e-6)] if chosen else 0.0
    return per_token(mask, lambda i, t: float(entropies[i][t]) >= last)


def k1(new, ref, mask):
    return per_token(mask, lambda i, t: float(new[i][t]) - float(ref[i][t]))


def k2(new, ref, mask):
    return per_token(mask, lambda i, t: 0.5 * (float(new[i][t]) - float(ref[i][t])) ** 2)


def k3(new, ref, mask):
    def value(i, t):
        delta = clamp(float(ref[i][t]) - float(new[i][t]), -20, 20)
        return math.exp(delta) - delta - 1

    return per_token(mask, value)


def value_loss(values, old, returns, mask, epsilon=0.2):
    def value(i, t):
        v, o, r = float(values[i][t]), float(old[i][t]), float(returns[i][t])
        held = o + clamp(v - o, -epsilon, epsilon)
        return 0.5 * max((v - r) ** 2, (held - r) ** 2)

    return per_token(mask, value)


def token_mean(losses, mask):
    tokens = kept(mask)
    return math.fsum(losses[i][t] for i, t in tokens) / max(1, len(tokens))


def sequence_mean(losses, mask):
    total = 0.0
    for row, keep in zip(losses, mask, strict=True):
        chosen = [float(x) for x, k in zip(row, keep, strict=True) if k]
        total += math.fsum(chosen) / max(1, len(chosen))
    return total / len(mask)


def constant_length(losses, mask, length):
    return math.fsum(losses[i][t] for i, t in kept(mask)) / (len(mask) * length)


def added(first, second, weight, mask):
    return per_token(mask, lambda i, t: first[i][t] + weight * float(second[i][t]))
