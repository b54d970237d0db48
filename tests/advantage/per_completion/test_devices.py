"""Eight devices: estimators on sharded rewards and tokens give what they give on one device.

There are three samples a device and six a group, so that groups straddle shards.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.advantage.cases import COUNT, GREEDY, IDS, KEEP, LENGTHS, ROWS, SEGMENTS, SIZE
from twinkle_jax.advantage import (
    broadcast_to_tokens,
    discounted_returns,
    dynamic_sampling_filter,
    gae_advantage,
    group_statistics,
    kl_in_reward,
    kl_in_token_reward,
    reinforce_plus_plus_advantage,
    remax_advantage,
)

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
TIME = 6
RNG = np.random.default_rng(0)
REWARDS = RNG.uniform(size=COUNT).astype(np.float32)
SHUFFLED = RNG.permutation(IDS)
TOKENS, VALUES = RNG.normal(size=(2, COUNT, TIME)).astype(np.float32)
MASK = RNG.uniform(size=(COUNT, TIME)) < 0.7
# With statistics of the batch, and one that sorts; all the others, on both kinds, where CI looks.
FIRST = {("auto", "grpo, batch"), ("explicit", "reinforce++"), ("explicit", "pkpo, mean")}


def _everywhere(names):
    return [
        pytest.param(kind, name, marks=[] if (kind, name) in FIRST else [pytest.mark.exhaustive])
        for kind in KINDS
        for name in names
    ]


def _mesh(kind):
    return jax.make_mesh((8,), ("data",), axis_types=(KINDS[kind],))


def _with_lengths(name, lengths):
    return {"lengths": lengths} if name in ("opo", "reinforce++") else {}


@pytest.mark.parametrize(("kind", "name"), _everywhere(ROWS))
def test_groups_may_straddle_shards(kind, name):
    sharding = NamedSharding(_mesh(kind), P("data"))
    rewards, keep, lengths = (jax.device_put(x, sharding) for x in (REWARDS, KEEP, LENGTHS))
    expected = ROWS[name](REWARDS, SIZE, where=KEEP, **_with_lengths(name, LENGTHS))
    result = ROWS[name](rewards, SIZE, where=keep, **_with_lengths(name, lengths))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    assert result.sharding.is_equivalent_to(sharding, 1), result.sharding


@pytest.mark.parametrize(("kind", "name"), _everywhere(SEGMENTS))
def test_segments_may_straddle_shards(kind, name):
    sharding = NamedSharding(_mesh(kind), P("data"))
    rewards, ids, lengths = (jax.device_put(x, sharding) for x in (REWARDS, SHUFFLED, LENGTHS))
    expected = SEGMENTS[name](REWARDS, SHUFFLED, 4, where=None, **_with_lengths(name, LENGTHS))
    result = SEGMENTS[name](rewards, ids, 4, where=None, **_with_lengths(name, lengths))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    assert result.sharding.is_equivalent_to(sharding, 1), result.sharding


@pytest.mark.parametrize("kind", ["explicit", pytest.param("auto", marks=pytest.mark.exhaustive)])
def test_greedy_rewards_and_the_filter(kind):
    sharding = NamedSharding(_mesh(kind), P("data"))
    rewards = jax.device_put(REWARDS, sharding)
    expected = remax_advantage(REWARDS, GREEDY, SIZE)
    result = remax_advantage(rewards, jnp.asarray(GREEDY), SIZE)
    np.testing.assert_array_equal(result, expected)
    constant = np.where(np.arange(COUNT) < SIZE, 1, REWARDS).astype(np.float32)
    statistics = group_statistics(jax.device_put(constant, sharding), SIZE)
    keep = dynamic_sampling_filter(statistics, SIZE)
    assert keep.tolist() == [False] * SIZE + [True] * (COUNT - SIZE)


@jax.jit
def _over_tokens(tokens, values, mask, per_row):
    return (
        *gae_advantage(tokens, values, where=mask, gamma=0.9),
        reinforce_plus_plus_advantage(tokens, where=mask),
        discounted_returns(tokens, where=mask, bootstrap_values=per_row),
        kl_in_token_reward(per_row, tokens, mask, coefficient=0.1),
        broadcast_to_tokens(per_row, mask),
        kl_in_reward(per_row, tokens, mask, coefficient=0.1),
    )


@pytest.mark.parametrize(
    ("kind", "spec"), [("auto", P("data")), ("explicit", P("data", "time"))], ids=str
)
def test_tokens(kind, spec):
    mesh = jax.make_mesh((4, 2), ("data", "time"), axis_types=(KINDS[kind],) * 2)
    sharding = NamedSharding(mesh, spec)
    per_row = jax.device_put(REWARDS, NamedSharding(mesh, P("data")))
    expected = _over_tokens(TOKENS, VALUES, MASK, REWARDS)
    given = (jax.device_put(x, sharding) for x in (TOKENS, VALUES, MASK))
    result = _over_tokens(*given, per_row)
    for one, other in zip(result, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    if kind == "explicit":
        assert all(x.sharding.is_equivalent_to(sharding, 2) for x in result[:-1])
        assert result[-1].sharding.is_equivalent_to(per_row.sharding, 1)


@pytest.mark.parametrize("kind", ["auto", pytest.param("explicit", marks=pytest.mark.exhaustive)])
def test_shard_map_with_axis_name(kind):
    mesh = _mesh(kind)
    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))

    @jax.jit
    @mapped
    def run(rewards, keep, lengths, ids, tokens, values, mask):
        rows = {"where": keep, "axis_name": "data"}
        return (
            ROWS["gdpo"](rewards, 3, **rows),
            ROWS["grpo, batch"](rewards, 3, **rows),
            ROWS["grpo, none"](rewards, 1, **rows),
            SEGMENTS["rloo, group"](rewards, ids, 4, **rows),
            ROWS["reinforce++"](rewards, 3, lengths=lengths, **rows),
            SEGMENTS["opo"](rewards, ids, 4, where=None, lengths=lengths, axis_name=("data",)),
            SEGMENTS["reinforce++"](rewards, ids, 4, where=None, lengths=lengths, axis_name="data"),
            gae_advantage(tokens, values, where=mask, axis_name="data").advantages,
            reinforce_plus_plus_advantage(tokens, where=mask, axis_name="data"),
        )

    expected = (
        ROWS["gdpo"](REWARDS, 3, where=KEEP),
        ROWS["grpo, batch"](REWARDS, 3, where=KEEP),
        ROWS["grpo, none"](REWARDS, 1, where=KEEP),
        SEGMENTS["rloo, group"](REWARDS, SHUFFLED, 4, where=KEEP),
        ROWS["reinforce++"](REWARDS, 3, where=KEEP, lengths=LENGTHS),
        SEGMENTS["opo"](REWARDS, SHUFFLED, 4, where=None, lengths=LENGTHS),
        SEGMENTS["reinforce++"](REWARDS, SHUFFLED, 4, where=None, lengths=LENGTHS),
        gae_advantage(TOKENS, VALUES, where=MASK).advantages,
        reinforce_plus_plus_advantage(TOKENS, where=MASK),
    )
    given = (REWARDS, KEEP, LENGTHS, SHUFFLED, TOKENS, VALUES, MASK)
    result = run(*(jax.device_put(x, NamedSharding(mesh, P("data"))) for x in given))
    for one, other in zip(result, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
