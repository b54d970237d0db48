"""Masks that leave tokens out of a loss: DPPO's, DeepSeek-V3.2's, the tokens of high entropy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.loss import reference
from tests.loss.cases import GARBAGE, random_batch
from twinkle_jax.loss import (
    binary_kl_mask,
    clipped_surrogate,
    off_policy_sequence_mask,
    token_log_ratio,
    top_entropy_mask,
    total_variation_mask,
)

POLICY_MASKS = {
    "total_variation": (total_variation_mask, reference.total_variation_mask, {}),
    "asymmetric": (
        total_variation_mask,
        reference.total_variation_mask,
        {"delta": 0.02, "delta_high": 0.1},
    ),
    "binary_kl": (binary_kl_mask, reference.binary_kl_mask, {}),
    "asymmetric_kl": (
        binary_kl_mask,
        reference.binary_kl_mask,
        {"delta": 0.001, "delta_high": 0.02},
    ),
    "off_policy": (
        off_policy_sequence_mask,
        reference.off_policy_sequence_mask,
        {"delta": 0.05},
    ),
}
every_mask = pytest.mark.parametrize("name", POLICY_MASKS)


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


def test_top_entropy_worked_by_hand():
    # The two highest of ten, as TRL has it at quantile 0.8; ties come along.
    entropies = jnp.array([[0.1, 0.2, 0.3, 1.4, 0.5, 0.14], [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]])
    mask = jnp.array([[True] * 6, [True] * 4 + [False] * 2])
    kept = top_entropy_mask(entropies, mask)
    np.testing.assert_array_equal(np.argwhere(kept), [[0, 3], [1, 3]])
    assert (top_entropy_mask(entropies, mask, fraction=1.0) == mask).all()
    np.testing.assert_array_equal(
        np.argwhere(top_entropy_mask(entropies, mask, fraction=0.0)), [[0, 3]]
    )
    assert (top_entropy_mask(jnp.ones((2, 6)), mask) == mask).all()
    assert not top_entropy_mask(entropies, jnp.zeros((2, 6), bool)).any()
    assert top_entropy_mask(jnp.zeros((0, 3)), jnp.zeros((0, 3), bool)).shape == (0, 3)


@every_mask
@given(seed=st.integers(0, 10**6), per_token=st.booleans())
def test_matches_reference(name, seed, per_token):
    _, oracle, settings = POLICY_MASKS[name]
    batch = random_batch(seed, per_token=per_token)
    arguments = batch.logprobs, batch.old, batch.advantages, batch.mask
    actual = compiled(name)(*arguments)
    assert actual.dtype == bool
    np.testing.assert_array_equal(actual, np.array(oracle(*arguments, **settings), bool))


def compiled(name):
    return COMPILED[name]


COMPILED = {
    name: jax.jit(lambda *a, f=function, s=settings: f(*a, **s))
    for name, (function, _, settings) in POLICY_MASKS.items()
}
entropy_mask = jax.jit(top_entropy_mask)


@given(seed=st.integers(0, 10**6), fraction=st.sampled_from([0.1, 0.2, 0.3, 0.5, 0.7, 0.9]))
def test_top_entropy_matches_reference(seed, fraction):
    batch = random_batch(seed, 5, 7)
    actual = entropy_mask(batch.entropies, batch.mask, fraction=fraction)
    desired = reference.top_entropy_mask(batch.entropies, batch.mask, fraction)
    np.testing.assert_array_equal(actual, np.array(desired, bool))
    assert int(actual.sum()) == 1 + np.floor(fraction * (batch.mask.sum() - 1) + 1e-6)


@every_mask
def test_garbage_vmap_and_padding(name):
    batch = random_batch(7, per_token=True)
    arguments = batch.logprobs, batch.old, batch.advantages
    kept = compiled(name)(*arguments, batch.mask)
    for garbage in GARBAGE:
        dirty = [np.where(batch.mask, x, garbage) for x in arguments]
        np.testing.assert_array_equal(compiled(name)(*dirty, batch.mask), kept)
    function, _, settings = POLICY_MASKS[name]
    rows = jax.vmap(lambda *a: function(*a, **settings))(*arguments, batch.mask)
    np.testing.assert_array_equal(rows, kept)
    padded = [np.pad(x, ((0, 2), (0, 3))) for x in (*arguments, batch.mask)]
    longer = compiled(name)(*padded)
    np.testing.assert_array_equal(longer[:4, :6], kept)
    assert not longer[4:].any()
    assert not longer[:, 6:].any()


@pytest.mark.parametrize("garbage", GARBAGE)
def test_top_entropy_ignores_what_is_masked(garbage):
    batch = random_batch(8)
    dirty = np.where(batch.mask, batch.entropies, garbage)
    np.testing.assert_array_equal(
        entropy_mask(dirty, batch.mask), entropy_mask(batch.entropies, batch.mask)
    )


@every_mask
def test_on_policy_keeps_everything_and_broken_tokens_are_not_hidden(name):
    function, _, settings = POLICY_MASKS[name]
    batch = random_batch(9)
    kept = function(batch.logprobs, batch.logprobs, batch.advantages, batch.mask, **settings)
    np.testing.assert_array_equal(kept, batch.mask)
    broken = jnp.array([[jnp.nan]])
    assert function(broken, jnp.zeros((1, 1)), jnp.array([-1.0]), jnp.array([[True]]), **settings)


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


@every_mask
def test_errors(name):
    function, _, settings = POLICY_MASKS[name]
    second = "sampler_logprobs" if function is off_policy_sequence_mask else "behaviour_logprobs"
    x, a, mask = jnp.zeros((2, 3)), jnp.zeros(2), jnp.ones((2, 3), bool)
    with pytest.raises(ValueError, match=rf"{second} must .* mask, \(2, 3\), got \(2,\)"):
        jax.eval_shape(lambda *args: function(*args, **settings), x, a, a, mask)
    with pytest.raises(ValueError, match=r"advantages must have shape \(2,\)"):
        jax.eval_shape(lambda *args: function(*args, **settings), x, x, a[:1], mask)
    with pytest.raises(TypeError, match="logprobs must be floating point, got bool"):
        jax.eval_shape(lambda *args: function(*args, **settings), mask, x, a, mask)
    with pytest.raises(TypeError, match="mask must be boolean"):
        jax.eval_shape(lambda *args: function(*args, **settings), x, x, a, x)
