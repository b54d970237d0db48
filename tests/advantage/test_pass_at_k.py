"""Pass@k training and PKPO: all subsets enumerated, and hundreds of samples without overflow."""

import fractions
import itertools
import math
import statistics

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax.advantage import pass_at_k_advantage, pkpo_advantage, rloo_advantage

BASELINES = ("mean", "leave_one_out", "leave_one_out_minus_one")
EVERY_K = [1, 3, 7, *(pytest.param(k, marks=pytest.mark.exhaustive) for k in (2, 4, 5, 6))]


def _batch(kind, seed=0):
    """Eight prompts of seven samples, with ties, and every number of successes."""
    rng = np.random.default_rng(seed)
    if kind == "real":
        return rng.normal(size=56).astype(np.float32)
    if kind == "ties":
        return rng.integers(-2, 3, 56).astype(np.float32)
    return np.concatenate([rng.permutation(7) < passed for passed in range(8)]).astype(np.float32)


def _best(values, k):
    """Mean of the largest over all subsets of k."""
    return statistics.mean(max(subset) for subset in itertools.combinations(values, k))


def _by_enumeration(rule, rewards, keep):
    """Apply a rule for one group of kept rewards to each group of seven."""
    out = np.zeros(len(rewards))
    for start in range(0, len(rewards), 7):
        places = start + np.flatnonzero(keep[start : start + 7])
        group = [float(r) for r in rewards[places]]
        if len(set(group)) > 1:
            out[places] = rule(group)
    return out


def _pass_at_k(group, k):
    """Standard scores of all subsets of k, averaged over those that hold a sample."""
    subsets = list(itertools.combinations(range(len(group)), k))
    passed = [float(any(group[i] > 0.5 for i in subset)) for subset in subsets]
    if len(set(passed)) < 2:
        return [0.0] * len(group)
    mean, std = statistics.mean(passed), statistics.pstdev(passed)
    scores = [(p - mean) / std for p in passed]
    return [
        statistics.mean(s for s, subset in zip(scores, subsets, strict=True) if i in subset)
        for i in range(len(group))
    ]


def _pkpo(group, k, baseline):
    count = len(group)
    if count < k + (baseline == "leave_one_out"):
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


