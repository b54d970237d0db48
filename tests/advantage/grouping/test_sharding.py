"""Eight devices: sharded equals unsharded, however the mesh is made and wherever groups lie."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.advantage.estimates import (
    ROWS,
    SCALES,
    SEGMENTS,
    every_estimate,
    every_segment_estimate,
)
from twinkle_jax import grpo_advantage, rloo_advantage
from twinkle_jax.advantage import group_statistics, segment_grpo_advantage

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
REWARDS = np.random.default_rng(0).normal(size=48).astype(np.float32)
KEEP = np.random.default_rng(1).uniform(size=48) < 0.8
IDS = np.random.default_rng(2).integers(-1, 6, 48)


def _mesh(kind):
    return jax.make_mesh((8,), ("data",), axis_types=(KINDS[kind],))


def _every(rewards, ids, keep):
    """All estimates, by rows and by segments."""
    return every_estimate(rewards, 12, keep), every_segment_estimate(rewards, ids, 6, keep)


@functools.cache
def _unsharded():
    return _every(jnp.asarray(REWARDS), jnp.asarray(IDS), jnp.asarray(KEEP))


@pytest.mark.parametrize("kind", KINDS)
def test_groups_and_segments_may_straddle_shards(kind):
    sharding = NamedSharding(_mesh(kind), P("data"))
    estimates = _every(*jax.device_put((REWARDS, IDS, KEEP), sharding))
    for result, expected in zip(
        jax.tree.leaves(estimates), jax.tree.leaves(_unsharded()), strict=True
    ):
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)
        assert result.sharding.is_equivalent_to(sharding, 1), result.sharding


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ROWS)
def test_called_one_by_one(kind, scale, name):
    sharding = NamedSharding(_mesh(kind), P("data"))
    rewards, ids, keep = jax.device_put((REWARDS, IDS, KEEP), sharding)
    rows, segments = _unsharded()
    for result, expected in (
        (ROWS[name](rewards, 12, scale, where=keep), rows),  # six a device
        (SEGMENTS[name](rewards, ids, 6, scale, where=keep), segments),
    ):
        np.testing.assert_allclose(result, expected[name, scale], rtol=1e-6, atol=1e-6)
        assert result.sharding.is_equivalent_to(sharding, 1), result.sharding


@pytest.mark.parametrize("kind", KINDS)
def test_inside_a_jitted_step_under_a_mesh(kind):
    mesh = _mesh(kind)
    with jax.set_mesh(mesh):
        rewards = jax.device_put(REWARDS, NamedSharding(mesh, P("data")))

        @jax.jit
        def step(rewards):
            return 2 * grpo_advantage(rewards * 0.5, 12, "batch")

        expected = 2 * grpo_advantage(jnp.asarray(REWARDS) * 0.5, 12, "batch")
        np.testing.assert_allclose(step(rewards), expected, rtol=1e-6, atol=1e-6)
        batches = jnp.stack([rewards, -rewards])
        mapped = jax.vmap(lambda r: grpo_advantage(r, 12))(batches)
        np.testing.assert_allclose(
            mapped[0], grpo_advantage(jnp.asarray(REWARDS), 12), rtol=1e-6, atol=1e-6
        )
        np.testing.assert_allclose(mapped[1], -mapped[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_components_and_two_axes(kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(KINDS[kind],) * 2)
    pairs = np.stack([REWARDS, REWARDS[::-1]], axis=1)
    expected = grpo_advantage(pairs, 3, reward_weights=[1.0, 0.5])
    for spec in (P("data"), P(("data", "model")), P("data", "model"), P(None, "model"), P()):
        rewards = jax.device_put(pairs, NamedSharding(mesh, spec))
        result = grpo_advantage(rewards, 3, reward_weights=jnp.asarray([1.0, 0.5]))
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)
        samples = NamedSharding(mesh, P(*tuple(spec)[:1]))
        assert result.sharding.is_equivalent_to(samples, 1), (spec, result.sharding)


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_of_sharded_rewards(kind):
    rewards = jax.device_put(REWARDS, NamedSharding(_mesh(kind), P("data")))
    for size in (6, 12, 16):
        for result, expected in zip(
            group_statistics(rewards, size), group_statistics(REWARDS, size), strict=True
        ):
            np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


def _by_rows_segments_and_whole(rewards, ids, keep, axis_name=None):
    axis = {"where": keep, "axis_name": axis_name}
    return {
        scale: (
            rloo_advantage(rewards, 3, scale, **axis),
            segment_grpo_advantage(rewards, ids, 6, scale, **axis),
            grpo_advantage(rewards, 1, scale, **axis),
        )
        for scale in SCALES
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis_name", ["data", ("data",)])
def test_shard_map_with_axis_name(kind, axis_name):
    mesh = _mesh(kind)
    mapped = jax.shard_map(
        functools.partial(_by_rows_segments_and_whole, axis_name=axis_name),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
    )
    data = jax.device_put((REWARDS, IDS, KEEP), NamedSharding(mesh, P("data")))
    expected = jax.jit(_by_rows_segments_and_whole)(REWARDS, IDS, KEEP)
    for result, alone in zip(
        jax.tree.leaves(jax.jit(mapped)(*data)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(result, alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", SCALES)
def test_shard_map_without_jit(kind, scale):
    mesh = _mesh(kind)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def mapped(rewards, keep):
        return rloo_advantage(rewards, 3, scale, where=keep, axis_name="data")

    result = mapped(*jax.device_put((REWARDS, KEEP), NamedSharding(mesh, P("data"))))
    expected = rloo_advantage(REWARDS, 3, scale, where=KEEP)
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", ["batch", "none"])
def test_without_axis_name_a_shard_is_a_batch(scale):
    mesh = _mesh("auto")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def run(rewards):
        return grpo_advantage(rewards, 3, scale)

    result = run(jax.device_put(REWARDS, NamedSharding(mesh, P("data"))))
    expected = [grpo_advantage(shard, 3, scale) for shard in REWARDS.reshape(8, 6)]
    np.testing.assert_allclose(result, np.concatenate(expected), rtol=1e-6, atol=1e-6)


def test_the_batch_of_a_constant_shard_still_has_a_signal():
    mesh = _mesh("auto")
    rewards = np.repeat(np.arange(8, dtype=np.float32), 2)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def run(rewards):
        return grpo_advantage(rewards, 1, "none", axis_name="data")

    assert run(rewards).tolist() == (rewards - 3.5).tolist()
    assert not np.asarray(run(np.full(16, 0.1, np.float32))).any()


@pytest.mark.parametrize("scale", SCALES)
def test_vmap_with_axis_name_makes_the_batch_global(scale):
    rewards = jnp.asarray(REWARDS).reshape(4, 12)
    mapped = jax.vmap(lambda r: grpo_advantage(r, 3, scale, axis_name="batch"), axis_name="batch")(
        rewards
    )
    expected = grpo_advantage(REWARDS, 3, scale).reshape(4, 12)
    np.testing.assert_allclose(mapped, expected, rtol=1e-6, atol=1e-6)


def _collectives(text):
    names = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    return {name for name in names if f" {name}(" in text or f" {name}-start(" in text}


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_batch_scale_communicates(kind):
    rewards = jax.device_put(REWARDS, NamedSharding(_mesh(kind), P("data")))
    for scale in SCALES:
        compiled = jax.jit(lambda r, s=scale: grpo_advantage(r, 6, s)).lower(rewards).compile()
        assert _collectives(compiled.as_text()) == ({"all-reduce"} if scale == "batch" else set())
