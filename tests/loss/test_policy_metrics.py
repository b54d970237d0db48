"""What a policy step reports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.loss.cases import GARBAGE, random_batch, same_bits
from twinkle_jax.loss import PolicyMetrics, policy_metrics


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


def test_nothing_kept():
    x = jnp.full((2, 3), jnp.nan)
    metrics = policy_metrics(x, jnp.zeros(2), jnp.zeros((2, 3), bool), entropies=x)
    np.testing.assert_array_equal(metrics, [0, 0, 0, 0, 1, 1])
    nothing = jnp.zeros((0, 3))
    empty = policy_metrics(nothing, jnp.zeros(0), nothing > 0)
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
    whole = policy_metrics(ratio, batch.advantages, batch.mask, entropies=batch.entropies)
    parts = [
        policy_metrics(
            ratio[rows],
            batch.advantages[rows],
            batch.mask[rows],
            entropies=batch.entropies[rows],
            denominator=batch.mask.sum(),
        )
        for rows in (slice(0, 1), slice(1, 4))
    ]
    np.testing.assert_allclose(np.sum([p[:4] for p in parts], axis=0), whole[:4], rtol=1e-6)


def test_errors():
    x, mask = jnp.zeros((2, 3)), jnp.ones((2, 3), bool)
    with pytest.raises(ValueError, match=r"log_ratio must .* mask, \(2, 3\), got \(3, 2\)"):
        jax.eval_shape(policy_metrics, x.T, jnp.zeros(2), mask)
    with pytest.raises(ValueError, match=r"entropies must .* mask, \(2, 3\), got \(3,\)"):
        jax.eval_shape(lambda e: policy_metrics(x, None, mask, entropies=e), x[0])
    with pytest.raises(ValueError, match=r"advantages must have shape \(2,\)"):
        jax.eval_shape(policy_metrics, x, jnp.zeros(3), mask)
