"""How fast GAE is: `pytest tests/benchmarks/test_gae.py` (extras benchmark, oracle).

64 sequences of 4,096 tokens, a tenth of them masked. Beside the parallel scan stand the same
recursion as a Python loop over time in PyTorch, one step per token, as Twinkle computes it, and as
`jax.lax.scan` over time. The rounds are interleaved, because a shared machine changes its speed
from minute to minute; what is printed is medians, and what the two scans take to compile.
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax.advantage import discounted_returns, gae_advantage

torch = pytest.importorskip("torch", reason="pip install 'twinkle-jax[test,oracle,benchmark]'")
BATCH, TIME = 64, 4096
GAMMA, TRACE_DECAY = 1.0, 0.95
ROUNDS, SLOW_ROUNDS = 30, 5


def _data():
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, BATCH, TIME)).astype(np.float32)
    return rewards, values, rng.uniform(size=(BATCH, TIME)) < 0.9


def _step_by_step(rewards, values, mask):
    """GAE as a loop over tokens in eager PyTorch, normalised over what is kept."""
    advantages = torch.zeros_like(rewards)
    carried = torch.zeros(len(rewards))
    ahead = torch.zeros(len(rewards))
    for t in range(rewards.shape[1] - 1, -1, -1):
        keep = mask[:, t]
        error = rewards[:, t] + GAMMA * ahead - values[:, t]
        carried = torch.where(keep, error + GAMMA * TRACE_DECAY * carried, carried)
        ahead = torch.where(keep, values[:, t], ahead)
        advantages[:, t] = torch.where(keep, carried, 0.0)
    returns = torch.where(mask, advantages + values, 0.0)
    kept = advantages[mask]
    scores = (advantages - kept.mean()) / (kept.std(correction=0) + 1e-8)
    return torch.where(mask, scores, 0.0), returns


@jax.jit
def _sequential(rewards, values, mask):
    """The same with `jax.lax.scan` over time."""

    def step(state, now):
        carried, ahead = state
        reward, value, keep = now
        error = reward + GAMMA * ahead - value
        advantage = error + GAMMA * TRACE_DECAY * carried
        state = jnp.where(keep, advantage, carried), jnp.where(keep, value, ahead)
        return state, jnp.where(keep, advantage, 0)

    start = jnp.zeros(len(rewards)), jnp.zeros(len(rewards))
    _, advantages = jax.lax.scan(step, start, (rewards.T, values.T, mask.T), reverse=True)
    advantages = advantages.T
    returns = jnp.where(mask, advantages + values, 0)
    mean = jnp.mean(advantages, where=mask)
    std = jnp.std(advantages, where=mask)
    return jnp.where(mask, (advantages - mean) / (std + 1e-8), 0), returns


def _interleave(contestants):
    """Median seconds per call of each contestant."""
    seconds = {name: [] for name in contestants}
    for call, _ in contestants.values():
        call()
    for round_ in range(ROUNDS):
        for name, (call, rounds) in contestants.items():
            if round_ < rounds:
                start = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _seconds_to_compile(function, *arguments):
    jax.clear_caches()
    start = time.perf_counter()
    jax.jit(function).lower(*arguments).compile()
    return time.perf_counter() - start


def test_gae(benchmark):
    host = _data()
    tensors = [torch.from_numpy(x) for x in host]
    rewards, values, mask = map(jnp.asarray, host)

    @jax.jit
    def plain(rewards, values, mask):
        return gae_advantage(rewards, values, where=mask, normalize=False)

    ours = functools.partial(gae_advantage, rewards, values, where=mask)
    for one, other in zip(ours(), _step_by_step(*tensors), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    for one, other in zip(ours(), _sequential(rewards, values, mask), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)

    def ready(call):
        return lambda: jax.block_until_ready(call())

    medians = _interleave(
        {
            "gae_advantage": (ready(ours), ROUNDS),
            "... not normalised": (ready(lambda: plain(rewards, values, mask)), ROUNDS),
            "... nothing masked": (ready(lambda: gae_advantage(rewards, values)), ROUNDS),
            "discounted_returns": (ready(lambda: discounted_returns(rewards)), ROUNDS),
            "lax.scan over time": (ready(lambda: _sequential(rewards, values, mask)), ROUNDS),
            "PyTorch, a loop": (lambda: _step_by_step(*tensors), SLOW_ROUNDS),
        }
    )
    print(f"\n[{BATCH}, {TIME}] on {jax.devices()[0].device_kind}")
    for name, median in medians.items():
        ratio = median / medians["gae_advantage"]
        print(f"  {name:<22}{median * 1e3:>10.2f} ms  {ratio:>7.2f} x ours")
    compiled = {
        "gae_advantage": _seconds_to_compile(
            lambda r, v, m: gae_advantage(r, v, where=m), rewards, values, mask
        ),
        "... nothing masked": _seconds_to_compile(gae_advantage, rewards, values),
        "lax.scan over time": _seconds_to_compile(_sequential, rewards, values, mask),
    }
    for name, seconds in compiled.items():
        print(f"  {name:<22}{seconds:>10.2f} s to compile")
    benchmark.extra_info.update(medians)
    assert medians["PyTorch, a loop"] > 10 * medians["gae_advantage"]
    benchmark(ready(ours))
