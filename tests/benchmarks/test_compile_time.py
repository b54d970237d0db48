"""How compile time grows with depth: `pytest tests/benchmarks/test_compile_time.py -s -p no:xdist`.

The layers are one loop, so a deep model should compile about as fast as a shallow one. Traced,
lowered and compiled anew in every round, rounds interleaved; the median of each depth is compared.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import optax

from twinkle_jax.data import Batch
from twinkle_jax.loss import GRPOLoss
from twinkle_jax.model import init_params, parse_config
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
