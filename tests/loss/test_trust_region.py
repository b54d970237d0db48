"""Masks that leave out what has moved too far: DPPO's, and that of DeepSeek-V3.2."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.loss.cases import FUNCTIONS, random_batch
from twinkle_jax.loss import (
    binary_kl_mask,
    clipped_surrogate,
    off_policy_sequence_mask,
    token_log_ratio,
    total_variation_mask,
)


def test_total_variation_worked_by_hand():
    # Probabilities move by +1/4, +1/16, -1/4 and -1/16. Only what follows the advantage is dropped.
    new, old = jnp.array([0.75, 0.5625, 0.25, 0.4375]), jnp.full(4, 0.5)
    arguments, mask = (jnp.log(new), jnp.log(old)), jnp.ones(4, bool)
    kept = total_variation_mask(*arguments, jnp.array(1.0), mask)
    np.testing.assert_array_equal(kept, [False, True, True, True])
    for advantage in (-1.0, 0.0):
        kept = total_variation_mask(*arguments, jnp.array(advantage), mask)
        np.testing.assert_array_equal(kept, [True, True, False, True])
    wide = {"delta": 0.05, "delta_high": 0.3}
    kept = total_variation_mask(*arguments, jnp.array([1.0, 1.0, -1.0, -1.0]), mask, **wide)
    np.testing.assert_array_equal(kept, [True, True, False, False])


def test_binary_kl_worked_by_hand():
    # From 1/2 to 3/4: 1/2 log(2/3) + 1/2 log 2 = 0.1438; from 1/2 to 1/4 the same.
    new, old = jnp.log(jnp.array([0.75, 0.25])), jnp.log(jnp.full(2, 0.5))
    advantages, mask = jnp.array([1.0, -1.0]), jnp.ones(2, bool)
    for delta, kept in [(0.143, [False, False]), (0.145, [True, True])]:
        np.testing.assert_array_equal(binary_kl_mask(new, old, advantages, mask, delta=delta), kept)
    kept = binary_kl_mask(new, old, advantages, mask, delta=0.1, delta_high=0.2)
    np.testing.assert_array_equal(kept, [True, False])
    assert binary_kl_mask(new, old, -advantages, mask).all()  # back where it should go


def test_rare_tokens_may_move_and_certain_ones_are_finite():
    # A ratio of 100 from 1e-5 moves no mass; from 1 to 1/2 the others had no probability at all.
    new, old = jnp.log(jnp.array([1e-3, 0.5, 1.0])), jnp.log(jnp.array([1e-5, 1.0, 1.0]))
    mask, advantages = jnp.ones(3, bool), jnp.array([1.0, -1.0, 1.0])
    for function in (total_variation_mask, binary_kl_mask):
        kept = function(new, old, advantages, mask)
        np.testing.assert_array_equal(kept, [True, False, True])


def test_off_policy_worked_by_hand():
    # log mu - log pi is 1 and 0 in both rows: 1/2 a token. The third row has one token of 1.
    new = jnp.array([[-2.0, -1.0], [-2.0, -1.0], [-2.0, -99.0]])
    sampler, mask = jnp.full((3, 2), -1.0), jnp.array([[True, True], [True, True], [True, False]])
    advantages = jnp.array([1.0, -1.0, -1.0])
    for delta, kept in [(0.4, [1, 0, 0]), (0.5, [1, 1, 0]), (1.0, [1, 1, 1])]:
        actual = off_policy_sequence_mask(new, sampler, advantages, mask, delta=delta)
        np.testing.assert_array_equal(actual, mask & (np.array(kept) > 0)[:, None])
    # More likely than it was is not off policy, and no advantage costs nothing.
    assert off_policy_sequence_mask(-new, -sampler, -advantages, mask, delta=0.4)[0].all()
    assert (off_policy_sequence_mask(new, sampler, 0 * advantages, mask, delta=0.4) == mask).all()


def test_gradient_of_a_masked_loss():
    batch = random_batch(10)

    def losses(new, mask_of):
        keep = mask_of(new)
        ratio = token_log_ratio(new, batch.old, batch.mask)
        unclipped = {"epsilon": 1.0, "epsilon_high": float("inf")}
        per_token = clipped_surrogate(ratio, batch.advantages, batch.mask, **unclipped)
        return jnp.sum(jnp.where(keep, per_token, 0))

    def dppo(new):
        return total_variation_mask(new, batch.old, batch.advantages, batch.mask, delta=0.02)

    gradient = jax.jit(jax.grad(lambda x: losses(x, dppo)))(batch.logprobs)
    ratio = np.exp(batch.logprobs - batch.old)
    desired = np.where(dppo(batch.logprobs), -ratio * batch.advantages[:, None], 0)
    np.testing.assert_allclose(gradient, desired, rtol=1e-5)
    assert (np.asarray(dppo(batch.logprobs)) != batch.mask).any()


@pytest.mark.parametrize("name", ["total_variation", "binary_kl", "off_policy"])
def test_on_policy_keeps_everything(name):
    batch = random_batch(9)
    kept = FUNCTIONS[name](batch.logprobs, batch.logprobs, batch.advantages, batch.mask)
    np.testing.assert_array_equal(kept, batch.mask)
