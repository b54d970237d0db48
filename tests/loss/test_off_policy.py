"""Importance weights and trust-region masks, and losses that take them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.loss import cases as reference
from tests.loss.cases import FUNCTIONS, POLICY_LOSSES, call, random_batch
from twinkle_jax.loss import (
    GRPOLoss,
    ImportanceCorrection,
    PPOLoss,
    binary_kl_mask,
    clipped_surrogate,
    get_loss,
    kl_k3,
    masked_importance_weights,
    masked_sequence_importance_weights,
    off_policy_sequence_mask,
    sequence_mean,
    token_log_ratio,
    total_variation_mask,
    truncated_importance_weights,
    truncated_sequence_importance_weights,
)

MODES = {
    "token_truncate": reference.importance_weights,
    "token_mask": lambda *a: reference.masked_weights(*a[:3], 0.0, a[3]),
    "sequence_truncate": reference.sequence_weights,
    "sequence_mask": lambda *a: reference.masked_sequence_weights(*a[:3], 0.0, a[3]),
}


def test_truncated_worked_by_hand():
    # Ratios 1/2, 1, 2 and 4 with a cap of 2; the last token is masked.
    ratios = jnp.array([0.5, 1.0, 2.0, 4.0, 1.0])
    mask = jnp.array([True, True, True, True, False])
    weights = truncated_importance_weights(jnp.log(ratios), jnp.zeros(5), mask)
    np.testing.assert_allclose(weights, [0.5, 1, 2, 2, 0], rtol=1e-6)
    weights = truncated_importance_weights(jnp.log(ratios), jnp.zeros(5), mask, maximum=0.75)
    np.testing.assert_allclose(weights, [0.5, 0.75, 0.75, 0.75, 0], rtol=1e-6)
    # The product of 2, 1/2, 1 and 4 is 4.
    weights = truncated_sequence_importance_weights(
        jnp.log(jnp.array([[2.0, 0.5, 1.0, 4.0, 9.0]])), jnp.zeros((1, 5)), mask[None], maximum=5.0
    )
    np.testing.assert_allclose(weights, [[4, 4, 4, 4, 0]], rtol=1e-6)
    weights = truncated_sequence_importance_weights(
        jnp.log(ratios[:4]), jnp.zeros(4), mask[:4], maximum=3.0
    )
    np.testing.assert_allclose(weights, [3, 3, 3, 3], rtol=1e-6)


def test_masked_worked_by_hand():
    # Ratios 1/4, 1/2, 2 and 8: those outside [1/2, 5] are dropped.
    ratios, mask = jnp.array([0.25, 0.5, 2.0, 8.0, 1.0]), jnp.array([True] * 4 + [False])
    weights = masked_importance_weights(jnp.log(ratios), jnp.zeros(5), mask, minimum=0.49)
    np.testing.assert_allclose(weights, [0, 0.5, 2, 0, 0], rtol=1e-6)
    weights = masked_importance_weights(
        jnp.log(ratios), jnp.zeros(5), mask, minimum=0.0, maximum=3.0
    )
    np.testing.assert_allclose(weights, [0.25, 0.5, 2, 0, 0], rtol=1e-6)
    # Products of sequences: 1/2 * 4 = 2 is kept, 2 * 2 = 4 and one token of 4 are not.
    new = jnp.log(jnp.array([[0.5, 4.0], [2.0, 2.0], [4.0, 9.0], [9.0, 9.0]]))
    mask = jnp.array([[True, True], [True, True], [True, False], [False, False]])
    weights = masked_sequence_importance_weights(new, jnp.zeros((4, 2)), mask)
    np.testing.assert_allclose(weights, [[2, 2], [0, 0], [0, 0], [0, 0]], rtol=1e-6)
    weights = masked_sequence_importance_weights(
        new, jnp.zeros((4, 2)), mask, minimum=3.0, maximum=5.0
    )
    np.testing.assert_allclose(weights, [[0, 0], [4, 4], [4, 0], [0, 0]], rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_modes_match_reference(mode):
    batch = random_batch(25, 5, 4, spread=1.0)
    arguments = batch.logprobs, batch.old, batch.mask
    for cap in (1.5, 3.0):
        actual = ImportanceCorrection(mode, cap)(*arguments)
        np.testing.assert_allclose(actual, MODES[mode](*arguments, cap), rtol=1e-5)
    if mode.endswith("mask"):
        with_floor = ImportanceCorrection(mode, 3.0, floor=0.5)(*arguments)
        unfloored = ImportanceCorrection(mode, 3.0)(*arguments)
        np.testing.assert_array_equal(with_floor, np.where(unfloored < 0.5, 0, unfloored))
        assert (with_floor != unfloored).any()


@pytest.mark.parametrize("mode", MODES)
def test_far_apart_is_clamped(mode):
    weights = ImportanceCorrection(mode, cap=1e30)(
        jnp.zeros(9), jnp.full(9, -99.0), jnp.ones(9, bool)
    )
    np.testing.assert_allclose(weights, np.exp(20) * np.ones(9), rtol=1e-6)


def test_errors_of_modes():
    with pytest.raises(ValueError, match="mode"):
        ImportanceCorrection("none")
    with pytest.raises(ValueError, match="floor"):
        ImportanceCorrection("token_truncate", floor=0.5)
    assert hash(ImportanceCorrection()) == hash(ImportanceCorrection("token_truncate", 2.0, 0.0))


SAMPLER = random_batch(0).logprobs + np.float32(0.5) * random_batch(1).logprobs


@pytest.mark.parametrize("on_policy", [False, True])
def test_a_corrected_loss_worked_by_its_parts(on_policy):
    batch = random_batch(0)
    correction = ImportanceCorrection("token_truncate", 1.25)
    loss_fn = GRPOLoss(beta=0.5, correction=correction)
    labels = jnp.where(batch.mask, 7, -100)

    def actual(logprobs, old, sampler):
        return loss_fn(
            {"labels": labels},
            {"logps": logprobs},
            old_logps=None if on_policy else old,
            ref_logps=batch.ref,
            sampler_logps=sampler,
            advantages=batch.advantages,
        ).loss

    def desired(logprobs, old, sampler):
        trainer = jax.lax.stop_gradient(logprobs) if on_policy else old
        ratio = token_log_ratio(logprobs, trainer, batch.mask)
        losses = clipped_surrogate(ratio, batch.advantages, batch.mask)
        weights = jnp.minimum(jnp.exp(trainer - sampler), np.float32(1.25))
        losses = losses * weights + 0.5 * kl_k3(logprobs, batch.ref, batch.mask)
        return sequence_mean(losses, batch.mask)

    arguments = batch.logprobs, batch.old, SAMPLER
    value, gradients = jax.jit(jax.value_and_grad(actual, argnums=(0, 1, 2)))(*arguments)
    expected, gradient = jax.jit(jax.value_and_grad(desired))(*arguments)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradients[0], gradient, rtol=1e-5, atol=1e-8)
    assert not gradients[1].any() and not gradients[2].any()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_policy_loss_takes_a_correction(name):
    batch = random_batch(2, spread=0.1)
    fields = vars(POLICY_LOSSES[name]) | {"beta": 0.0, "entropy_coef": 0.0}
    kind = type(POLICY_LOSSES[name])

    def run(correction, sampler, advantages):
        return call(
            kind(**fields | {"correction": correction}),
            *(batch.logprobs, batch.old, batch.ref, batch.entropies, advantages, batch.mask),
            sampler_logps=sampler,
        ).loss

    # A sampler that doubles every probability halves the weights: as if advantages were halved.
    sampler = batch.old + np.float32(np.log(2))
    halved = run(ImportanceCorrection("token_truncate"), sampler, batch.advantages)
    np.testing.assert_allclose(halved, run(None, sampler, batch.advantages / 2), rtol=1e-5)
    agreed = run(ImportanceCorrection("sequence_mask"), batch.old, batch.advantages)
    np.testing.assert_array_equal(agreed, run(None, None, batch.advantages))


def test_user_corrections_and_missing_log_probabilities():
    batch = random_batch(3)

    def custom(behaviour_logprobs, sampler_logprobs, mask):
        return jnp.exp(behaviour_logprobs)  # its gradient is stopped by the loss

    loss_fn = get_loss("ppo", correction=custom)
    assert loss_fn == PPOLoss(correction=custom)
    labels = jnp.where(batch.mask, 7, -100)

    def loss(logprobs):
        output = loss_fn(
            {"labels": labels},
            {"logps": logprobs},
            sampler_logps=SAMPLER,
            advantages=batch.advantages,
        )
        return output.loss

    desired = -np.exp(batch.logprobs) * batch.advantages[:, None] * batch.mask / batch.mask.sum()
    np.testing.assert_allclose(jax.grad(loss)(batch.logprobs), desired, rtol=1e-5)
    with pytest.raises(TypeError, match="sampler_logps"):
        call(loss_fn, *batch)
    assert loss_fn({"labels": labels}, {"logps": batch.logprobs}).loss == 0  # nothing to weigh


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
