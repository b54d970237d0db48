"""What a mesh means for groups: steps under it, axes by name, and what is sent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from twinkle_jax import grpo_advantage, rloo_advantage
from twinkle_jax.advantage import group_statistics

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
EITHER = ["explicit", pytest.param("auto", marks=pytest.mark.exhaustive)]
REWARDS = np.random.default_rng(0).normal(size=48).astype(np.float32)


def _mesh(kind):
    return jax.make_mesh((8,), ("data",), axis_types=(KINDS[kind],))


def _close(result, expected):
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", EITHER)
def test_inside_a_jitted_step_under_a_mesh(kind):
    mesh = _mesh(kind)
    with jax.set_mesh(mesh):
        rewards = jax.device_put(REWARDS, NamedSharding(mesh, P("data")))

        @jax.jit
        def step(rewards):
            return 2 * grpo_advantage(rewards * 0.5, 12, "batch")

        _close(step(rewards), 2 * grpo_advantage(jnp.asarray(REWARDS) * 0.5, 12, "batch"))
        batches = jnp.stack([rewards, -rewards])
        mapped = jax.vmap(lambda r: grpo_advantage(r, 12))(batches)
        _close(mapped[0], grpo_advantage(jnp.asarray(REWARDS), 12))
        _close(mapped[1], -mapped[0])


SPECS = [P("data", "model"), P("data"), P(("data", "model")), P(None, "model"), P()]


@pytest.mark.parametrize("kind", EITHER)
@pytest.mark.parametrize(
    "spec", [*SPECS[:2], *(pytest.param(spec, marks=pytest.mark.exhaustive) for spec in SPECS[2:])]
)
def test_components_and_two_axes(kind, spec):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(KINDS[kind],) * 2)
    pairs = np.stack([REWARDS, REWARDS[::-1]], axis=1)
    expected = grpo_advantage(pairs, 3, reward_weights=[1.0, 0.5])
    rewards = jax.device_put(pairs, NamedSharding(mesh, spec))
    result = grpo_advantage(rewards, 3, reward_weights=jnp.asarray([1.0, 0.5]))
    _close(result, expected)
    samples = NamedSharding(mesh, P(*tuple(spec)[:1]))
    assert result.sharding.is_equivalent_to(samples, 1), (spec, result.sharding)


@pytest.mark.parametrize("kind", EITHER)
@pytest.mark.parametrize(
    "size", [12, *(pytest.param(size, marks=pytest.mark.exhaustive) for size in (6, 16))]
)
def test_statistics_of_sharded_rewards(kind, size):
    rewards = jax.device_put(REWARDS, NamedSharding(_mesh(kind), P("data")))
    for result, expected in zip(
        group_statistics(rewards, size), group_statistics(REWARDS, size), strict=True
    ):
        _close(result, expected)


@pytest.mark.parametrize("kind", EITHER)
def test_shard_map_without_jit(kind):
    mesh = _mesh(kind)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def mapped(rewards):
        return rloo_advantage(rewards, 3, "batch", axis_name="data")

    result = mapped(jax.device_put(REWARDS, NamedSharding(mesh, P("data"))))
    _close(result, rloo_advantage(REWARDS, 3, "batch"))


def test_without_axis_name_a_shard_is_a_batch():
    mesh = _mesh("auto")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def run(rewards):
        return grpo_advantage(rewards, 3, "batch")

    result = run(jax.device_put(REWARDS, NamedSharding(mesh, P("data"))))
    expected = [grpo_advantage(shard, 3, "batch") for shard in REWARDS.reshape(8, 6)]
    _close(result, np.concatenate(expected))


def test_the_batch_of_a_constant_shard_still_has_a_signal():
    mesh = _mesh("auto")
    rewards = np.repeat(np.arange(8, dtype=np.float32), 2)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def run(rewards):
        return grpo_advantage(rewards, 1, "none", axis_name="data")

    assert run(rewards).tolist() == (rewards - 3.5).tolist()
    assert not np.asarray(run(np.full(16, 0.1, np.float32))).any()


def test_vmap_with_axis_name_makes_the_batch_global():
    rewards = jnp.asarray(REWARDS).reshape(4, 12)
    mapped = jax.vmap(
        lambda r: grpo_advantage(r, 3, "batch", axis_name="batch"), axis_name="batch"
    )(rewards)
    _close(mapped, np.asarray(grpo_advantage(REWARDS, 3, "batch")).reshape(4, 12))


def _collectives(text):
    names = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    return {name for name in names if f" {name}(" in text or f" {name}-start(" in text}


@pytest.mark.parametrize("kind", EITHER)
def test_only_the_batch_scale_communicates(kind):
    rewards = jax.device_put(REWARDS, NamedSharding(_mesh(kind), P("data")))
    for scale in ("group", "batch", "none"):
        compiled = jax.jit(lambda r, s=scale: grpo_advantage(r, 6, s)).lower(rewards).compile()
        assert _collectives(compiled.as_text()) == ({"all-reduce"} if scale == "batch" else set())
