"""What bad settings and ids get: an error that names the argument, what arrived, and a remedy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax import GRPOAdvantage, RLOOAdvantage, grpo_advantage, rloo_advantage
from twinkle_jax.advantage import group_statistics, segment_grpo_advantage

NAN, INF = float("nan"), float("inf")
SIX = jax.ShapeDtypeStruct((6,), jnp.float32)


def _raises(kind, *words):
    """Expect all words in the message, in this order."""
    return pytest.raises(kind, match="(?s)" + ".*".join(map(re.escape, words)))


# One function for all estimators, which read settings alike: test_errors.py asks each of them.
ESTIMATORS = [grpo_advantage, GRPOAdvantage()]
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


def test_segments():
    function = segment_grpo_advantage
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
