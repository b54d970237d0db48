"""All estimators as parts of a program: jit, vmap, scan, and how often it compiles."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from tests.advantage.cases import CASES, COUNT, DATA, IDS, LENGTHS, PROMPTS, ROWS, SEGMENTS, SIZE
from twinkle_jax.advantage import (
    GRPOAdvantage,
    broadcast_to_tokens,
    dynamic_sampling_filter,
    gae_advantage,
    group_statistics,
    grpo_advantage,
    kl_in_token_reward,
    opo_advantage,
    reinforce_plus_plus_advantage,
)

BATCHES = np.random.default_rng(0).uniform(size=(3, COUNT)).astype(np.float32)
KEEP = np.random.default_rng(1).uniform(size=(3, COUNT)) < 0.8


# One that sorts, one with statistics of the batch, one with components, one with data of its own.
FIRST = ("mc_grpo", "grpo, batch", "gdpo", "opo")


@pytest.mark.parametrize(
    "name",
    [*FIRST, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ROWS if n not in FIRST)],
)
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


@pytest.mark.exhaustive
def test_other_values_compile_and_transfer_nothing(compilations):
    rewards = [jnp.asarray(row) for row in BATCHES]
    tokens = [jnp.asarray(row.reshape(PROMPTS, SIZE)) for row in BATCHES]
    on_device, ids = {key: jnp.asarray(value) for key, value in DATA.items()}, jnp.asarray(IDS)
    keep = jnp.asarray(KEEP[0])
    pair, weights = jnp.stack([rewards[0]] * 2, axis=1), jnp.asarray([1.0, 2.0])

    def calls(i):
        for name, estimator in ROWS.items():
            more = {key: on_device[key] for key in CASES[name].data}
            estimator(rewards[i], where=None, **more)
        for name in ("maxrl", "grpo, batch", "rloo, none"):
            SEGMENTS[name](rewards[i], ids, PROMPTS, where=None)
        ROWS["grpo, batch"](rewards[i], where=keep)
        ROWS["grpo, group"](pair, where=None, reward_weights=weights)
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
    for i in range(3):
        ROWS["rloo, group"](BATCHES[i].tolist(), where=None)
    compilations.clear()
    for epsilon in (1e-3, 1e-2):
        ROWS["rloo, group"](BATCHES[0].tolist(), where=None, epsilon=epsilon)
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
            group_statistics(rewards, SIZE),
            broadcast_to_tokens(advantages[0], mask),
        )

    shapes = (COUNT,), (COUNT, 5)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    platforms = ("cpu", "cuda", "rocm", "tpu")
    exported = jax.export.export(jax.jit(step), platforms=platforms)(*arguments)
    assert exported.platforms == platforms
    assert "callback" not in exported.mlir_module()


@pytest.mark.exhaustive
def test_without_jit():
    for name, estimator in ROWS.items():
        compiled = estimator(BATCHES[0], where=KEEP[0])
        with jax.disable_jit():
            plain = estimator(BATCHES[0], where=KEEP[0])
        np.testing.assert_allclose(plain, compiled, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.exhaustive
def test_inside_scan_and_remat():
    batches = jnp.asarray(BATCHES)

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
    expected = grpo_advantage(BATCHES[0], 4)
    for result in (
        static(BATCHES[0], 4),
        wrapped(BATCHES[0]),
        as_argument(GRPOAdvantage(), BATCHES[0]),
    ):
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)
