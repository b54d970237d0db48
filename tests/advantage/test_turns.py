"""GAE over turns: the sums written out in float64, its laws, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.advantage.cases import INF, NAN
from twinkle_jax.advantage import (
    discounted_returns,
    grpo_advantage,
    turn_gae_advantage,
    turn_returns,
)

GROUPS, SIZE, TURNS = 3, 4, 5
RNG = np.random.default_rng(5)
REWARDS = RNG.normal(size=(GROUPS * SIZE, TURNS)).astype(np.float32)
LENGTHS = np.asarray([5, 3, 4, 2, 1, 1, 5, 0, 2, 2, 2, 2])  # one has none, one is alone in turn 1
WHERE = np.arange(TURNS) < LENGTHS[:, None]
GAMMA = 0.9


def expected(rewards, where, gamma, gae_lambda):
    """The definition: values are mean returns, errors are weighed with powers of gamma lambda."""
    rewards, turns = np.asarray(rewards, np.float64), where.sum(axis=1)
    returns, values, advantages = (np.zeros(rewards.shape) for _ in range(3))
    for i, k in np.argwhere(where):
        returns[i, k] = sum(gamma ** (j - k) * rewards[i, j] for j in range(k, turns[i]))
    for i, k in np.argwhere(where):
        group = range(i // SIZE * SIZE, i // SIZE * SIZE + SIZE)
        values[i, k] = np.mean([returns[j, k] for j in group if where[j, k]])
    for i, k in np.argwhere(where):
        for j in range(k, turns[i]):
            after = values[i, j + 1] if j + 1 < turns[i] else 0.0
            error = rewards[i, j] + gamma * after - values[i, j]
            advantages[i, k] += (gamma * gae_lambda) ** (j - k) * error
    return advantages, values


@pytest.mark.parametrize("gae_lambda", [0.0, 0.3, 0.95, 1.0])
def test_against_the_sums(gae_lambda):
    advantages, values = expected(REWARDS, WHERE, GAMMA, gae_lambda)
    garbage = np.where(WHERE, REWARDS, NAN)
    settings = {"where": WHERE, "gamma": GAMMA, "gae_lambda": gae_lambda}
    result = np.asarray(turn_gae_advantage(garbage, SIZE, **settings))
    alone = np.asarray([[k == 1 and i == 6 for k in range(TURNS)] for i in range(len(WHERE))])
    alone |= [[i == 6 and k > 1 for k in range(TURNS)] for i in range(len(WHERE))]
    alone |= [[i == 0 and k == 4 for k in range(TURNS)] for i in range(len(WHERE))]
    np.testing.assert_allclose(result, np.where(alone, 0, advantages), atol=2e-6)
    returns = turn_returns(garbage, SIZE, **settings)
    np.testing.assert_allclose(returns, advantages + values, atol=2e-6)
    totals = result.reshape(GROUPS, SIZE, TURNS).sum(axis=1)
    np.testing.assert_allclose(totals, 0, atol=4e-6)


def test_with_lambda_1_it_is_the_discounted_return_less_the_baseline():
    rewards = RNG.integers(-3, 4, REWARDS.shape).astype(np.float32)  # exact, as their halves are
    returns = discounted_returns(rewards, where=WHERE, gamma=0.5)
    settings = {"where": WHERE, "gamma": 0.5, "gae_lambda": 1.0}
    np.testing.assert_array_equal(turn_returns(rewards, SIZE, **settings), returns)
    for scale in ("none", "group", "batch"):
        advantages = turn_gae_advantage(rewards, SIZE, scale, **settings)
        for turn in range(TURNS):
            column = grpo_advantage(returns[:, turn], SIZE, scale, where=WHERE[:, turn])
            np.testing.assert_allclose(advantages[:, turn], column, atol=1e-6)
            if scale == "none":
                np.testing.assert_array_equal(advantages[:, turn], column)


def test_by_hand():
    # Returns 3, 2 and 1, 1: values 2 and 1.5. Errors 1 + 1.5 - 2 = 0.5, 2 - 1.5 = 0.5 and
    # 0 + 1.5 - 2 = -0.5, 1 - 1.5 = -0.5; half of the second is added to the first.
    rewards = [[1.0, 2.0], [0.0, 1.0]]
    result = turn_gae_advantage(rewards, 2, gae_lambda=0.5)
    assert result.tolist() == [[0.75, 0.5], [-0.75, -0.5]]
    assert turn_gae_advantage(rewards, 2, gae_lambda=0.0).tolist() == [[0.5, 0.5], [-0.5, -0.5]]


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_equal_episodes_are_no_signal(scale):
    rewards = np.full((6, 3), 0.1, np.float32)
    for gae_lambda in (0.0, 0.7, 1.0):
        result = turn_gae_advantage(rewards, 3, scale, gamma=0.7, gae_lambda=gae_lambda)
        assert not np.asarray(result).any()


def test_under_jit_and_without_gradients():
    settings = {"where": WHERE, "gamma": GAMMA}
    traced = jax.jit(lambda r, x: turn_gae_advantage(r, SIZE, gae_lambda=x, **settings))
    eager = turn_gae_advantage(REWARDS, SIZE, gae_lambda=0.5, **settings)
    np.testing.assert_allclose(traced(REWARDS, 0.5), eager, atol=1e-6)
    gradient = jax.grad(lambda r: traced(r, 0.5).sum())(jnp.asarray(REWARDS))
    assert not np.asarray(gradient).any()


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("rewards", lambda: turn_returns(REWARDS, 5)),
        ("rewards", lambda: turn_returns(REWARDS[0], 5)),
        ("rewards", lambda: turn_returns(np.full((2, 2), INF), 2)),
        ("num_generations", lambda: turn_returns(REWARDS, 0)),
        ("where", lambda: turn_returns(REWARDS, SIZE, where=WHERE[:, :2])),
        ("gamma", lambda: turn_gae_advantage(REWARDS, SIZE, gamma=np.ones(2))),
        ("scale", lambda: turn_gae_advantage(REWARDS, SIZE, "all")),
    ],
)
def test_errors_name_the_argument(argument, call):
    with pytest.raises(ValueError, match=argument):
        call()


def test_episodes_spread_over_an_explicit_mesh():
    mesh = jax.make_mesh((GROUPS,), ("data",), (AxisType.Explicit,))
    spread = jax.device_put((REWARDS, WHERE), NamedSharding(mesh, PartitionSpec("data")))
    for estimate in (turn_returns, turn_gae_advantage):
        with jax.set_mesh(mesh):
            result = estimate(spread[0], SIZE, where=spread[1], gae_lambda=0.5)
        assert result.sharding.spec[0] == "data"
        alone = estimate(REWARDS, SIZE, where=WHERE, gae_lambda=0.5)
        np.testing.assert_allclose(result, alone, rtol=1e-5, atol=1e-6)
