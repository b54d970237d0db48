"""What takes time to compile: `pytest tests/benchmarks/test_compile_time.py -s -p no:xdist`.

The layers of a gradient are one loop, so a deep model should compile about as fast as a shallow
one. The programs that draw tokens have the code of filters and of a penalty only if these are in
use. Traced, lowered and compiled anew in every round, rounds interleaved; medians are compared.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import optax
import pytest

from twinkle_jax.data import Batch
from twinkle_jax.loss import GRPOLoss
from twinkle_jax.model import init_params, parse_config
from twinkle_jax.sampler import Sampling, generate
from twinkle_jax.training import grad_step, train_state

DEPTHS, MOST = (4, 24), 1.2
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
}


def seconds_to_compile(depth):
    config = parse_config({**CONFIG, "num_hidden_layers": depth})
    tokens = jnp.ones((8, 48), jnp.int32)
    batch = Batch(tokens, tokens, advantages=tokens * 1.0, old_logps=tokens * -1.0)
    state = train_state(init_params(jax.random.key(0), config), optax.adamw(1e-3))
    jax.block_until_ready(state)
    jax.clear_caches()
    start = time.perf_counter()
    jax.jit(lambda state: grad_step(state, batch, config, GRPOLoss())).lower(state).compile()
    return time.perf_counter() - start


def test_depth(benchmark):
    seconds = {depth: [] for depth in DEPTHS}
    for _ in range(5):
        for depth in DEPTHS:
            seconds[depth].append(seconds_to_compile(depth))
    shallow, deep = (statistics.median(seconds[depth]) for depth in DEPTHS)
    print(f"\n4 layers {shallow:.2f} s, 24 layers {deep:.2f} s: {deep / shallow:.2f} times")
    benchmark.extra_info.update(shallow=shallow, deep=deep)
    assert deep < MOST * shallow
    benchmark.pedantic(seconds_to_compile, args=DEPTHS[1:], rounds=1)


@pytest.mark.parametrize("vocab", [512, 32_768])
def test_filters_of_a_rollout(vocab):
    """In processor time, of all programs of 16 rows of 8 tokens, which take none beside it."""
    config = parse_config({**CONFIG, "num_hidden_layers": 4, "vocab_size": vocab})
    params = init_params(jax.random.key(0), config)
    prompts = jnp.ones((4, 16), jnp.int32)

    def processor_seconds(**restrictions):
        jax.clear_caches()
        start = time.process_time()
        drawn = generate(
            params, config, prompts, None, jax.random.key(1), Sampling(**restrictions),
            num_samples=4, max_new_tokens=8,
        )  # fmt: skip
        jax.block_until_ready(drawn)
        return time.process_time() - start

    cases = [{}, {"top_p": 0.9}, {"repetition_penalty": 1.1}]
    rounds = [[processor_seconds(**case) for case in cases] for _ in range(5)]
    print(f"\nvocabulary {vocab}")
    for case, seconds in zip(cases, zip(*rounds, strict=True), strict=True):
        print(f"| {case or 'neither'} | {statistics.median(seconds):.2f} s |")
