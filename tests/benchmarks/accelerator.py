"""What a GPU or TPU achieves beside its peaks: the table of docs/benchmarks.md, line by line.

python -m tests.benchmarks.accelerator peaks
python -m tests.benchmarks.accelerator decode Qwen2.5-0.5B 256 1024
python -m tests.benchmarks.accelerator decode Qwen2.5-0.5B 256 1024 xla
python -m tests.benchmarks.accelerator update Qwen2.5-0.5B 16 1024
python -m tests.benchmarks.accelerator update Qwen2.5-0.5B 16 1024 elementwise
python -m tests.benchmarks.accelerator update Qwen3-4B 8 1024 lora

`decode` has rows of geometric lengths with this mean, in room for 8,192 tokens, and times the loop
that draws tokens: weights and filled cache over time and bandwidth. `update` times value, gradient
and AdamW on rows of this length: six operations (four with a frozen base) for each token and entry
of a matrix, and those of causal attention, over time and peak; recomputation, of layers unless
named, does not count.
Parameters are random, in bfloat16 for decoding and adapters, else in float32. The variable
TWINKLE_JAX_PROFILE is how many of the kernels that take longest are printed, too.
"""

import math
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections import Counter
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.compiled.models import config_of
from twinkle_jax.data import Batch
from twinkle_jax.loss import GRPOLoss
from twinkle_jax.model import DecoderConfig, LoraConfig, parameter_shapes
from twinkle_jax.model.decoder import attention as decoder_attention
from twinkle_jax.model.decoder.lora import init_adapter, with_adapter
from twinkle_jax.sampler import Sampling, sizes, slots
from twinkle_jax.sampler.sampling import traced_sampling
from twinkle_jax.training import apply_gradients, grad_step, train_state
from twinkle_jax.training.step import RECOMPUTED

CAPACITY, STEPS, ROUNDS = 8192, 64, 5
PEAKS = {  # by part of the device's name: operations in bfloat16 and bytes a second, as published
    "H100": (989e12, 3.35e12),
    "H200": (989e12, 4.8e12),
    "A100": (312e12, 2.04e12),
    "TPU v5 lite": (197e12, 0.82e12),
    "TPU v5": (459e12, 2.77e12),
    "TPU v6 lite": (918e12, 1.64e12),
}


def peaks_of_device() -> tuple[float, float]:
    """Look up the published peaks of the device."""
    kind = jax.devices()[0].device_kind
    return next((peak for name, peak in PEAKS.items() if name in kind), (math.nan, math.nan))


def random_params(config: DecoderConfig, dtype: Any) -> Any:
    """Make parameters of the usual size, in one compiled program."""

    def make() -> Any:
        shapes, treedef = jax.tree.flatten(parameter_shapes(config))
        keys = jax.random.split(jax.random.key(0), len(shapes))
        leaves = [
            jax.random.normal(key, x.shape, dtype) * 0.02
            if x.ndim > 2
            else jnp.ones(x.shape, dtype)
            for key, x in zip(keys, shapes, strict=True)
        ]
        return jax.tree.unflatten(treedef, leaves)

    params = jax.jit(make)()
    embedding = jax.random.normal(jax.random.key(1), params["embed_tokens"]["embedding"].shape)
    params["embed_tokens"]["embedding"] = (0.02 * embedding).astype(dtype)
    return params


def peaks() -> None:
    """Measure what large copies and products achieve."""
    x = jax.random.normal(jax.random.key(0), (1 << 30,), jnp.bfloat16)
    copy = jax.jit(lambda x: x + 1)
    a = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
    product = jax.jit(lambda a: a @ a * 0.01)
    copied, multiplied = timed(lambda: copy(x)), timed(lambda: product(a))
    print(f"copy {2 * x.nbytes / copied / 1e12:.2f} TB/s, product", end=" ")
    print(f"{2 * 8192**3 / multiplied / 1e12:.0f} TFLOP/s (published: {peaks_of_device()})")


