"""What bad rewards, masks and weights get: an error that says what would be right."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax import GRPOAdvantage, grpo_advantage
from twinkle_jax.advantage import (
    group_statistics,
)

NAN, INF = float("nan"), float("inf")
SIX = jax.ShapeDtypeStruct((6,), jnp.float32)


def _raises(kind, *words):
    """Expect all words in the message, in this order."""
    return pytest.raises(kind, match="(?s)" + ".*".join(map(re.escape, words)))


# One function for all estimators, which read rewards alike: test_errors.py asks each of them.
ALL = [grpo_advantage, GRPOAdvantage(), group_statistics]


@pytest.mark.parametrize("function", ALL)
def test_no_rewards(function):
    for empty in ([], (), np.zeros(0), jnp.zeros(0), np.zeros((0, 3)), np.zeros((4, 0))):
        with _raises(ValueError, "rewards must hold at least one reward"):
            function(empty, 2)


@pytest.mark.parametrize("function", ALL)
def test_dimensions(function):
    call = functools.partial(function, num_generations=2)
    for shape in ((), (2, 2, 2), (1, 1, 1, 4)):
        with _raises(ValueError, "rewards must be [N], or [N, C]", f"got shape {shape}"):
            jax.eval_shape(call, jax.ShapeDtypeStruct(shape, jnp.float32))
    with _raises(ValueError, "rewards must be [N]", "()"):
        call(1.0)
    with _raises(ValueError, "rewards", "equal length", "[1, 2]"):
        call([[1.0, 2.0], [3.0]])
    with _raises(ValueError, "rewards", "equal length", "[0, 2]"):
        call([[1.0, 2.0], 3.0])


@pytest.mark.parametrize("function", ALL)
def test_types(function):
    call = functools.partial(function, num_generations=2)
    with _raises(TypeError, "rewards must be real", "complex64"):
        jax.eval_shape(call, jax.ShapeDtypeStruct((6,), jnp.complex64))
    for wrong in ([1j, 2.0], np.ones(2, complex)):
        with _raises(TypeError, "rewards must be real", "complex"):
            call(wrong)
    for wrong in (["1.0", "2.0"], [1.0, "2"], np.array(["a", "b"]), [object(), 1.0]):
        with _raises(TypeError, "rewards must hold numbers"):
            call(wrong)
    for wrong in ("12", b"12", None, {1: 2.0}, {1.0, 2.0}):
        with _raises(TypeError, "rewards must be an array or a list of numbers"):
            call(wrong)
    with _raises(TypeError, "rewards must hold numbers"):
        call(jax.random.key(0)[None])
    with _raises(TypeError, "rewards", "masked array", "where="):
        call(np.ma.array([1.0, 2.0], mask=[True, False]))
    with _raises(ValueError, "rewards must be within the range of float32"):
        call([10**400, 1])


@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_host_rewards_that_are_not_finite(function, bad):
    for rewards in ([0.0, 1.0, bad, 0.0], np.array([0.0, 1.0, bad, 0.0], np.float16)):
        with _raises(ValueError, "rewards must be finite", str(bad), "index 2", "where="):
            function(rewards, 2)
        with _raises(ValueError, "rewards must be finite", "index 2"):
            function(rewards, 2, where=jnp.asarray([False, True, True, True]))
        function(rewards, 2, where=[True, True, False, True])
    with _raises(ValueError, "rewards must be finite", "index (1, 0)"):
        function([[0.0, 1.0], [bad, 0.0]], 2)
    with _raises(ValueError, "rewards must be finite", "index (1, 0)"):
        function([[0.0, 1.0], [bad, 0.0]], 2, where=[[True, True], [True, False]])
    function([[0.0, 1.0], [bad, 0.0]], 2, where=[[True, True], [False, True]])
    function([[0.0, 1.0], [bad, bad]], 2, where=[True, False])


def test_host_rewards_are_checked_inside_jit_too():
    with _raises(ValueError, "rewards must be finite", "index 1"):
        jax.jit(lambda: grpo_advantage([0.0, NAN], 2))()

    # where the mask cannot be seen, what is unmasked shows as NaN
    masked = jax.jit(lambda where: grpo_advantage([0.0, NAN, 2.0], 3, "none", where=where))
    assert masked(jnp.asarray([True, False, True])).tolist() == [-1, 0, 1]
    assert np.isnan(masked(jnp.asarray([True, True, True]))).all()


def test_numbers_beyond_float32_are_not_finite_there():
    for rewards in ([1e39, 0.0], np.array([1e39, 0.0])):
        with _raises(ValueError, "rewards must be finite", "float32", "index 0"):
            grpo_advantage(rewards, 2)


def test_large_finite_rewards_pass_the_check():
    assert np.isfinite(grpo_advantage([1e30, -1e30], 2, "none")).all()


@pytest.mark.parametrize("function", ALL)
def test_where(function):
    call = functools.partial(function, num_generations=2)
    for shape in ((5,), (6, 1), (3, 2), ()):
        mask = jax.ShapeDtypeStruct(shape, bool)
        with _raises(ValueError, "where must have shape (6,)", f"got {shape}"):
            jax.eval_shape(lambda r, m: call(r, where=m), SIX, mask)
    components = jax.ShapeDtypeStruct((6, 3), jnp.float32)
    with _raises(ValueError, "where must have shape (6,) or (6, 3)", "got (6, 2)"):
        jax.eval_shape(
            lambda r, m: call(r, where=m), components, jax.ShapeDtypeStruct((6, 2), bool)
        )
    for wrong in ([1, 0], np.ones(2), jnp.ones(2, int)):
        with _raises(TypeError, "where must be boolean", "!= 0"):
            call([1.0, 2.0], where=wrong)


@pytest.mark.parametrize("function", ALL)
def test_reward_weights(function):
    call = functools.partial(function, num_generations=2)
    with _raises(ValueError, "reward_weights", "[N, C]", "(6,)"):
        jax.eval_shape(functools.partial(call, reward_weights=[1.0]), SIX)
    pair = [[1.0, 2.0], [3.0, 4.0]]
    for wrong in ([1.0], [1.0, 2.0, 3.0], [[1.0, 2.0]], 1.0):
        with _raises(ValueError, "reward_weights must have shape (2,)"):
            call(pair, reward_weights=wrong)
    with _raises(ValueError, "reward_weights must be finite", "index 1"):
        call(pair, reward_weights=[1.0, NAN])
    with _raises(TypeError, "reward_weights must hold numbers"):
        call(pair, reward_weights=["a", "b"])
    with _raises(TypeError, "reward_weights must be real"):
        call(pair, reward_weights=[1j, 0])
