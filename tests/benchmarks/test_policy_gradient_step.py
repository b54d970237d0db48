"""What the example's step costs, and how much of it is the advantage.

`pytest tests/benchmarks/test_policy_gradient_step.py` (extras benchmark, examples).
"""

import statistics
import time
from functools import partial

import jax
import pytest
from flax import nnx

from tests.examples import load

example = load("policy_gradient")


def make_run(estimator, scale):
    return example.Run(
        graph=nnx.graphdef(nnx.eval_shape(lambda: example.Policy(nnx.Rngs(0)))),
        mesh=jax.make_mesh((1,), ("data",), (example.AxisType.Auto,), devices=jax.devices()[:1]),
        estimator=estimator,
        scale=scale,
        prompts=64,
        generations=8,
    )


def advantage_share(estimator, scale, rounds=15, repeats=100):
    """Seconds of the whole step, seconds of its advantage, and their ratio.

    The advantage is compiled alone and so pays for being called, which inside the step it does
    not: the share is an upper bound. The rounds alternate, since a shared machine changes speed.
    """
    run = make_run(estimator, scale)
    params = example.initial_params(jax.random.key(0))
    state = example.begin(params, jax.random.key(1), run=run)
    state, rollout = example.train_step(state, run=run)
    alone = jax.jit(partial(estimator, num_generations=run.generations, scale=scale))
    alone(rollout.rewards).block_until_ready()
    steps, advantages = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        state, rollout = jax.block_until_ready(example.train_step(state, run=run))
        middle = time.perf_counter()
        for _ in range(repeats):
            alone(rollout.rewards).block_until_ready()
        steps.append(middle - start)
        advantages.append((time.perf_counter() - middle) / repeats)
    step, advantage = statistics.median(steps), statistics.median(advantages)
    return step, advantage, advantage / step


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_advantage_share(benchmark, estimator, scale):
    step, advantage, share = advantage_share(example.ESTIMATORS[estimator], scale)
    print(f"\n{estimator} {scale}: {step * 1e3:.1f} ms, {advantage * 1e6:.0f} us, {share:.2%}")
    benchmark.extra_info.update(step=step, advantage=advantage, share=share)
    rewards = jax.random.bernoulli(jax.random.key(2), 0.5, (512,)).astype("float32")
    alone = jax.jit(partial(example.ESTIMATORS[estimator], num_generations=8, scale=scale))
    benchmark(lambda: alone(rewards).block_until_ready())
    assert share <= 0.02
