"""Eight devices: sharded rewards and tokens give what they give on one device.

There are three samples a device and six a group, so that groups straddle shards.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.advantage.cases import CASES, COUNT, GREEDY, IDS, KEEP, LENGTHS, ROWS, SEGMENTS, SIZE
from twinkle_jax import grpo_advantage, rloo_advantage
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
EITHER = ["explicit", pytest.param("auto", marks=pytest.mark.exhaustive)]
TIME = 6
RNG = np.random.default_rng(0)
REWARDS = RNG.uniform(size=COUNT).astype(np.float32)
MORE = RNG.normal(size=48).astype(np.float32)
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


def _sharding(kind):
    return NamedSharding(_mesh(kind), P("data"))


def _close(result, expected, atol=1e-6):
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=atol)


def _lengths(name, lengths):
    return {"lengths": lengths} if "lengths" in CASES[name].data else {}


@pytest.mark.parametrize(("kind", "name"), _everywhere(ROWS))
def test_groups_may_straddle_shards(kind, name):
    sharding = _sharding(kind)
    rewards, keep, lengths = (jax.device_put(x, sharding) for x in (REWARDS, KEEP, LENGTHS))
    expected = ROWS[name](REWARDS, where=KEEP)
    result = ROWS[name](rewards, where=keep, **_lengths(name, lengths))
    _close(result, expected)
    assert result.sharding.is_equivalent_to(sharding, 1), result.sharding


@pytest.mark.parametrize(("kind", "name"), _everywhere(SEGMENTS))
def test_segments_may_straddle_shards(kind, name):
    sharding = _sharding(kind)
    rewards, ids, lengths = (jax.device_put(x, sharding) for x in (REWARDS, SHUFFLED, LENGTHS))
    expected = SEGMENTS[name](REWARDS, SHUFFLED, 4, where=None)
    result = SEGMENTS[name](rewards, ids, 4, where=None, **_lengths(name, lengths))
    _close(result, expected)
    assert result.sharding.is_equivalent_to(sharding, 1), result.sharding


@pytest.mark.parametrize("kind", EITHER)
def test_greedy_rewards_statistics_and_the_filter(kind):
    sharding = _sharding(kind)
    rewards = jax.device_put(REWARDS, sharding)
    result = remax_advantage(rewards, jnp.asarray(GREEDY), SIZE)
    np.testing.assert_array_equal(result, remax_advantage(REWARDS, GREEDY, SIZE))
    constant = np.where(np.arange(COUNT) < SIZE, 1, REWARDS).astype(np.float32)
    statistics = group_statistics(jax.device_put(constant, sharding), SIZE)
    keep = dynamic_sampling_filter(statistics, SIZE)
    assert keep.tolist() == [False] * SIZE + [True] * (COUNT - SIZE)
    for size in (12, 6, 16):
        result = group_statistics(jax.device_put(MORE, sharding), size)
        for one, other in zip(result, group_statistics(MORE, size), strict=True):
            _close(one, other)


@pytest.mark.parametrize("kind", EITHER)
def test_inside_a_jitted_step_under_a_mesh(kind):
    mesh = _mesh(kind)
    with jax.set_mesh(mesh):
        rewards = jax.device_put(MORE, NamedSharding(mesh, P("data")))

        @jax.jit
        def step(rewards):
            return 2 * grpo_advantage(rewards * 0.5, 12, "batch")

        _close(step(rewards), 2 * grpo_advantage(jnp.asarray(MORE) * 0.5, 12, "batch"))
        mapped = jax.vmap(lambda r: grpo_advantage(r, 12))(jnp.stack([rewards, -rewards]))
        _close(mapped[0], grpo_advantage(jnp.asarray(MORE), 12))
        _close(mapped[1], -mapped[0])


SPECS = [P("data", "model"), P("data"), P(("data", "model")), P(None, "model"), P()]


@pytest.mark.parametrize("kind", EITHER)
@pytest.mark.parametrize(
    "spec", [*SPECS[:2], *(pytest.param(spec, marks=pytest.mark.exhaustive) for spec in SPECS[2:])]
)
def test_components_and_two_axes(kind, spec):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(KINDS[kind],) * 2)
    pairs = np.stack([MORE, MORE[::-1]], axis=1)
    expected = grpo_advantage(pairs, 3, reward_weights=[1.0, 0.5])
    rewards = jax.device_put(pairs, NamedSharding(mesh, spec))
    result = grpo_advantage(rewards, 3, reward_weights=jnp.asarray([1.0, 0.5]))
    _close(result, expected)
    samples = NamedSharding(mesh, P(*tuple(spec)[:1]))
    assert result.sharding.is_equivalent_to(samples, 1), (spec, result.sharding)


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
    sharded = (jax.device_put(x, sharding) for x in (TOKENS, VALUES, MASK))
    result = _over_tokens(*sharded, per_row)
    for one, other in zip(result, expected, strict=True):
        _close(one, other, atol=1e-5)
    if kind == "explicit":
        assert all(x.sharding.is_equivalent_to(sharding, 2) for x in result[:-1])
        assert result[-1].sharding.is_equivalent_to(per_row.sharding, 1)


def _shard_map(kind, function):
    return jax.shard_map(function, mesh=_mesh(kind), in_specs=P("data"), out_specs=P("data"))


@pytest.mark.parametrize("kind", ["auto", pytest.param("explicit", marks=pytest.mark.exhaustive)])
def test_shard_map_with_axis_name(kind):
    def run(rewards, keep, lengths, ids, tokens, values, mask, **axis):
        rows, lengths = {"where": keep, **axis}, {"lengths": lengths}
        as_tuple = {"axis_name": ("data",)} if axis else {}
        return (
            ROWS["gdpo"](rewards, 3, **rows),
            ROWS["grpo, batch"](rewards, 3, **rows),
            ROWS["grpo, none"](rewards, 1, **rows),
            SEGMENTS["rloo, group"](rewards, ids, 4, **rows),
            ROWS["reinforce++"](rewards, 3, **lengths, **rows),
            SEGMENTS["opo"](rewards, ids, 4, where=None, **lengths, **as_tuple),
            SEGMENTS["reinforce++"](rewards, ids, 4, where=None, **lengths, **axis),
            gae_advantage(tokens, values, where=mask, **axis).advantages,
            reinforce_plus_plus_advantage(tokens, where=mask, **axis),
        )

    arrays = (REWARDS, KEEP, LENGTHS, SHUFFLED, TOKENS, VALUES, MASK)
    mapped = jax.jit(_shard_map(kind, functools.partial(run, axis_name="data")))
    result = mapped(*(jax.device_put(x, _sharding(kind)) for x in arrays))
    for one, other in zip(result, run(*arrays), strict=True):
        _close(one, other)


@pytest.mark.parametrize("kind", EITHER)
def test_shard_map_without_jit(kind):
    mapped = _shard_map(kind, lambda r: rloo_advantage(r, 3, "batch", axis_name="data"))
    _close(mapped(jax.device_put(MORE, _sharding(kind))), rloo_advantage(MORE, 3, "batch"))


def test_without_axis_name_a_shard_is_a_batch():
    result = _shard_map("auto", lambda r: grpo_advantage(r, 3, "batch"))(MORE)
    expected = [grpo_advantage(shard, 3, "batch") for shard in MORE.reshape(8, 6)]
    _close(result, np.concatenate(expected))


def test_the_batch_of_a_constant_shard_still_has_a_signal():
    rewards = np.repeat(np.arange(8, dtype=np.float32), 2)
    run = _shard_map("auto", lambda r: grpo_advantage(r, 1, "none", axis_name="data"))
    assert run(rewards).tolist() == (rewards - 3.5).tolist()
    assert not np.asarray(run(np.full(16, 0.1, np.float32))).any()


def test_vmap_with_axis_name_makes_the_batch_global():
    mapped = jax.vmap(
        lambda r: grpo_advantage(r, 3, "batch", axis_name="batch"), axis_name="batch"
    )(jnp.asarray(MORE).reshape(4, 12))
    _close(mapped, np.asarray(grpo_advantage(MORE, 3, "batch")).reshape(4, 12))


def _collectives(text):
    names = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    return {name for name in names if f" {name}(" in text or f" {name}-start(" in text}


@pytest.mark.parametrize("kind", EITHER)
def test_only_the_batch_scale_communicates(kind):
    rewards = jax.device_put(MORE, _sharding(kind))
    for scale in ("group", "batch", "none"):
        compiled = jax.jit(lambda r, s=scale: grpo_advantage(r, 6, s)).lower(rewards).compile()
        assert _collectives(compiled.as_text()) == ({"all-reduce"} if scale == "batch" else set())
