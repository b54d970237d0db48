"""Memory and time of `token_logprobs` against all logits at once, in JAX and in PyTorch.

    python -m pytest --noconftest -o addopts= -s tests/benchmarks/test_token_logprobs.py

`--noconftest` leaves out the strict settings of the tests, and their CPU where there is a GPU.
Rounds of all functions take turns, so that a busy machine slows every one of them alike.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from twinkle_jax.loss import token_logprobs

ON_CPU = jax.default_backend() == "cpu"
SMALL = (512, 256, 32_768, "float32") if ON_CPU else (4096, 1024, 151_936, "bfloat16")
LARGE = (4096, 1024, 151_936)
ROUNDS = 15


def log_softmax(hidden, head, tokens):
    logits = jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=1)[:, 0]


def logsumexp(hidden, head, tokens):
    logits = jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=1)


def in_chunks_of(size):
    return lambda hidden, head, tokens: token_logprobs(hidden, head, tokens, chunk_size=size)


def half_masked(hidden, head, tokens):
    return token_logprobs(hidden, head, tokens, mask=jnp.arange(len(tokens)) % 2 == 0)


def with_entropy(hidden, head, tokens):
    return sum(token_logprobs(hidden, head, tokens, with_entropy=True))


def gradient(function):
    """Value and gradients of a weighted sum of scores."""

    def loss(hidden, head, tokens, weights):
        return jnp.sum(function(hidden, head, tokens) * weights)

    return jax.jit(jax.value_and_grad(loss, (0, 1)))


def torch_gradient(compile_it):
    def score(hidden, head, tokens):
        return torch.log_softmax((hidden @ head).float(), -1).gather(1, tokens[:, None])[:, 0]

    score = torch.compile(score) if compile_it else score

    def run(hidden, head, tokens, weights):
        hidden.grad = head.grad = None
        loss = (score(hidden, head, tokens) * weights).sum()
        loss.backward()
        if not ON_CPU:
            torch.cuda.synchronize()
        return loss.detach(), (hidden.grad, head.grad)

    return run


def arguments(time_steps, feature, vocab, dtype):
    draw = np.random.default_rng(0)
    hidden = jnp.asarray(draw.normal(size=(time_steps, feature)), dtype)
    head = jnp.asarray(draw.normal(size=(feature, vocab)) / feature**0.5, dtype)
    tokens = jnp.asarray(draw.integers(vocab, size=time_steps), jnp.int32)
    ours = (hidden, head, tokens, jnp.asarray(draw.normal(size=time_steps), jnp.float32))
    device, kind = "cpu" if ON_CPU else "cuda", getattr(torch, dtype)

    def tensor(array, dtype):
        return torch.tensor(np.asarray(array, np.float32), dtype=dtype, device=device)

    theirs = (
        tensor(hidden, kind).requires_grad_(),
        tensor(head, kind).requires_grad_(),
        torch.tensor(np.asarray(tokens), dtype=torch.int64, device=device),
        tensor(ours[3], torch.float32),
    )
    return ours, theirs


def take_turns(runs):
    """Median seconds of each run, and the median over rounds of its ratio to the first."""
    seconds = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            time.sleep(0.05)  # let the threads of the one before go to sleep
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    first = next(iter(seconds.values()))
    return {
        name: (
            statistics.median(times),
            statistics.median(one / other for one, other in zip(times, first, strict=True)),
        )
        for name, times in seconds.items()
    }


def assert_same_gradients(actual, expected):
    tolerance = 1e-5 if SMALL[3] == "float32" else 1e-2
    for one, other in zip(actual, expected, strict=True):
        one = one if isinstance(one, jax.Array) else one.float().cpu()
        difference = np.asarray(one, np.float32) - np.asarray(other, np.float32)
        assert np.abs(difference).max() <= tolerance * np.abs(np.asarray(other, np.float32)).max()


# PyTorch's compiler warns about PyTorch.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_time(benchmark):
    ours, theirs = arguments(*SMALL)
    functions = {
        "log_softmax": log_softmax,
        "logsumexp": logsumexp,
        "token_logprobs": token_logprobs,
        "token_logprobs, 256 a chunk": in_chunks_of(256),
        "token_logprobs, 64 a chunk": in_chunks_of(64),
        "token_logprobs, half masked": half_masked,
        "token_logprobs with entropy": with_entropy,
    }
    compiled = {name: gradient(function) for name, function in functions.items()}
    runs = {
        name: lambda run=run: jax.block_until_ready(run(*ours)) for name, run in compiled.items()
    }
    eager, inductor = torch_gradient(compile_it=False), torch_gradient(compile_it=True)
    runs["PyTorch, eager"] = lambda: eager(*theirs)
    runs["PyTorch, compiled"] = lambda: inductor(*theirs)
    results = {name: run() for name, run in runs.items()}
    for name in ("token_logprobs", "PyTorch, eager", "PyTorch, compiled"):
        assert_same_gradients(results[name][1], results["log_softmax"][1])
    table = take_turns(runs)
    for name, (seconds, ratio) in table.items():
        print(f"| {name} | {1e3 * seconds:.0f} ms | {ratio:.2f} |")
    benchmark.extra_info.update(size=SMALL, rounds=ROUNDS, medians_and_ratios=table)
    benchmark.pedantic(runs["token_logprobs"], rounds=3)
    assert table["token_logprobs"][1] <= 1.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_temporary_memory(benchmark, dtype):
    time_steps, feature, vocab = LARGE
    shape = jax.ShapeDtypeStruct

    def compile_for(function, tied=False):
        head = (vocab, feature) if tied else (feature, vocab)
        orient = (lambda h, w, *x: function(h, w.T, *x)) if tied else function
        program = gradient(orient).lower(
            shape((time_steps, feature), dtype),
            shape(head, dtype),
            shape((time_steps,), jnp.int32),
            shape((time_steps,), jnp.float32),
        )
        return program.compile().memory_analysis().temp_size_in_bytes / 2**20

    ours = benchmark.pedantic(compile_for, args=(token_logprobs,), rounds=1)
    sizes = {
        "log_softmax": compile_for(log_softmax),
        "logsumexp": compile_for(logsumexp),
        "token_logprobs": ours,
        "token_logprobs, tied": compile_for(token_logprobs, tied=True),
        "token_logprobs with entropy": compile_for(with_entropy),
    }
    for name, size in sizes.items():
        print(f"| {name}, {dtype} | {size:.0f} MiB | {size / sizes['log_softmax']:.3f} |")
    benchmark.extra_info.update(size=LARGE, mebibytes=sizes)
    if dtype == "float32":
        assert ours <= sizes["log_softmax"] / 8


@pytest.mark.parametrize("spread", [False, True])
def test_masked_tokens_cost_nothing(spread):
    tokens, feature, vocab = 2048, 128, 2048
    draw = np.random.default_rng(0)
    hidden = draw.normal(size=(tokens, feature)).astype(np.float32)
    head = draw.normal(size=(feature, vocab)).astype(np.float32)
    names = jnp.zeros(tokens, jnp.int32)

    @jax.jit
    def gradient(hidden, head, mask):
        def score(hidden, head):
            return jnp.sum(token_logprobs(hidden, head, names, mask=mask, chunk_size=64))

        return jax.grad(score, (0, 1))(hidden, head)

    def seconds(mask):
        jax.block_until_ready(gradient(hidden, head, mask))
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            jax.block_until_ready(gradient(hidden, head, mask))
            times.append(time.perf_counter() - begin)
        return min(times)

    position = np.arange(tokens)
    few = position % 32 == 5 if spread else position < 64
    # One chunk of the 32: measured between a tenth and a twentieth of the time.
    assert seconds(few) < seconds(np.ones(tokens, bool)) / 4
