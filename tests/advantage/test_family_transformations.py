"""The family as parts of a program: jit, vmap, scan, and how often it compiles."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from tests.advantage.family import COUNT, IDS, LENGTHS, PROMPTS, ROWS, SEGMENTS, SIZE
from twinkle_jax.advantage import (
    broadcast_to_tokens,
    dynamic_sampling_filter,
    gae_advantage,
    group_statistics,
    kl_in_token_reward,
    opo_advantage,
    reinforce_plus_plus_advantage,
)

BATCHES = np.random.default_rng(0).uniform(size=(3, COUNT)).astype(np.float32)
KEEP = np.random.default_rng(1).uniform(size=(3, COUNT)) < 0.8


@pytest.mark.parametrize("name", ROWS)
def test_jit_and_vmap(name):
    @jax.jit
    def run(batches, keep):
        return jax.vmap(lambda r, k: ROWS[name](r, where=k))(batches, keep)

    mapped = run(BATCHES, KEEP)
    for row in range(3):
        alone = ROWS[name](BATCHES[row], where=KEEP[row])
        np.testing.assert_allclose(mapped[row], alone, rtol=1e-5, atol=1e-6)


def test_vmap_over_data():
    lengths = np.stack([LENGTHS, LENGTHS[::-1], LENGTHS + 5])
    mapped = jax.vmap(lambda r, n: opo_advantage(r, n, SIZE))(BATCHES, lengths)
    for row in range(3):
        alone = opo_advantage(BATCHES[row], lengths[row], SIZE)
        np.testing.assert_allclose(mapped[row], alone, rtol=1e-5, atol=1e-6)


def test_other_values_compile_and_transfer_nothing(compilations):
    rewards = [jnp.asarray(row) for row in BATCHES]
    tokens = [jnp.asarray(row.reshape(PROMPTS, SIZE)) for row in BATCHES]
    lengths, ids, greedy = jnp.asarray(LENGTHS), jnp.asarray(IDS), jnp.zeros(PROMPTS)

    def calls(i):
        for name, estimator in ROWS.items():
            more = {"greedy_rewards": greedy} if name == "remax" else {}
            more |= {"lengths": lengths} if name in ("opo", "reinforce++") else {}
            estimator(rewards[i], where=None, **more)
        SEGMENTS["maxrl"](rewards[i], ids, PROMPTS, where=None)
        gae_advantage(tokens[i], tokens[i - 1])
        reinforce_plus_plus_advantage(tokens[i])
        dynamic_sampling_filter(group_statistics(rewards[i], SIZE), SIZE)

    calls(0)
    assert compilations
    compilations.clear()
    with jax.transfer_guard("disallow"):
        calls(1)
        calls(2)
    assert not compilations
    for epsilon in (1e-3, 1e-2):
        ROWS["maxrl"](rewards[0], where=None, epsilon=epsilon)
        gae_advantage(tokens[0], tokens[1], gamma=1 - epsilon, gae_lambda=epsilon)
    assert not compilations


def test_lowers_for_every_platform():
    def step(rewards, tokens):
        mask = tokens > 0
        advantages = [estimator(rewards, where=rewards > 0.1) for estimator in ROWS.values()]
        advantages += [
            estimator(rewards, IDS, PROMPTS, where=None) for estimator in SEGMENTS.values()
        ]
        earned = kl_in_token_reward(rewards, tokens, mask, coefficient=0.1)
        return (
            advantages,
            gae_advantage(earned, tokens, where=mask),
            reinforce_plus_plus_advantage(earned, where=mask),
            broadcast_to_tokens(advantages[0], mask),
        )

    shapes = (COUNT,), (COUNT, 5)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    for platform in ("cpu", "cuda", "tpu"):
        exported = jax.export.export(jax.jit(step), platforms=[platform])(*arguments)
        assert exported.platforms == (platform,)
        assert "callback" not in exported.mlir_module()
