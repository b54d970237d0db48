"""What it saves that keys and values stay between turns.

`python -m pytest tests/benchmarks/test_turns.py -s -p no:xdist`. A random Qwen3, 4 layers, width
128: 64 conversations of 6 turns, prompts of 100 tokens, up to 32 tokens a turn (16 of the 512
tokens end it) and observations of 48. A minute.
"""

import statistics
import time

import jax
import numpy as np

from twinkle_jax.model import init_params, parse_config
from twinkle_jax.rollout import LocalEngine, RolloutConfig

ROWS, TURNS, NEW, ROUNDS = 64, 6, 32, 4
STOPS = list(range(16))


def test_turns():
    config = parse_config({
        "model_type": "qwen3", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    })  # fmt: skip
    params = init_params(jax.random.key(0), config)

    def play(slots):
        generator = np.random.default_rng(0)

        def shown(count):
            return generator.integers(16, 512, count).tolist()

        engine = LocalEngine(config, None, stop_tokens=STOPS)
        settings = RolloutConfig(max_new_tokens=NEW, slots=slots, max_episode_tokens=1024)
        turns = engine.converse(params, ROWS, settings)
        rows = {i: shown(100) for i in range(ROWS)}
        for turn in range(TURNS):
            keys = jax.random.split(jax.random.key(turn), ROWS)
            drawn = turns.go_on(rows, keys, dict.fromkeys(rows, NEW))
            for i in rows:
                rows[i] += drawn.tokens[i, : drawn.lengths[i]].tolist() + shown(48)
        return sum(map(len, rows.values()))

    seconds = {"kept": [], "read again": []}
    for turn in range(ROUNDS + 1):  # the first compiles
        for name, slots in (("kept", None), ("read again", ROWS - 1)):
            began = time.perf_counter()
            tokens = play(slots)
            if turn:
                seconds[name].append(time.perf_counter() - began)
    kept, again = (statistics.median(x) for x in seconds.values())
    print(f"\n{tokens} tokens: kept {kept:.2f} s, read again {again:.2f} s, {again / kept:.2f}")
    assert kept < again
