"""What a policy step reports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.loss.cases import GARBAGE, random_batch, same_bits
from twinkle_jax.loss import PolicyMetrics, policy_metrics, sampler_mismatch


def test_worked_by_hand():
    # Ratios 2, 2, 1/2, 1/2, 1 with advantages +, +, -, +, +: two rose too far and one fell too far.
    #   KL: mean of r - 1 - log r = (2 * (1 - log 2) + 2 * (log 2 - 1/2) + 0) / 5 = 1/5
    log_ratio = jnp.log(jnp.array([2.0, 2.0, 0.5, 0.5, 1.0, 8.0]))
    advantages = jnp.array([1.0, 1.0, -1.0, 1.0, 1.0, 1.0])
    entropies = jnp.array([1.0, 2.0, 3.0, 4.0, 5.0, 99.0])
    mask = jnp.array([True] * 5 + [False])
    metrics = policy_metrics(log_ratio, advantages, mask, entropies=entropies)
    assert isinstance(metrics, PolicyMetrics)
    np.testing.assert_allclose(metrics, [0.2, 0.4, 0.2, 3.0, 0.5, 2.0], rtol=1e-6)
    # Without advantages, clips are counted whatever their sign.
    either = policy_metrics(log_ratio, None, mask, epsilon=0.25, epsilon_high=1.5)
    np.testing.assert_allclose(either[:2], [0.4, 0.0])
    assert either.entropy is None


def test_extremes_are_those_of_the_tokens_kept():
    log_ratio, mask = jnp.log(jnp.array([2.0, 4.0, 1.0])), jnp.array([True, True, False])
    for sign in (1, -1):
        metrics = policy_metrics(sign * log_ratio, None, mask)
        extremes = [metrics.ratio_min, metrics.ratio_max]
        np.testing.assert_allclose(extremes, [2, 4] if sign > 0 else [0.25, 0.5], rtol=1e-6)


def test_far_apart_is_clamped():
    metrics = policy_metrics(jnp.array([200.0, -200.0]), jnp.array(1.0), jnp.ones(2, bool))
    np.testing.assert_allclose(metrics.ratio_max, np.exp(20), rtol=1e-6)
    np.testing.assert_allclose(metrics.ratio_min, np.exp(-20), rtol=1e-6)
    assert np.isfinite(metrics.approximate_kl)


def test_divergence_of_policies_that_hardly_differ():
    difference = np.random.default_rng(0).normal(0, 1e-5, 4096).astype(np.float32)
    exact = np.mean(np.expm1(difference.astype(np.float64)) - difference)
    mask, zeros = jnp.ones((1, 4096), bool), jnp.zeros((1, 4096))
    log_ratio = jnp.array(difference)[None]
    measured = (
        jax.jit(policy_metrics)(log_ratio, None, mask).approximate_kl,
        jax.jit(sampler_mismatch)(log_ratio, zeros, mask).metrics()["mismatch_kl"],
    )
    np.testing.assert_allclose(measured, exact, rtol=0.01)


def test_nothing_kept():
    x = jnp.full((2, 3), jnp.nan)
    measure = jax.jit(policy_metrics)
    metrics = measure(x, jnp.zeros(2), jnp.zeros((2, 3), bool), entropies=x)
    np.testing.assert_array_equal(metrics, [0, 0, 0, 0, 1, 1])
    nothing = jnp.zeros((0, 3))
    empty = measure(nothing, jnp.zeros(0), nothing > 0)
    assert empty.ratio_min == empty.ratio_max == 1


def test_garbage_and_gradients_that_must_not_flow():
    batch = random_batch(50, per_token=True)

    def loss(log_ratio, advantages, entropies):
        metrics = policy_metrics(log_ratio, advantages, batch.mask, entropies=entropies)
        return sum(metrics), metrics

    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
    arrays = batch.logprobs - batch.old, batch.advantages, batch.entropies
    gradients, clean = run(*arrays)
    assert not any(gradient.any() for gradient in gradients)
    for garbage in GARBAGE:
        dirty = run(*(np.where(batch.mask, x, garbage) for x in arrays))[1]
        assert all(same_bits(a, b) for a, b in zip(clean, dirty, strict=True))


def test_micro_batches_add_up():
    batch = random_batch(51)
    ratio = batch.logprobs - batch.old
    measure = jax.jit(policy_metrics)
    full_batch = measure(ratio, batch.advantages, batch.mask, entropies=batch.entropies)
    parts = [
        measure(
            ratio[rows],
            batch.advantages[rows],
            batch.mask[rows],
            entropies=batch.entropies[rows],
            denominator=batch.mask.sum(),
        )
        for rows in (slice(0, 2), slice(2, 4))
    ]
    np.testing.assert_allclose(np.sum([p[:4] for p in parts], axis=0), full_batch[:4], rtol=1e-6)


def test_errors():
    x, mask = jnp.zeros((2, 3)), jnp.ones((2, 3), bool)
    with pytest.raises(ValueError, match="log_ratio"):
        jax.eval_shape(policy_metrics, x.T, jnp.zeros(2), mask)
    with pytest.raises(ValueError, match="entropies"):
        jax.eval_shape(lambda e: policy_metrics(x, None, mask, entropies=e), x[0])
    with pytest.raises(ValueError, match="advantages"):
        jax.eval_shape(policy_metrics, x, jnp.zeros(3), mask)


def test_mismatch_worked_by_hand():
    # Ratios 1, 2 and 1/4 in the first row, 1 in the second; the third has no token.
    #   mean |log r| = (log 2 + log 4) / 4; outside [0.9, 1.1]: 2 of 4
    #   KL: (2 - 1 - log 2 + 1/4 - 1 + log 4) / 4 = (1/4 + log 2) / 4
    #   tokens: (1 + 2 + 1/4 + 1)^2 / (4 (1 + 4 + 1/16 + 1)) = 18.0625 / 24.25
    #   sequences, of products 1/2 and 1: (1/2 + 1)^2 / (2 (1/4 + 1)) = 0.9
    trainer = jnp.log(jnp.array([[1.0, 2.0, 0.25], [1.0, 9.0, 9.0], [9.0, 9.0, 9.0]]))
    mask = jnp.array([[True, True, True], [True, False, False], [False] * 3])
    mismatch = sampler_mismatch(trainer, jnp.zeros((3, 3)), mask)
    assert (mismatch.tokens, mismatch.sequences) == (4, 2)
    expected = {
        "logp_diff/mean": 0.75 * np.log(2),
        "logp_diff/max": np.log(4),
        "ratio_outside": 0.5,
        "mismatch_kl": (0.25 + np.log(2)) / 4,
        "token_sample_size": 18.0625 / 24.25,
        "sequence_sample_size": 0.9,
    }
    metrics = mismatch.metrics()
    assert list(metrics) == list(expected)
    np.testing.assert_allclose([*metrics.values()], [*expected.values()], rtol=1e-6)


def test_the_band_of_a_mismatch():
    trainer, mask = jnp.log(jnp.array([0.5, 0.95, 1.05, 2.0])), jnp.ones(4, bool)
    for band, outside in [({}, 2), ({"minimum": 0.97}, 3), ({"minimum": 0.4, "maximum": 3.0}, 0)]:
        assert sampler_mismatch(trainer, jnp.zeros(4), mask, **band).outside == outside


@pytest.mark.parametrize("parts", [2, 4])
def test_mismatches_add_up(parts):
    batch = random_batch(52, rows=8)
    arrays = batch.logprobs, batch.old, batch.mask
    full_batch = jax.jit(sampler_mismatch)(*arrays).metrics()
    first, *others = (
        jax.jit(sampler_mismatch)(*part)
        for part in zip(*(np.split(x, parts) for x in arrays), strict=True)
    )
    added = jax.jit(lambda first, others: sum(others, first))(first, others).metrics()
    for name, value in full_batch.items():
        np.testing.assert_allclose(added[name], value, rtol=1e-5)


def test_mismatch_at_the_edges():
    compare = jax.jit(sampler_mismatch)
    nothing = compare(jnp.full((2, 3), jnp.nan), jnp.zeros((2, 3)), jnp.zeros((2, 3), bool))
    np.testing.assert_array_equal([*nothing.metrics().values()], [0, 0, 0, 0, 1, 1])
    far = compare(jnp.array([[0.0, 0.0]]), jnp.array([[-200.0, 0.0]]), jnp.ones((1, 2), bool))
    assert far.metrics()["logp_diff/max"] == 200
    assert all(np.isfinite(value) for value in far.metrics().values())
    broken = compare(jnp.array([jnp.nan, 0.0]), jnp.zeros(2), jnp.ones(2, bool))
    assert np.isnan(broken.metrics()["logp_diff/mean"])
    assert np.isnan((broken + far).metrics()["logp_diff/max"])


def test_mismatch_has_no_gradient_and_ignores_padding():
    batch = random_batch(53)

    def total(*arrays):
        mismatch = sampler_mismatch(*arrays, batch.mask)
        return sum(mismatch.metrics().values()), mismatch

    run = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))
    gradients, clean = run(batch.logprobs, batch.old)
    assert not any(gradient.any() for gradient in gradients)
    for garbage in GARBAGE:
        dirty = run(*(np.where(batch.mask, x, garbage) for x in (batch.logprobs, batch.old)))[1]
        assert all(map(same_bits, jax.tree.leaves(clean), jax.tree.leaves(dirty)))
    with pytest.raises(ValueError, match="sampler_logprobs"):
        sampler_mismatch(batch.logprobs, batch.old[0], batch.mask)
