"""What bad input gets from all estimators: an error that names the argument and what arrived."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.advantage.cases import CASES, COUNT, GROUPED, PROMPTS, ROWS, SEGMENTS, SIZE
from twinkle_jax.advantage import (
    opo_advantage,
    pass_at_k_advantage,
    pkpo_advantage,
    reinforce_plus_plus_baseline_advantage,
    remax_advantage,
    segment_opo_advantage,
)

NAN, INF = float("nan"), float("inf")
REWARDS = np.zeros(COUNT, np.float32)
TRACED = jax.ShapeDtypeStruct((COUNT,), jnp.float32)


def _raises(kind, *words):
    """Expect all words in the message, in this order."""
    return pytest.raises(kind, match="(?s)" + ".*".join(map(re.escape, words)))


@pytest.mark.parametrize("name", ROWS)
def test_num_generations(name):
    call = ROWS[name]
    for wrong in (2.0, True, "2", None):
        with _raises(TypeError, "num_generations must be a positive int", type(wrong).__name__):
            call(REWARDS, wrong)
    with _raises(TypeError, "num_generations", "static"):
        jax.eval_shape(call, TRACED, jax.ShapeDtypeStruct((), jnp.int32))
    with _raises(ValueError, "num_generations=5", f"got {COUNT} rewards"):
        jax.eval_shape(functools.partial(call, size=5), TRACED)
    with _raises(ValueError, "num_generations must be at least", "got 0"):
        call(REWARDS, 0)


@pytest.mark.parametrize("name", [n for n in GROUPED if CASES[n].name != "grpo"])
def test_a_group_needs_two(name):
    with _raises(ValueError, "num_generations must be at least 2, got 1", "group"):
        jax.eval_shape(functools.partial(GROUPED[name], size=1), TRACED)


@pytest.mark.parametrize("name", ROWS)
def test_rewards_and_masks(name):
    call = ROWS[name]
    with _raises(ValueError, "rewards must be finite", "got nan at index 3", "where="):
        call([NAN if i == 3 else 1.0 for i in range(COUNT)])
    with _raises(ValueError, "rewards must be [N]", "(4, 3, 2)"):
        call(np.zeros((4, 3, 2)))
    with _raises(ValueError, "where must have shape", "got (3,)"):
        jax.eval_shape(functools.partial(call, where=np.ones(3, bool)), TRACED)
    with _raises(TypeError, "where must be boolean", "where != 0"):
        call(REWARDS, where=np.ones(COUNT))
    with _raises(ValueError, "reward_weights", f"({COUNT},)"):
        call(REWARDS, reward_weights=[1.0, 2.0])
    with _raises(TypeError, "rewards must be real"):
        jax.eval_shape(lambda r: call(jax.lax.complex(r, r)), TRACED)


@pytest.mark.parametrize(
    "name", ["grpo, none", "rloo, batch", "gdpo", "maxrl", "dgpo", "mc_grpo", "reinforce++"]
)
def test_epsilon(name):
    with _raises(TypeError, "epsilon must be a number", "'small'"):
        ROWS[name](REWARDS, epsilon="small")
    with _raises(ValueError, "epsilon must be a scalar", "(2,)"):
        jax.eval_shape(lambda r: ROWS[name](r, epsilon=r[:2]), TRACED)
    with _raises(TypeError, "epsilon must be a real number", "int32"):
        ROWS[name](REWARDS, epsilon=jnp.int32(1))


@pytest.mark.parametrize("name", [label for label in ROWS if "scale" in CASES[label].settings])
def test_scale(name):
    with _raises(ValueError, "scale must be one of 'group', 'batch', 'none'", "'std'"):
        ROWS[name](REWARDS, scale="std")
    with _raises(TypeError, "scale", "NoneType"):
        ROWS[name](REWARDS, scale=None)


@pytest.mark.parametrize("name", SEGMENTS)
def test_segments(name):
    call = SEGMENTS[name]
    with _raises(ValueError, "segment_ids must have shape", "got (3,)"):
        jax.eval_shape(lambda r: call(r, jnp.zeros(3, int), 4), TRACED)
    with _raises(TypeError, "segment_ids must hold integers"):
        call(REWARDS, np.zeros(COUNT), 4)
    with _raises(ValueError, "num_segments must be at least 1, got 0"):
        call(REWARDS, np.zeros(COUNT, int), 0)
    with _raises(TypeError, "num_segments", "static"):
        jax.jit(call)(REWARDS, np.zeros(COUNT, int), 4)


@pytest.mark.parametrize(
    "call",
    [
        lambda r, lengths, **kw: opo_advantage(r, lengths, SIZE, **kw),
        lambda r, lengths, **kw: reinforce_plus_plus_baseline_advantage(r, lengths, SIZE, **kw),
        lambda r, lengths, **kw: segment_opo_advantage(r, lengths, np.zeros(COUNT, int), 4, **kw),
    ],
)
def test_lengths(call):
    with _raises(ValueError, f"lengths must have shape ({COUNT},)", "got (4, 6)"):
        jax.eval_shape(lambda r: call(r, r.reshape(4, 6)), TRACED)
    with _raises(TypeError, "lengths must be an array or a list", "None"):
        call(REWARDS, None)
    for wrong, message in ((-1, "got -1"), (NAN, "got nan"), (INF, "got inf")):
        lengths = np.ones(COUNT, np.float32)
        lengths[5] = wrong
        with _raises(ValueError, "lengths must be finite and not negative", message, "index 5"):
            call(REWARDS, lengths)
        with _raises(ValueError, "index 5"):
            call(REWARDS, lengths, where=np.arange(COUNT) != 4)
        call(REWARDS, lengths, where=np.arange(COUNT) != 5)


def test_greedy_rewards():
    with _raises(ValueError, f"greedy_rewards must have shape ({PROMPTS},)", "one greedy", "(24,)"):
        jax.eval_shape(lambda r: remax_advantage(r, r, SIZE), TRACED)
    with _raises(ValueError, f"({PROMPTS}, 2)", f"got ({PROMPTS},)"):
        remax_advantage(np.zeros((COUNT, 2)), np.zeros(PROMPTS), SIZE)
    with _raises(ValueError, "greedy_rewards must be finite", "got nan at index 1"):
        remax_advantage(REWARDS, [0.0, NAN, 0.0, 0.0], SIZE)
    with _raises(ValueError, "greedy_rewards must be finite", "index 1"):
        remax_advantage(REWARDS, [0.0, NAN, 0.0, 0.0], SIZE, where=np.arange(COUNT) < 7)
    with _raises(ValueError, "num_generations must be at least 1, got 0"):
        remax_advantage(REWARDS, [0.0], 0)


@pytest.mark.parametrize("function", [pass_at_k_advantage, pkpo_advantage])
def test_k(function):
    with _raises(ValueError, "k must be at least 1, got 0"):
        function(REWARDS, SIZE, k=0)
    with _raises(ValueError, "k must be at most num_generations=6, got 7"):
        jax.eval_shape(functools.partial(function, num_generations=SIZE, k=7), TRACED)
    for wrong in (2.0, "2", None, True):
        with _raises(TypeError, "k must be a positive int", type(wrong).__name__):
            function(REWARDS, SIZE, k=wrong)
    with _raises(TypeError, "k must be an integer", "float32"):
        function(REWARDS, SIZE, k=jnp.float32(2))
    with _raises(ValueError, "k must be a scalar, got shape (2,)"):
        function(REWARDS, SIZE, k=jnp.ones(2, int))
    with pytest.raises(TypeError, match="'k'"):
        function(REWARDS, SIZE)
    assert function(REWARDS, SIZE, k=np.int64(2)).shape == (COUNT,)


def test_baseline_of_pkpo():
    with _raises(ValueError, "baseline must be one of 'mean', 'leave_one_out'", "'loo'"):
        pkpo_advantage(REWARDS, SIZE, k=2, baseline="loo")
    with _raises(TypeError, "baseline must be one of", "NoneType"):
        pkpo_advantage(REWARDS, SIZE, k=2, baseline=None)
    with _raises(ValueError, "k must be at least 2, got 1", "'leave_one_out_minus_one'"):
        pkpo_advantage(REWARDS, SIZE, k=1, baseline="leave_one_out_minus_one")
    with _raises(ValueError, "k must be below num_generations=6", "'leave_one_out'", "got 6"):
        pkpo_advantage(REWARDS, SIZE, k=6, baseline="leave_one_out")


def test_threshold():
    with _raises(TypeError, "threshold must be a number", "'half'"):
        pass_at_k_advantage(REWARDS, SIZE, k=2, threshold="half")