def timed(run: Any, rounds: int = ROUNDS) -> float:
    """Time calls after a warm-up; the median in seconds."""
    jax.block_until_ready(run())
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def decode(model: str, rows: int, mean: int, implementation: str = "") -> None:
    """Time the loop that draws tokens, `STEPS` for each row."""
    config = config_of(model)
    setup = sizes.Setup(config, 1, STEPS, 1, jnp.dtype("bfloat16"), None, None).in_pages(CAPACITY)
    lengths = np.random.default_rng(0).geometric(1 / mean, rows).clip(2, CAPACITY - STEPS - 1)
    size = setup.page or 1
    pages = sizes.pages_for(int(np.sum(-(-(lengths + STEPS) // size))) + 1, rows * CAPACITY // size)
    weights = random_params(config, jnp.bfloat16)
    prompts = jnp.ones((rows, 2), jnp.int32)
    keys = jax.random.split(jax.random.key(0), rows)
    limits = jnp.full(rows, STEPS)

    @jax.jit
    def begin(weights: Any) -> Any:
        mask = jnp.ones_like(prompts, bool)
        options: Any = {"setup": setup, "slots": rows, "capacity": pages}
        return slots.begin(weights, prompts, mask, keys, limits, **options)

    def fill(state: Any) -> Any:
        """Give each row its tokens, with random keys and values."""
        cache = state.slots.cache
        owner = np.repeat(np.arange(rows), -(-lengths // size))
        start = np.concatenate([np.arange(0, length, size) for length in lengths])
        more = (0, pages - len(owner))
        held = cache.pages._replace(
            owner=jnp.asarray(np.pad(owner, more, constant_values=rows), jnp.int32),
            start=jnp.asarray(np.pad(start, more), jnp.int32),
        )
        cache = cache._replace(pages=held, length=jnp.asarray(lengths, jnp.int32))
        fresh = state.slots._replace(
            cache=cache,
            lengths=jnp.zeros(rows, jnp.int32),
            reasons=jnp.zeros(rows, jnp.int32),
            row=jnp.arange(rows, dtype=jnp.int32),
        )
        queue = state.queue._replace(taken=jnp.full_like(state.queue.taken, rows))
        return state._replace(slots=fresh, queue=queue)

    fill = jax.jit(fill, donate_argnums=0)
    sampling = traced_sampling(Sampling(stop_tokens=()))

    def run(weights: Any, state: Any) -> Any:
        options: Any = {"setup": setup, "capacity": pages, "full": CAPACITY, "shrink": False}
        return slots.run(weights, state, sampling, **options)

    assert config.attention.window is None, "the least is worked out for full attention only"
    fits = mock.patch.object(decoder_attention, "_page_kernel_fits", return_value=False)
    with jax.numpy_dtype_promotion("standard"):
        state = [begin(weights)]
        if implementation == "xla":
            fits.start()
        began = time.perf_counter()
        compiled = jax.jit(run, donate_argnums=1).lower(weights, fill(state[0])).compile()
        compile_seconds = time.perf_counter() - began
    state = [jax.tree.map(_random_if_cache, begin(weights))]

    def once_and_time() -> float:
        ready = jax.block_until_ready(fill(state.pop()))
        start = time.perf_counter()
        after, _ = compiled(weights, ready)
        jax.block_until_ready(after)
        seconds = time.perf_counter() - start
        assert np.asarray(after.slots.lengths).min() == STEPS
        state.append(after)
        return seconds

    once_and_time()
    seconds = statistics.median(once_and_time() for _ in range(ROUNDS)) / STEPS
    a = config.attention
    of_weights = sum(x.nbytes for x in jax.tree.leaves(weights))
    filled = 2 * 2 * config.layers * a.key_value_heads * a.head_dim
    filled *= int(lengths.sum()) + rows * STEPS // 2
    least, peak = of_weights + filled, peaks_of_device()[1]
    print(
        f"| {model} | {rows} × {mean} | {implementation or 'default'} | {1e3 * seconds:.2f} "
        f"| {rows / seconds:,.0f} | {least / 2**20:,.0f} | {least / seconds / 1e12:.2f} "
        f"| {least / seconds / peak:.2f} | compiled in {compile_seconds:.0f} s",
        flush=True,
    )
    profiled(once_and_time, STEPS)


def _random_if_cache(x: Any) -> Any:
    if x.ndim != 5 or x.dtype != jnp.bfloat16:
        return x
    return jax.random.normal(jax.random.key(x.shape[1]), x.shape, x.dtype)


def update(model: str, rows: int, length: int, *options: str) -> None:
    """Time one update of whole rows."""
    config, optimizer = config_of(model), optax.adamw(1.0)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (rows, length)).astype(np.int32)
    labels = np.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-100)
    advantages = np.repeat(rng.normal(size=(rows, 1)), length, 1).astype(np.float32)
    old = np.full(tokens.shape, -np.log(config.vocab_size), np.float32)
    batch = jax.device_put(Batch(tokens, labels, advantages=advantages, old_logps=old))
    trained = random_params(config, jnp.bfloat16 if "lora" in options else jnp.float32)
    frozen = None
    if "lora" in options:
        lora = LoraConfig(r=16, lora_alpha=32)
        frozen = with_adapter(trained, config, lora)
        trained = init_adapter(jax.random.key(0), config, lora)
    remat = next((RECOMPUTED[x] for x in options if x in RECOMPUTED), True)
    state = [train_state(trained, optimizer)]
    settings: Any = {"frozen": frozen, "compute_dtype": "bfloat16", "remat": remat}

    def once() -> Any:
        held, summary = grad_step(state.pop(), batch, config, GRPOLoss(), **settings)
        held, _ = apply_gradients(held, optimizer, learning_rate=1e-6, max_grad_norm=1.0)
        state.append(held)
        return held, summary

    began = time.perf_counter()
    _, summary = jax.block_until_ready(once())
    compile_seconds = time.perf_counter() - began
    assert np.isfinite(summary.loss), summary.loss
    seconds = timed(once)
    shapes = parameter_shapes(config)
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    heads = config.attention.query_heads * config.attention.head_dim
    products = (4 if frozen is not None else 6) * (count - looked_up) * rows * length
    attention = 6 * config.layers * heads * length * rows * length
    flops, peak = products + attention, peaks_of_device()[0]
    stats = jax.devices()[0].memory_stats() or {}
    print(
        f"| {model} | {rows} × {length} | {' '.join(options) or 'all'} | {1e3 * seconds:.0f} "
        f"| {rows * length / seconds:,.0f} | {flops / seconds / 1e12:.0f} "
        f"| {flops / seconds / peak:.2f} | {stats.get('peak_bytes_in_use', 0) / 2**30:.1f} GiB "
        f"| compiled in {compile_seconds:.0f} s",
        flush=True,
    )
    profiled(once, 1)


def profiled(run: Any, times: int) -> None:
    """Print the kernels that take longest in one run, if a profile is asked for."""
    count = int(os.environ.get("TWINKLE_JAX_PROFILE", "0"))
    if not count:
        return
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    seconds, calls, spans = Counter[str](), Counter[str](), []
    for plane in data.planes:
        if not plane.name.startswith("/device:"):
            continue
        for line in plane.lines:
            if "Stream" in line.name:
                for event in line.events:
                    seconds[event.name] += event.duration_ns
                    calls[event.name] += 1
                    spans.append((event.start_ns, event.end_ns))
    if not spans:
        print("  no kernels in the profile")
        return
    busy = sum(seconds.values())
    wall = max(end for _, end in spans) - min(start for start, _ in spans)
    print(f"  kernels {busy / times / 1e3:.0f} us of {wall / times / 1e3:.0f} us", end=" ")
    print(f"{sum(calls.values()) / times:.0f} calls a step")
    for name, spent in seconds.most_common(count):
        print(f"  {spent / times / 1e3:9.1f} us {calls[name] / times:7.1f} times  {name[:110]}")


def main(command: str, *arguments: str) -> None:
    """Print one line."""
    numbers = [int(x) if x.isdigit() else x for x in arguments]
    {"peaks": peaks, "decode": decode, "update": update}[command](*numbers)


if __name__ == "__main__":
    main(*sys.argv[1:])
