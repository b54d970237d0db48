"""The functions as parts of a program: jit, scan, vmap, export, and how often they compile."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax import GRPOAdvantage, grpo_advantage, rloo_advantage
from twinkle_jax.advantage import (
    group_statistics,
    segment_grpo_advantage,
    segment_rloo_advantage,
)

SCALES = ("group", "batch", "none")
REWARDS = np.random.default_rng(0).normal(size=24).astype(np.float32)
IDS = np.repeat(np.arange(6), 4)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("scale", SCALES)
def test_with_and_without_jit(jit, scale):
    expected = [
        grpo_advantage(REWARDS, 4, scale),
        rloo_advantage(REWARDS, 4, scale),
        segment_grpo_advantage(REWARDS, IDS, 6, scale),
        segment_rloo_advantage(REWARDS, IDS, 6, scale),
        group_statistics(REWARDS, 4).std,
    ]

    def everything(rewards):
        return [
            grpo_advantage(rewards, 4, scale),
            rloo_advantage(rewards, 4, scale),
            segment_grpo_advantage(rewards, IDS, 6, scale),
            segment_rloo_advantage(rewards, IDS, 6, scale),
            group_statistics(rewards, 4).std,
        ]

    run = jax.jit(everything) if jit else everything
    with jax.disable_jit(not jit):
        for result, value in zip(run(jnp.asarray(REWARDS)), expected, strict=True):
            np.testing.assert_allclose(result, value, rtol=1e-6, atol=1e-6)


def test_inside_scan_and_remat():
    batches = jnp.asarray(REWARDS).reshape(3, 8)

    @jax.checkpoint
    def body(total, rewards):
        return total, grpo_advantage(rewards, 4, "batch")

    _, scanned = jax.lax.scan(body, 0.0, batches)
    for row in range(3):
        alone = grpo_advantage(batches[row], 4, "batch")
        np.testing.assert_allclose(scanned[row], alone, rtol=1e-6, atol=1e-6)


def test_jit_over_the_public_function_and_the_wrapper():
    static = jax.jit(grpo_advantage, static_argnames=("num_generations", "scale"))
    wrapped = jax.jit(lambda r: GRPOAdvantage()(r, num_generations=4))
    as_argument = jax.jit(lambda f, r: f(r, num_generations=4), static_argnums=0)
    expected = grpo_advantage(REWARDS, 4)
    for result in (static(REWARDS, 4), wrapped(REWARDS), as_argument(GRPOAdvantage(), REWARDS)):
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


def test_other_values_compile_nothing(compilations):
    rewards = [jnp.asarray(REWARDS + k) for k in range(3)]
    keep = jnp.asarray(REWARDS > 0)
    pair, weights = jnp.stack([rewards[0]] * 2, axis=1), jnp.asarray([1.0, 2.0])
    lists = [r.tolist() for r in rewards]

    def calls(k):
        for scale in SCALES:
            grpo_advantage(rewards[k], 4, scale, epsilon=10.0**-k)
            rloo_advantage(rewards[k], 4, scale, where=keep)
            segment_grpo_advantage(rewards[k], IDS, 6, scale)
        grpo_advantage(lists[k], 4)
        grpo_advantage(pair, 4, reward_weights=weights)
        group_statistics(rewards[k], 4)
        GRPOAdvantage()(lists[k], num_generations=4)

    calls(0)
    assert compilations
    compilations.clear()
    calls(1)
    calls(2)
    assert not compilations


def test_rewards_on_a_device_cause_no_transfer():
    rewards, keep = jnp.asarray(REWARDS), jnp.asarray(REWARDS > 0)
    for scale in SCALES:
        grpo_advantage(rewards, 4, scale, where=keep)
    with jax.transfer_guard("disallow"):
        for scale in SCALES:
            grpo_advantage(rewards, 4, scale, where=keep)
        group_statistics(rewards, 4, where=keep)


@pytest.mark.parametrize("scale", SCALES)
def test_lowers_for_every_platform(scale):
    def step(rewards, ids):
        return (
            grpo_advantage(rewards, 4, scale),
            rloo_advantage(rewards, 12, scale, where=ids > 0),
            segment_grpo_advantage(rewards, ids, 6, scale),
            group_statistics(rewards, 4),
        )

    for platform in ("cpu", "cuda", "rocm", "tpu"):
        exported = jax.export.export(jax.jit(step), platforms=[platform])(
            jax.ShapeDtypeStruct((24,), jnp.float32), jax.ShapeDtypeStruct((24,), jnp.int32)
        )
        assert exported.platforms == (platform,)
        assert "callback" not in exported.mlir_module()