@pytest.mark.parametrize("k", EVERY_K)
def test_pass_at_k_is_the_mean_over_all_subsets(k):
    keep = np.random.default_rng(1).uniform(size=56) < 0.8
    for mask in (np.ones(56, bool), keep):
        result = pass_at_k_advantage(_batch("binary"), 7, k=k, where=mask)
        expected = _by_enumeration(lambda g: _pass_at_k(g, k), _batch("binary"), mask)
        np.testing.assert_allclose(result, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("k", EVERY_K)
@pytest.mark.parametrize("baseline", BASELINES)
def test_pkpo_is_the_mean_over_all_subsets(k, baseline):
    if (baseline, k) in (("leave_one_out_minus_one", 1), ("leave_one_out", 7)):
        return
    keep = np.random.default_rng(1).uniform(size=56) < 0.8
    for kind in ("binary", "ties", "real"):
        for mask in (np.ones(56, bool), keep):
            result = pkpo_advantage(_batch(kind), 7, k=k, baseline=baseline, where=mask)
            expected = _by_enumeration(lambda g: _pkpo(g, k, baseline), _batch(kind), mask)
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_by_hand():
    # 3 of the 6 pairs hold the success: score 1; pairs with a failure: 1 of 3 passes, (1 - 2) / 3
    result = pass_at_k_advantage([1.0, 0.0, 0.0, 0.0], 4, k=2)
    np.testing.assert_allclose(result, [1, -1 / 3, -1 / 3, -1 / 3], rtol=1e-6)
    # credit of a success 1/2, of a failure 1/2 * 2/3; their mean 5/12
    result = pkpo_advantage([1.0, 0.0, 0.0, 1.0], 4, k=2)
    np.testing.assert_allclose(result, [1 / 12, -1 / 12, -1 / 12, 1 / 12], rtol=1e-5)
    # the best raises every pair that it is in: by 8 - 4, 8 - 0, 8 - 0, and so on; k / n = 1/2
    result = pkpo_advantage([4.0, 0.0, 0.0, 8.0], 4, k=2, baseline="leave_one_out_minus_one")
    np.testing.assert_allclose(result, np.array([8 / 3, 0, 0, 20 / 3]) / 2, rtol=1e-6)
    # others of 8: pairs of 4 0 0 have the best 4 4 0, mean 8/3; with it, always 8
    result = pkpo_advantage([4.0, 0.0, 0.0, 8.0], 4, k=2, baseline="leave_one_out")
    np.testing.assert_allclose(result[3], (8 - 8 / 3) / 2, rtol=1e-6)


def test_thresholds():
    rewards = [-1.0, 1.0, -1.0, -1.0]
    default = pass_at_k_advantage(rewards, 4, k=2)
    np.testing.assert_allclose(default, [-1 / 3, 1, -1 / 3, -1 / 3], rtol=1e-6)
    for threshold in (-2.0, 1.0):  # all pass, none passes: above it, not at it
        assert pass_at_k_advantage(rewards, 4, k=2, threshold=threshold).tolist() == [0] * 4
    assert pass_at_k_advantage([0.2, 0.3, 0.2, 0.2], 4, k=2).tolist() == [0] * 4


def test_one_sample_a_subset_is_the_usual_kind():
    rewards = _batch("real")
    leave_one_out = pkpo_advantage(rewards, 7, k=1, baseline="leave_one_out")
    usual = np.asarray(rloo_advantage(rewards, 7, "none")) / 7
    np.testing.assert_allclose(leave_one_out, usual, rtol=1e-5, atol=1e-7)
    # pass@1: the standard score of a coin with p = 2/5, over population standard deviation
    result = pass_at_k_advantage([1.0, 1.0, 0.0, 0.0, 0.0], 5, k=1)
    np.testing.assert_allclose(result[0], 0.6 / math.sqrt(0.24), rtol=1e-6)


def test_all_samples_in_one_subset():
    rewards = [4.0, 0.0, 1.0, 8.0]
    assert pkpo_advantage(rewards, 4, k=4).tolist() == [0] * 4
    result = pkpo_advantage(rewards, 4, k=4, baseline="leave_one_out_minus_one")
    assert result.tolist() == [0, 0, 0, 4]  # only the best raises the best: by 8 - 4
    assert pass_at_k_advantage(rewards, 4, k=4).tolist() == [0] * 4


def _exact_pass_at_k(count, passed, k):
    none = fractions.Fraction(math.comb(count - passed, k), math.comb(count, k))
    success = math.sqrt(none / (1 - none)) if none else 0.0
    return success, -success * passed / (count - passed)


def test_hundreds_of_samples():
    count = 500
    for passed in (1, 2, 17, 255, 490):
        rewards = np.zeros(count, np.float32)
        rewards[:passed] = 1
        for k in (1, 2, 8, 64, 256, 400, 499):
            result = np.asarray(pass_at_k_advantage(rewards, count, k=jnp.int32(k)))
            expected = _exact_pass_at_k(count, passed, k)
            first_and_last = (result[0], result[-1])
            # exp(x) loses as many digits as x has before the point
            rtol = 2e-6 * (1 + max(0.0, -math.log(expected[0]))) if expected[0] else 1
            np.testing.assert_allclose(first_and_last, expected, rtol=rtol, atol=1e-37)
            assert np.isfinite(result).all()


def _exact_best(falling, size):
    """Mean best over all subsets, in integers: the best is j in C(n-1-j, size-1) of them."""
    counts = (math.comb(len(falling) - 1 - j, size - 1) for j in range(len(falling)))
    total = sum(value * count for value, count in zip(falling, counts, strict=True))
    return total / math.comb(len(falling), size)


def _exact_pkpo(falling, i, k, baseline):
    """Advantage of the i-th best of `falling`: the best of a subset through i, less a baseline."""
    count = len(falling)
    others = falling[:i] + falling[i + 1 :]
    share = fractions.Fraction(k, count)
    # A subset through i is i and k - 1 others; its best is an other one before i, or else i.
    ahead = sum(falling[j] * math.comb(count - 2 - j, k - 2) for j in range(i))
    as_largest = falling[i] * math.comb(count - 1 - i, k - 1)
    credit = share * (ahead + as_largest) / math.comb(count - 1, k - 1)
    if baseline == "mean":  # the credits of a group add up to k times the mean best
        return credit - share * _exact_best(falling, k)
    return credit - share * _exact_best(others, k if baseline == "leave_one_out" else k - 1)


@pytest.mark.parametrize("baseline", BASELINES)
def test_pkpo_of_hundreds_of_samples(baseline):
    count = 300
    rewards = np.random.default_rng(0).normal(size=count).astype(np.float32)
    order = np.argsort(-rewards)
    falling = [fractions.Fraction(float(r)) for r in rewards[order]]
    for k in (2, 16, 128, 299):
        result = np.asarray(pkpo_advantage(rewards, count, k=jnp.int32(k), baseline=baseline))
        for i in (0, 1, 150, 299):
            expected = float(_exact_pkpo(falling, i, k, baseline))
            np.testing.assert_allclose(result[order[i]], expected, rtol=2e-5, atol=1e-6)


def test_a_traced_k_compiles_once_and_equals_a_number():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(rewards, k):
        return (
            pass_at_k_advantage(rewards, 7, k=k),
            pkpo_advantage(rewards, 7, k=k),
            pkpo_advantage(rewards, 7, k=k, baseline="leave_one_out_minus_one"),
        )

    rewards = jnp.asarray(_batch("binary"))
    for k in (2, 3, 7):
        first, second, third = run(rewards, k)
        np.testing.assert_allclose(first, pass_at_k_advantage(rewards, 7, k=k), rtol=1e-6)
        np.testing.assert_allclose(second, pkpo_advantage(rewards, 7, k=k), rtol=1e-6, atol=1e-8)
        one_less = pkpo_advantage(rewards, 7, k=k, baseline="leave_one_out_minus_one")
        np.testing.assert_allclose(third, one_less, rtol=1e-6, atol=1e-8)
    for k in (0, -1, 8):  # what nobody could check is nothing, not garbage
        assert not any(np.asarray(x).any() for x in run(rewards, k))
    loo = jax.jit(lambda k: pkpo_advantage(rewards, 7, k=k, baseline="leave_one_out"))
    assert not np.asarray(loo(7)).any()
    assert not np.asarray(run(rewards, 1)[2]).any()


@pytest.mark.parametrize("baseline", BASELINES)
def test_pkpo_under_an_offset(baseline):
    rewards = np.round(_batch("real") * 64) / 64
    moved = pkpo_advantage(rewards + np.float32(2**16), 7, k=3, baseline=baseline)
    here = pkpo_advantage(rewards, 7, k=3, baseline=baseline)
    np.testing.assert_allclose(moved, here, rtol=1e-6, atol=1e-7)


def test_large_rewards():
    rewards = _batch("real") * np.float32(1e18)
    for baseline in BASELINES:
        result = pkpo_advantage(rewards, 7, k=3, baseline=baseline)
        scaled = pkpo_advantage(_batch("real"), 7, k=3, baseline=baseline)
        np.testing.assert_allclose(np.asarray(result) / 1e18, scaled, rtol=1e-4, atol=1e-6)


def test_leave_one_out_baselines_are_unbiased():
    # Expectation of sum_i A_i dlog p(x_i) over all outcomes of 4 draws from a small policy.
    p, values, count, k = np.array([0.5, 0.3, 0.2]), np.array([0.0, 1.0, 3.0]), 4, 2
    outcomes = np.stack(np.meshgrid(*[range(3)] * count, indexing="ij"), -1).reshape(-1, count)
    weight = p[outcomes].prod(axis=1)
    rewards = values[outcomes].astype(np.float32).ravel()
    score = np.eye(3)[outcomes] / p[outcomes][..., None]  # d log p(x) / d p
    pairs = np.maximum(values[:, None], values[None, :])
    exact = 2 * pairs @ p  # gradient of the mean best of two, not projected on the simplex
    for baseline in ("leave_one_out", "leave_one_out_minus_one"):
        result = np.asarray(pkpo_advantage(rewards, count, k=k, baseline=baseline))
        estimate = np.einsum("o,oi,oij->j", weight, result.reshape(-1, count), score)
        project = np.eye(3) - 1 / 3  # a baseline adds a constant to the gradient in p
        np.testing.assert_allclose(project @ estimate, project @ exact, rtol=1e-5, atol=1e-5)
