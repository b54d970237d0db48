"""Filters keep what sorting would keep, and what transformers' logits processors keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax.sampler import Sampling
from twinkle_jax.sampler.drawing.filters import kept_weight, penalise
from twinkle_jax.sampler.drawing.sampling import traced_sampling

LOGITS = np.random.default_rng(0).normal(size=(20, 67)).astype(np.float32) * 3
CASES = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 66},
    {"top_k": 100},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 10, "top_p": 0.8},
    {"top_k": 7, "top_p": 0.95, "min_p": 0.1},
    {"top_k": 7, "top_p": 0.95, "min_p": 0.02},
    {"top_k": -1, "top_p": 1.0, "min_p": 0.0},
]


@jax.jit
def kept(logits, sampling):
    maximum = jnp.max(logits, axis=1)
    least = kept_weight(logits, maximum, sampling)
    return jnp.exp(logits - maximum[:, None]) >= least[:, None]


def by_sorting(logits, top_k=0, top_p=1.0, min_p=0.0):
    keep = np.zeros(logits.shape, bool)
    for row, out in zip(logits.astype(np.float64), keep, strict=True):
        order = np.argsort(-row)
        order = order[:top_k] if top_k > 0 else order
        p = np.exp(row[order] - row[order[0]])
        p /= p.sum()
        order = order[np.concatenate([[0], np.cumsum(p)[:-1]]) < top_p]
        order = order[np.exp(row[order] - row[order[0]]) >= min_p]
        out[order] = True
    return keep


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_threshold_keeps_what_sorting_keeps(case):
    actual = kept(jnp.asarray(LOGITS), traced_sampling(Sampling(**case)))
    np.testing.assert_array_equal(actual, by_sorting(LOGITS, **case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_filters_equal_those_of_transformers(case):
    torch = pytest.importorskip("torch", reason="pip install 'twinkle-jax[test,oracle]'")
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    seen = np.random.default_rng(1).integers(0, 67, (20, 9))
    steps = [RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.7)]
    if case.get("top_k", 0) > 0:
        steps.append(TopKLogitsWarper(case["top_k"]))
    steps += [TopPLogitsWarper(case.get("top_p", 1.0)), MinPLogitsWarper(case.get("min_p", 0.0))]
    expected = LogitsProcessorList(steps)(torch.tensor(seen), torch.tensor(LOGITS)).numpy()
    padded = np.concatenate([np.full((20, 2), 67), seen], axis=1)
    logits = penalise(jnp.asarray(LOGITS / np.float32(0.7)), jnp.asarray(padded), jnp.float32(1.3))
    keep = np.asarray(kept(logits, traced_sampling(Sampling(**case))))
    np.testing.assert_array_equal(keep, np.isfinite(expected))
    np.testing.assert_allclose(np.asarray(logits)[keep], expected[keep], rtol=1e-6)


def test_ties_at_the_threshold_are_all_kept():
    logits = jnp.array([[3.0, 1.0, 1.0, 1.0, 0.0]])
    actual = kept(logits, traced_sampling(Sampling(top_k=2)))
    np.testing.assert_array_equal(actual, [[True, True, True, True, False]])


def test_rows_are_filtered_by_themselves():
    together = kept(jnp.asarray(LOGITS), traced_sampling(Sampling(top_p=0.7, top_k=9)))
    alone = kept(jnp.asarray(LOGITS[4:5]), traced_sampling(Sampling(top_p=0.7, top_k=9)))
    np.testing.assert_array_equal(together[4], alone[0])


def test_a_penalty_takes_from_both_signs_and_leaves_the_rest():
    logits = jnp.array([[2.0, -2.0, 0.5, 4.0]])
    actual = penalise(logits, jnp.array([[0, 1, 0, 4, 9]]), jnp.float32(2))
    np.testing.assert_array_equal(actual, [[1.0, -4.0, 0.5, 4.0]])
