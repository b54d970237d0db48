"""Every estimator over many shapes against float64, compiled as users do.

Compilers get single shapes wrong. XLA of jaxlib 0.11.1 to 0.12.0.1 took columns of [P, K] rewards
with components for one another on CPUs, from K = 7 on, where a fast path of ours asked for them;
jax 0.10.2 miscompiles a matrix-vector product under `vmap` at 32,769 rows (jax issue 39103). So
shapes are many here, and what is compared is whole arrays. Rewards are multiples of 1/64, whose
sums are exact: what differs is wrong.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.advantage import sweep_reference as reference
from tests.advantage.cases import CASES
from twinkle_jax import advantage

COUNTS = (97, 4096, 8192, 12_000, 40_000, 600_000)
MASKS = ("none", "samples", "cells")
SCALES = ("none", "group", "batch")
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


def _sweep(name, cases, expected, *, segments=False, setting=None, data=()):
    """Compare one function over `cases`, each with K = case + 2 (mod 63)."""
    function = getattr(advantage, f"{'segment_' * segments}{name}_advantage")
    for case in cases:
        size = SIZES[case % 63]
        rewards, where, weights, lengths = _draw(case, size)
        rows, ragged = _ids(len(rewards), size)
        ids = ragged if segments else rows
        setting_now = setting(size) if callable(setting) else setting or {}
        host = {"lengths": lengths, "greedy_rewards": _greedy(rewards, size)}
        more = setting_now | {key: jnp.asarray(host[key]) for key in data}
        values, mask, scale_by = _device(rewards, where, weights)
        groups = (jnp.asarray(ids), int(ids.max()) + 1) if segments else (size,)
        names = ("segment_ids", "num_segments") if segments else ("num_generations",)
        more |= dict(zip(names, groups, strict=True))
        result = function(values, where=mask, reward_weights=scale_by, **more)
        wanted = expected(rewards, weights, where, ids, host | setting_now)
        _check(result, wanted, f"{name}, {setting_now}, K = {size}, {rewards.shape}")
        jax.clear_caches()


def _greedy(rewards, size):
    return rewards[::size] / 2


def _summed(formula, data=()):
    """A reference of combined rewards."""

    def expected(rewards, weights, where, ids, given):
        values, keep = reference.combine(rewards, weights, where)
        return formula(values, ids, keep, **{key: given[key] for key in data})

    return expected


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_components_of_a_larger_batch(name):
    rewards = np.random.default_rng(0).integers(0, 2, (4096, 2)).astype(np.float32)
    result = getattr(advantage, f"{name}_advantage")(jnp.asarray(rewards), 8, "none")
    expected = reference.group_relative("none", name == "rloo")
    everyone = np.ones(4096, bool)
    _check(result, expected(rewards.sum(axis=1), np.arange(4096) // 8, everyone), name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_group_relative(name, scale):
    expected = _summed(reference.group_relative(scale, name == "rloo"))
    start = SCALES.index(scale)
    _sweep(name, range(start, 63, 3), expected, setting={"scale": scale})
    _sweep(name, range(70 + start, 88, 3), expected, setting={"scale": scale}, segments=True)


# GRPO, RLOO, pass@k, PKPO, GDPO and ReMax have tests of their own.
FAMILY = {
    case.name: (case.sweep, case.data)
    for case in CASES.values()
    if case.sweep is not None and not case.settings
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAMILY)
def test_family(name):
    formula, data = FAMILY[name]
    _sweep(name, range(5, 68, 5), _summed(formula, data), data=data)
    if f"segment_{name}_advantage" in advantage.__all__:
        _sweep(name, range(80, 85), _summed(formula, data), data=data, segments=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["pass_at_k", "pkpo"])
def test_subsets(name):
    baselines = ("mean", "leave_one_out", "leave_one_out_minus_one") if name == "pkpo" else (None,)
    for start, baseline in enumerate(baselines):
        fixed = {} if baseline is None else {"baseline": baseline}
        formula = functools.partial(getattr(reference, name), **fixed)
        step = 5 * len(baselines)
        _sweep(
            name,
            range(6 + start, 68, step),
            _summed(formula, ("k",)),
            setting=lambda size, fixed=fixed: {"k": max(2, size // 2 - 1), **fixed},
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("segments", [False, True])
def test_gdpo(segments):
    def expected(rewards, weights, where, ids, given):
        del given
        if rewards.ndim == 1:
            rewards = rewards[:, None]
        cells = np.ones(len(rewards), bool) if where is None else where
        cells = np.broadcast_to(cells.reshape(len(rewards), -1), rewards.shape)
        weights = np.ones(rewards.shape[1]) if weights is None else weights
        return reference.gdpo(rewards.astype(np.float64), ids, cells, weights=weights)

    _sweep("gdpo", range(5, 10) if segments else range(5, 68, 5), expected, segments=segments)


@pytest.mark.exhaustive
def test_remax():
    def expected(rewards, weights, where, ids, given):
        values, keep = reference.combine(rewards, weights, where)
        greedy, _ = reference.combine(given["greedy_rewards"], weights, None)
        return reference.remax(values, ids, keep, greedy=greedy)

    _sweep("remax", range(5, 68, 5), expected, data=("greedy_rewards",))


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 8])
def test_statistics(size):
    for case in range(12):
        rewards, where, weights, _ = _draw(case, size)
        values, keep = reference.combine(rewards, weights, where)
        groups = reference.Groups(np.arange(len(values)) // size, keep)
        arguments = _device(rewards, where, weights)
        rewards, where, weights = arguments
        found = advantage.group_statistics(rewards, size, where=where, reward_weights=weights)
        _check(found.mean, groups.mean(values)[::size], f"mean of {case}")
        _check(found.std, groups.std(values)[::size], f"standard deviation of {case}")
        np.testing.assert_array_equal(found.count, groups.count[::size])


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
        found = advantage.gae_advantage(*tokens, normalize=normalize, **settings)
        wanted = reference.whiten(expected, keep, 0) if normalize else expected
        _check(found.advantages, wanted, f"GAE, {rewards.shape}, {normalize=}")
        _check(found.returns, targets, f"returns of GAE, {rewards.shape}")
    found = advantage.discounted_returns(tokens[0], **settings)
    _check(found, reference.returns(rewards, keep, 0.99, last), f"returns, {rewards.shape}")
    found = advantage.reinforce_plus_plus_advantage(tokens[0], where=where, gamma=0.99)
    ahead = reference.returns(rewards, keep, 0.99, np.zeros(rows))
    _check(found, reference.whiten(ahead, keep, 1), f"REINFORCE++, {rewards.shape}")


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
        found = mapped(jnp.asarray(rewards), jnp.asarray(weights))
        ids = np.arange(count) // size
        for row in range(2):
            values, keep = reference.combine(rewards[row], weights, None)
            if name == "gdpo":
                cells = np.ones(rewards[row].shape, bool)
                wanted = reference.gdpo(
                    rewards[row].astype(np.float64), ids, cells, weights=weights
                )
            elif name in FAMILY:
                wanted = FAMILY[name][0](values, ids, keep)
            else:
                wanted = reference.group_relative("group", name == "rloo")(values, ids, keep)
            _check(found[row], wanted, f"{name} under vmap, {components} components")
