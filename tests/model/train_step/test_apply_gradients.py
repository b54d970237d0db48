"""The update by hand: one division, one clip, one guard."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.model.training import SGD
from twinkle_jax.model import apply_gradients, clip_gradients, train_state, zero_gradients


def state_of(gradient, denominator, optimizer=SGD, dtype="float32"):
    state = train_state({"w": jnp.ones(2, dtype)}, optimizer)
    return state._replace(
        gradient_sum={"w": jnp.array(gradient, jnp.float32)}, denominator=jnp.float32(denominator)
    )


def test_divided_clipped_and_scaled():
    # (6, 8) over 2 is (3, 4), of norm 5; clipped to 2.5 it is (1.5, 2); times 0.5 it is (0.75, 1).
    state, info = apply_gradients(state_of([6, 8], 2), SGD, learning_rate=0.5, max_grad_norm=2.5)
    np.testing.assert_array_equal(state.params["w"], [0.25, 0.0])
    assert (info.gradient_norm, info.applied, state.step) == (5, True, 1)
    assert not state.gradient_sum["w"].any() and state.denominator == 0
    state, _ = apply_gradients(state_of([6, 8], 2), SGD, max_grad_norm=5)
    np.testing.assert_array_equal(state.params["w"], [-2, -3])
    state, _ = apply_gradients(state_of([6, 8], 2), SGD)
    np.testing.assert_array_equal(state.params["w"], [-2, -3])


def test_clipped_first_and_applied_later():
    state, norm = clip_gradients(state_of([6, 8], 2), 2.5)
    assert norm == 5
    state, info = apply_gradients(state, SGD, learning_rate=0.5)
    np.testing.assert_array_equal(state.params["w"], [0.25, 0.0])
    assert info.gradient_norm == 2.5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("clip", [False, True])
def test_what_is_not_finite_is_skipped(bad, clip):
    """1e30 is finite, but its square, and so the norm, is not."""
    optimizer = optax.adam(1.0)
    first, _ = apply_gradients(state_of([1, 1], 1, optimizer), optimizer, learning_rate=0.25)
    before = [np.asarray(first.params["w"]), np.asarray(first.optimizer_state[0].mu["w"])]
    state = first._replace(
        gradient_sum={"w": jnp.array([bad, 1], jnp.float32)}, denominator=jnp.float32(1)
    )
    if clip:
        state, _ = clip_gradients(state, 1.0)
    state, info = apply_gradients(state, optimizer, learning_rate=0.25, max_grad_norm=1.0)
    assert not info.applied and state.step == 1 and state.denominator == 0
    np.testing.assert_array_equal(state.params["w"], before[0])
    np.testing.assert_array_equal(state.optimizer_state[0].mu["w"], before[1])
    assert state.optimizer_state[0].count == 1
    assert not np.asarray(state.gradient_sum["w"]).any()


def test_without_gradients_nothing_decays():
    optimizer = optax.adamw(1.0, weight_decay=0.5)
    state, info = apply_gradients(state_of([0, 0], 0, optimizer), optimizer)
    np.testing.assert_array_equal(state.params["w"], [1, 1])
    assert not info.applied
    state, info = apply_gradients(state_of([0, 0], 1, optimizer), optimizer, learning_rate=0.5)
    np.testing.assert_array_equal(state.params["w"], [0.75, 0.75])
    assert info.applied


def test_bfloat16_parameters_have_a_float32_optimizer():
    optimizer = optax.adam(1.0)
    state = state_of([1, -1], 1, optimizer, dtype="bfloat16")
    state, _ = apply_gradients(state, optimizer, learning_rate=0.25)
    assert state.params["w"].dtype == jnp.bfloat16
    assert state.optimizer_state[0].mu["w"].dtype == jnp.float32
    np.testing.assert_array_equal(state.params["w"].astype("float32"), [0.75, 1.25])


def test_forgotten_gradients_and_donated_states():
    old = state_of([6, 8], 2)
    state = zero_gradients(old)
    assert old.gradient_sum["w"].is_deleted()
    assert not state.gradient_sum["w"].any() and state.denominator == 0
    applied, _ = apply_gradients(state, SGD)
    assert state.params["w"].is_deleted() and not applied.params["w"].is_deleted()


def test_rates_and_limits_are_traced():
    from twinkle_jax.model.train_step.apply_gradients import _apply

    apply_gradients(state_of([6, 8], 2), SGD, learning_rate=0.5)
    count = _apply._cache_size()
    for rate in (1, 0.25, np.float32(0.125)):
        apply_gradients(state_of([1, 2], 3), SGD, learning_rate=rate, max_grad_norm=rate)
    assert _apply._cache_size() == count


def test_a_state_without_optimizer():
    with pytest.raises(ValueError, match="expected a state with an optimizer"):
        apply_gradients(state_of([1, 1], 1, None), SGD)
