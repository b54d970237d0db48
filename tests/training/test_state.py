"""The update by hand: one division, one clip, one guard."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.model.training import SGD
from twinkle_jax.training import (
    apply_gradients,
    begin_training,
    clip_gradients,
    train_state,
    zero_gradients,
)


def state_of(gradient, denominator, optimizer=SGD, dtype="float32"):
    return filled(train_state({"w": jnp.ones(2, dtype)}, optimizer), gradient, denominator)


def filled(state, gradient, denominator=1, tokens=1):
    return state._replace(
        gradient_sum={"w": jnp.array(gradient, jnp.float32)},
        denominator=jnp.float32(denominator),
        tokens=jnp.float32(tokens),
    )


def same(a, b):
    """Everything but the gradients, bit by bit."""
    for x, y in zip(jax.tree.leaves(a[:3]), jax.tree.leaves(b[:3]), strict=True):
        np.testing.assert_array_equal(x, y)


def kept(state):
    """A copy that outlives donation."""
    return jax.tree.map(np.array, state)


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
    before = kept(first)
    state = filled(first, [bad, 1])
    if clip:
        state, _ = clip_gradients(state, 1.0)
    state, info = apply_gradients(state, optimizer, learning_rate=0.25, max_grad_norm=1.0)
    assert not info.applied and state.step == 1 and state.denominator == 0
    same(state, before)
    assert not np.asarray(state.gradient_sum["w"]).any()


@pytest.mark.parametrize("rate", [np.nan, np.inf, -np.inf])
def test_learning_rates_that_are_not_finite_are_skipped(rate):
    optimizer = optax.adamw(1.0)
    state = filled(train_state({"w": jnp.ones(2)}, optimizer), [1, 1])
    before = kept(state)
    state, info = apply_gradients(state, optimizer, learning_rate=rate)
    assert not info.applied and info.gradient_norm > 1
    same(state, before)


def test_updates_that_are_not_finite_are_skipped():
    """The gradient is finite here; what the optimizer makes of it, or the sum, is not."""
    broken = optax.stateless(lambda updates, params: jax.tree.map(lambda g: g / 0.0, updates))
    cases = [(broken, 1.0, "float32"), (SGD, 1e38, "float32"), (SGD, 1e38, "bfloat16")]
    cases.append((SGD, 4.25e37, "bfloat16"))  # 3.4e38 is finite in float32, but not there
    for optimizer, rate, dtype in cases:
        state = state_of([6, 8], 1, optimizer, dtype)
        before = kept(state)
        state, info = apply_gradients(state, optimizer, learning_rate=rate)
        assert not info.applied
        same(state, before)


def test_without_gradients_nothing_decays():
    optimizer = optax.adamw(1.0, weight_decay=0.5)
    state, info = apply_gradients(state_of([0, 0], 0, optimizer), optimizer)
    np.testing.assert_array_equal(state.params["w"], [1, 1])
    assert not info.applied
    # Sequences were counted, but none of them has a label.
    state = filled(train_state({"w": jnp.ones(2)}, optimizer), [0, 0], 4, tokens=0)
    before = kept(state)
    state, info = apply_gradients(state, optimizer)
    assert not info.applied
    same(state, before)
    state, info = apply_gradients(state_of([0, 0], 1, optimizer), optimizer, learning_rate=0.5)
    np.testing.assert_array_equal(state.params["w"], [0.75, 0.75])
    assert info.applied and state.tokens == 0


def test_what_a_checkpoint_sets_stays_as_it_is():
    """Neither weight decay nor an update without a gradient changes it; the rest decays."""
    for optimizer in (
        optax.adamw(1.0, weight_decay=0.5),
        optax.chain(optax.add_decayed_weights(0.5), optax.sgd(1.0)),
    ):
        layer = {"layer_scalar": jnp.full((2, 1), 0.5), "w": jnp.ones((2, 3))}
        names = ("e_score_correction_bias", "bias")
        layer["gate"] = {name: jnp.full((2, 4), 0.5) for name in names}
        state = train_state({"layers": {"0": layer}}, optimizer)
        state = state._replace(denominator=jnp.float32(1), tokens=jnp.int32(3))
        state, info = apply_gradients(state, optimizer, learning_rate=0.5)
        layer = state.params["layers"]["0"]
        np.testing.assert_array_equal(layer["layer_scalar"], 0.5)
        np.testing.assert_array_equal(layer["gate"]["e_score_correction_bias"], 0.5)
        assert (layer["gate"]["bias"] != 0.5).all()
        assert info.applied and (layer["w"] != 1).all()


def test_an_update_that_is_not_wanted_is_skipped():
    optimizer = optax.adam(1.0)
    state, _ = apply_gradients(state_of([1, 2], 1, optimizer), optimizer)
    before = kept(state)
    state, info = apply_gradients(filled(state, [3, 4]), optimizer, when=jnp.array(False))
    same(state, before)
    assert (info.gradient_norm, info.applied) == (5, False)
    assert not state.gradient_sum["w"].any() and state.denominator == 0
    state, info = apply_gradients(filled(state, [3, 4]), optimizer, when=jnp.array(True))
    assert info.applied and state.step == 2


@pytest.mark.parametrize("limit", [-1, 0, -0.5, np.nan, np.float32(-1), -np.inf])
def test_limits_that_are_not_above_zero(limit):
    """-1 would climb, and 0 keep nothing of the gradients."""
    with pytest.raises(ValueError, match="max_grad_norm"):
        apply_gradients(state_of([6, 8], 2), SGD, max_grad_norm=limit)
    with pytest.raises(ValueError, match="max_grad_norm"):
        clip_gradients(state_of([6, 8], 2), limit)
    # On a device it is not looked at, and the update is skipped.
    on_device = jnp.float32(limit)
    state, info = apply_gradients(state_of([6, 8], 2), SGD, max_grad_norm=on_device)
    assert not info.applied and state.params["w"].tolist() == [1, 1]
    state, _ = clip_gradients(state_of([6, 8], 2), on_device)
    assert not apply_gradients(state, SGD)[1].applied


def test_limits_that_are_no_numbers():
    for limit in (True, "1"):
        with pytest.raises(TypeError, match="max_grad_norm"):
            apply_gradients(state_of([6, 8], 2), SGD, max_grad_norm=limit)


def test_rates_that_are_no_numbers():
    for rate in (True, "1e-3", None, optax.constant_schedule(1e-3)):
        with pytest.raises(TypeError, match="learning_rate"):
            apply_gradients(state_of([6, 8], 2), SGD, learning_rate=rate)
    for name in ("learning_rate", "max_grad_norm"):  # two would be one for each entry of w
        with pytest.raises(ValueError, match=f"{name} must be one number"):
            apply_gradients(state_of([6, 8], 2), SGD, **{name: jnp.ones(2)})


@pytest.mark.parametrize("name", ["prodigy", "cocob"])
def test_optimizers_whose_state_begins_with_the_parameters(name):
    """Their state is donated with the parameters, and an array cannot be donated twice."""
    optimizer = getattr(optax.contrib, name)()
    for begin in (train_state, lambda *args: begin_training(*args, None)):
        state = filled(begin({"w": jnp.ones(2)}, optimizer), [1, -1])
        state, info = apply_gradients(state, optimizer)
        assert info.applied and not np.array_equal(state.params["w"], [1, 1])


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
    from twinkle_jax.training.state import _apply

    apply_gradients(state_of([6, 8], 2), SGD, learning_rate=0.5)
    count = _apply._cache_size()
    for rate in (1, 0.25, np.float32(0.125)):
        apply_gradients(state_of([1, 2], 3), SGD, learning_rate=rate, max_grad_norm=rate)
    assert _apply._cache_size() == count


def test_a_state_without_optimizer():
    with pytest.raises(ValueError, match="state"):
        apply_gradients(state_of([1, 1], 1, None), SGD)


def test_an_optimizer_that_does_not_fit():
    adam = optax.adam(1.0)
    for made, used in ((SGD, adam), (adam, SGD), (adam, optax.adam(1.0, mu_dtype="bfloat16"))):
        state = state_of([1, 1], 1, made)
        with pytest.raises(ValueError, match="optimizer"):
            apply_gradients(state, used)
        assert not state.params["w"].is_deleted()
    with pytest.raises(TypeError, match="optimizer"):
        train_state({"w": jnp.ones(2)}, "adam")
    with pytest.raises(TypeError, match="gradient_transformation"):
        train_state({"w": jnp.ones(2)}, optax.MultiSteps(adam, 2))
