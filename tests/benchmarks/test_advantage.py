"""How fast advantages are: `pytest tests/benchmarks/test_advantage.py` (extras benchmark, oracle).

Beside each measurement stand the same formula in eager PyTorch and, for arrays, one elementwise
pass (`x + 1`), which reads and writes the same bytes and so is the floor. The rounds of all
contestants are interleaved, because a shared machine changes its speed from minute to minute; the
table that is printed holds medians and their ratio to ours.
"""

import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax import GRPOAdvantage, grpo_advantage, rloo_advantage

torch = pytest.importorskip("torch", reason="pip install 'twinkle-jax[test,oracle,benchmark]'")
K = 8


def _eager(rewards):
    """Group-relative advantages in eager PyTorch, from a list or a tensor."""
    grid = torch.as_tensor(rewards, dtype=torch.float32).view(-1, K)
    centred = grid - grid.mean(dim=1, keepdim=True)
    return (centred / (grid.std(dim=1, keepdim=True) + 1e-8)).view(-1)


def _interleave(contestants, rounds, repeats):
    """Median seconds per call of each contestant."""
    seconds = {name: [] for name in contestants}
    for call in contestants.values():
        call(), call()
    for _ in range(rounds):
        for name, call in contestants.items():
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            seconds[name].append((time.perf_counter() - start) / repeats)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _report(title, medians, ours):
    print(f"\n{title}")
    for name, median in medians.items():
        print(f"  {name:<24}{median * 1e6:>12.1f} us  {median / medians[ours]:>6.2f} x ours")


@pytest.fixture
def other_programs():
    """Two processes that keep two cores busy."""
    spin = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(spin) for _ in range(2)]
    yield
    for process in running:
        process.kill()
        process.wait()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_list_of_64_rewards(benchmark, busy, request):
    if busy:
        request.getfixturevalue("other_programs")
    plus_one = jax.jit(lambda x: x + 1)
    array = np.zeros(64, np.float32)
    rewards = [float(i % 3) for i in range(64)]
    wrapper = GRPOAdvantage()
    medians = _interleave(
        {
            "grpo_advantage": lambda: grpo_advantage(rewards, K),
            "GRPOAdvantage()": lambda: wrapper(rewards, num_generations=K),
            "x + 1, from an array": lambda: plus_one(array),
            "PyTorch, eager": lambda: _eager(rewards),
        },
        rounds=200,
        repeats=50,
    )
    title = f"a Python list of 64 rewards, checks included, {'busy' if busy else 'idle'} cores"
    _report(title, medians, "grpo_advantage")
    benchmark.extra_info.update(medians)
    benchmark(lambda: grpo_advantage(rewards, K).block_until_ready())


@pytest.mark.parametrize("size", [2**20, 2**24])
def test_arrays(benchmark, size):
    host = np.random.default_rng(0).normal(size=size).astype(np.float32)
    rewards, tensor = jnp.asarray(host), torch.from_numpy(host)
    plus_one = jax.jit(lambda x: x + 1)
    medians = _interleave(
        {
            "grpo, group": lambda: grpo_advantage(rewards, K).block_until_ready(),
            "rloo, group": lambda: rloo_advantage(rewards, K).block_until_ready(),
            "grpo, none": lambda: grpo_advantage(rewards, K, "none").block_until_ready(),
            "grpo, batch": lambda: grpo_advantage(rewards, K, "batch").block_until_ready(),
            "x + 1": lambda: plus_one(rewards).block_until_ready(),
            "PyTorch, eager": lambda: _eager(tensor),
        },
        rounds=15,
        repeats=1,
    )
    _report(f"{size} rewards on the device, K = {K}", medians, "grpo, group")
    benchmark.extra_info.update(medians)
    benchmark(lambda: grpo_advantage(rewards, K).block_until_ready())
