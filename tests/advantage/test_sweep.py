"""Every estimator over many shapes against float64, compiled as users do.

Compilers get single shapes wrong. XLA of jaxlib 0.11.1 to 0.12.0.1 took columns of [P, K] rewards
with components for one another on CPUs, from K = 7 on, where a fast path of ours asked for them;
jax 0.10.2 miscompiles a matrix-vector product under `vmap` at 32,769 rows (jax issue 39103). So
shapes are many here, and what is compared is whole arrays. Rewards are multiples of 1/64, whose
sums are exact: what differs is wrong.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.advantage import reference
from tests.advantage.cases import CASES, SEGMENTS
from twinkle_jax import advantage

COUNTS = (97, 4096, 8192, 12_000, 40_000, 600_000)
MASKS = ("none", "samples", "cells")
SIZES = range(2, 65)
WEIGHTS = np.float32([1, 0.5, 2, 0.25, 4])


def _draw(case, size):
    """Rewards `[N, C]` (`[N]` for C = 0), mask, weights and lengths: a kind of batch a case."""
    rng = np.random.default_rng(case)
    components, mask = int(rng.integers(0, 6)), str(rng.choice(MASKS))
    count = max(1, int(rng.choice(COUNTS, p=(0.1, 0.3, 0.2, 0.2, 0.1, 0.1))) // size) * size
    shape = (count, components) if components else (count,)
    rewards = (rng.integers(0, 256, shape) / 64).astype(np.float32)
    rewards[: 2 * size] = 0.25  # without signal
    where = None if mask == "none" else rng.uniform(size=shape[:1]) < 0.8
    if mask == "cells":
        where = rng.uniform(size=shape) < 0.8
    weights = WEIGHTS[:components] if components and rng.uniform() < 0.5 else None
    return rewards, where, weights, rng.integers(0, 30, count)


def _check(result, expected, case):
    expected = np.asarray(expected)
    bound = 2e-5 * max(1.0, np.abs(expected).max())
    wrong = ~(np.abs(np.asarray(result, np.float64) - expected) <= bound)
    assert not wrong.any(), f"{case}: {wrong.sum()} of {wrong.size} are wrong"


def _device(*arrays):
    return (None if array is None else jnp.asarray(array) for array in arrays)


def _ids(count, size):
    """Rows of `size`, and as many segments of other sizes in another order."""
    rng = np.random.default_rng(count)
    return np.arange(count) // size, rng.integers(0, count // size, count)


def _expected(label, rewards, weights, where, ids, more):
    case = CASES[label]
    if case.name == "gdpo":  # keeps components apart
        cells = np.ones(len(rewards), bool) if where is None else where
        return reference.gdpo(rewards, ids, cells, weights=weights)
    values, keep = reference.combine(rewards, weights, where)
    if "greedy_rewards" in more:
        greedy, _ = reference.combine(more["greedy_rewards"], weights, None)
        more = more | {"greedy_rewards": greedy}
    return case.expected(values, ids, keep, **more)


def _sweep(label, cases, *, segments=False):
    """Compare one estimator over `cases`, each with K = case + 2 (mod 63)."""
    case = CASES[label]
    for number in cases:
        size = SIZES[number % 63]
        rewards, where, weights, lengths = _draw(number, size)
        rows, ragged = _ids(len(rewards), size)
        ids = ragged if segments else rows
        host = {"lengths": lengths, "greedy_rewards": rewards[::size] / 2}
        more = {key: host[key] for key in case.data}
        if "k" in case.settings:
            more["k"] = max(1, size // 2 - 1) + ("minus one" in label)
        call, groups = case.function, {"num_generations": size}
        if segments:
            call = case.segment_function
            groups = {"segment_ids": jnp.asarray(ids), "num_segments": int(ids.max()) + 1}
        values, mask, scale_by, *data = _device(rewards, where, weights, *more.values())
        settings = {**case.settings, **dict(zip(more, data, strict=True)), **groups}
        result = call(values, where=mask, reward_weights=scale_by, **settings)
        expected = _expected(label, rewards, weights, where, ids, more)
        _check(result, expected, f"{label}, K = {size}, {rewards.shape}")
        jax.clear_caches()


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_components_of_a_larger_batch(name):
    rewards = np.random.default_rng(0).integers(0, 2, (4096, 2)).astype(np.float32)
    result = getattr(advantage, f"{name}_advantage")(jnp.asarray(rewards), 8, "none")
    expected = CASES[f"{name}, none"].expected
    _check(result, expected(rewards.sum(axis=1), np.arange(4096) // 8, np.ones(4096, bool)), name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("half", ["first half", "second half"])
@pytest.mark.parametrize("label", CASES)
def test_rows(label, half):
    """A quarter of all K for each estimator: `.ci/run` takes one half of it, `.ci/further` both.

    So two or three estimators meet each K in `.ci/run`, of one shape each.
    """
    start = list(CASES).index(label) + (4 if half == "second half" else 0)
    _sweep(label, range(start % 8, 63, 8))


@pytest.mark.exhaustive
@pytest.mark.parametrize("label", SEGMENTS)
def test_segments(label):
    start = 70 + list(CASES).index(label)
    _sweep(label, range(start, start + 18, 3), segments=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 8])
def test_statistics(size):
    for case in range(12):
        rewards, where, weights, _ = _draw(case, size)
        values, keep = reference.combine(rewards, weights, where)
        groups = reference.Groups(np.arange(len(values)) // size, keep)
        rewards, where, weights = _device(rewards, where, weights)
        result = advantage.group_statistics(rewards, size, where=where, reward_weights=weights)
        _check(result.mean, groups.mean(values)[::size], f"mean of {case}")
        _check(result.std, groups.std(values)[::size], f"standard deviation of {case}")
        np.testing.assert_array_equal(result.count, groups.count[::size])


@pytest.mark.exhaustive
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 64, 65, 100, 512, 513, 4097])
def test_over_time(length, masked):
    rng = np.random.default_rng(length)
    rows = max(3, 65_536 // length)
    rewards, values = (rng.integers(-64, 64, (2, rows, length)) / 64).astype(np.float32)
    last = (rng.integers(-64, 64, rows) / 64).astype(np.float32)
    keep = rng.uniform(size=rewards.shape) < (0.8 if masked else 2)
    tokens = jnp.asarray(rewards), jnp.asarray(values)
    where = jnp.asarray(keep) if masked else None
    settings = {"where": where, "gamma": 0.99, "bootstrap_values": jnp.asarray(last)}
    expected, targets = reference.gae(rewards, values, keep, 0.99, 0.95, last)
    for normalize in (False, True):
        result = advantage.gae_advantage(*tokens, normalize=normalize, **settings)
        whitened = reference.whiten(expected, keep, 0) if normalize else expected
        _check(result.advantages, whitened, f"GAE, {rewards.shape}, {normalize=}")
        _check(result.returns, targets, f"returns of GAE, {rewards.shape}")
    result = advantage.discounted_returns(tokens[0], **settings)
    _check(result, reference.returns(rewards, keep, 0.99, last), f"returns, {rewards.shape}")
    result = advantage.reinforce_plus_plus_advantage(tokens[0], where=where, gamma=0.99)
    ahead = reference.returns(rewards, keep, 0.99, np.zeros(rows))
    _check(result, reference.whiten(ahead, keep, 1), f"REINFORCE++, {rewards.shape}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl", "dgpo", "gdpo"])
def test_weighted_components_under_vmap(name):
    """32,769 rows of components times weights, mapped: what jax 0.10.2 gets wrong elsewhere."""
    count, size = 32_769, 3
    rng = np.random.default_rng(0)
    for components in (2, 4, 5):
        rewards = (rng.integers(0, 256, (2, count, components)) / 64).astype(np.float32)
        weights = WEIGHTS[:components]
        function = getattr(advantage, f"{name}_advantage")
        mapped = jax.jit(
            jax.vmap(lambda r, w, f=function: f(r, size, reward_weights=w), in_axes=(0, None))
        )
        result = mapped(jnp.asarray(rewards), jnp.asarray(weights))
        ids = np.arange(count) // size
        for row in range(2):
            label = next(label for label, case in CASES.items() if case.name == name)
            expected = _expected(label, rewards[row], weights, None, ids, {})
            _check(result[row], expected, f"{name} under vmap, {components} components")
