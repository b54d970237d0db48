"""What bad input gets: an error that names the argument, what arrived, and a remedy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax import GRPOAdvantage, RLOOAdvantage, grpo_advantage, rloo_advantage
from twinkle_jax.advantage import (
    group_statistics,
    segment_grpo_advantage,
    segment_rloo_advantage,
)

NAN, INF = float("nan"), float("inf")
SIX = jax.ShapeDtypeStruct((6,), jnp.float32)


def _raises(kind, *words):
    """Expect all words in the message, in this order."""
    return pytest.raises(kind, match="(?s)" + ".*".join(map(re.escape, words)))


ESTIMATORS = [grpo_advantage, rloo_advantage, GRPOAdvantage(), RLOOAdvantage()]
ALL = [*ESTIMATORS, group_statistics]


@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize("size", [0, -2, np.int64(0)])
def test_num_generations_below_one(function, size):
    with _raises(ValueError, "num_generations must be at least", f"got {size}"):
        function([1.0, 2.0], size)


@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize("size", [True, False, 2.0, "2", None, np.bool_(True), [2]])
def test_num_generations_of_a_wrong_type(function, size):
    with _raises(TypeError, "num_generations must be a positive int", type(size).__name__):
        function([1.0, 2.0], size)


@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize("size", [jnp.int32(2), np.array(2), jnp.array([2])])
def test_num_generations_as_an_array(function, size):
    with _raises(TypeError, "num_generations", "static", "array"):
        function([1.0, 2.0], size)


@pytest.mark.parametrize("function", ALL)
def test_num_generations_traced(function):
    with _raises(TypeError, "num_generations", "static", "traced", "static_argnames"):
        jax.jit(function)(jnp.ones(2), 2)


@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize("size", [np.int64(2), np.int8(2), np.uint16(2), 2])
def test_numpy_integers_are_welcome(function, size):
    function([1.0, 2.0], size)


@pytest.mark.parametrize("function", [rloo_advantage, RLOOAdvantage()])
def test_rloo_needs_two(function):
    with _raises(ValueError, "num_generations must be at least 2, got 1", "others"):
        function([1.0, 2.0], 1)
    with _raises(ValueError, "num_generations must be at least 2, got 1"):
        RLOOAdvantage()([1.0, 2.0])


@pytest.mark.parametrize("function", ALL)
def test_rewards_that_k_does_not_divide(function):
    with _raises(ValueError, "rewards", "num_generations=4", "got 6 rewards", "segment"):
        jax.eval_shape(functools.partial(function, num_generations=4), SIX)
    with _raises(ValueError, "num_generations=8", "got 6"):
        function([1.0] * 6, 8)


@pytest.mark.parametrize("function", ESTIMATORS)
def test_scale(function):
    for scale in ("Group", "std", "", "groups"):
        with _raises(ValueError, "scale", "'group', 'batch', 'none'", repr(scale)):
            jax.eval_shape(functools.partial(function, num_generations=2, scale=scale), SIX)
    for scale in (None, True, 1, ["group"]):
        with _raises(TypeError, "scale", "'group', 'batch', 'none'", type(scale).__name__):
            function([1.0, 2.0], 2, scale)
    with _raises(TypeError, "scale='none'"):
        function([1.0, 2.0], 2, None)


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


@pytest.mark.parametrize("function", ESTIMATORS)
def test_epsilon(function):
    call = functools.partial(function, [1.0, 2.0], 2)
    for wrong in ("1e-8", None, True, [1e-8], 1j):
        with _raises(TypeError, "epsilon must be a number", type(wrong).__name__):
            call(epsilon=wrong)
    with _raises(TypeError, "epsilon must be a real number"):
        call(epsilon=jnp.int32(1))
    with _raises(ValueError, "epsilon must be a scalar", "(2,)"):
        call(epsilon=jnp.ones(2))


def test_unbound_axis_name():
    with pytest.raises(NameError, match="nowhere"):
        grpo_advantage([1.0, 2.0], 2, "batch", axis_name="nowhere")


@pytest.mark.parametrize("function", [segment_grpo_advantage, segment_rloo_advantage])
def test_segments(function):
    ids = jax.ShapeDtypeStruct((6,), jnp.int32)
    with _raises(ValueError, "segment_ids must have shape (6,)", "got (5,)"):
        jax.eval_shape(lambda r: function(r, [0] * 5, 2), SIX)
    for wrong in ([0.0] * 6, [True] * 6, jnp.zeros(6)):
        with _raises(TypeError, "segment_ids must hold integers"):
            function([1.0] * 6, wrong, 2)
    with _raises(ValueError, "num_segments must be at least 1", "got 0"):
        jax.eval_shape(lambda r, i: function(r, i, 0), SIX, ids)
    with _raises(TypeError, "num_segments", "static"):
        jax.jit(function)(jnp.ones(2), jnp.zeros(2, int), 2)
    with _raises(TypeError, "num_segments must be a positive int", "2.5"):
        function([1.0], [0], 2.5)
    with _raises(ValueError, "scale", "'mean'"):
        function([1.0], [0], 2, "mean")
    with _raises(ValueError, "rewards must be finite"):
        function([1.0, NAN], [0, 0], 1)
    with _raises(ValueError, "at least one"):
        function([], [], 1)
    with _raises(ValueError, "where must have shape (2,)"):
        function([1.0, 2.0], [0, 0], 1, where=[True])
