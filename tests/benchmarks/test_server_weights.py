"""What it takes to write a policy's weights for a vLLM server, as a run does in each step.

`python -m pytest tests/benchmarks/test_server_weights.py -s -p no:xdist`. A random Qwen2.5-0.5B in
float32 is written in bfloat16, for a server and as a checkpoint that is kept; 5 GiB of memory, 3 of
disk, one minute.
"""

import statistics
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from tests.compiled.models import MODELS
from twinkle_jax.model import Decoder, init_params, parse_config, save_pretrained
from twinkle_jax.sampler.vllm_weights import save_for_server


def test_weights_for_a_server(tmp_path):
    config = parse_config(MODELS["Qwen2.5-0.5B"])
    params = jax.block_until_ready(init_params(jax.random.key(0), config))
    dtype = jnp.dtype("bfloat16")
    actor = SimpleNamespace(config=config, params=params, source=None, dtype=dtype)
    contestants = {
        "for a server": lambda: save_for_server(actor, tmp_path / "server"),
        "to keep": lambda: save_pretrained(Decoder(config, params), tmp_path / "kept", dtype=dtype),
    }
    times = {name: [] for name in contestants}
    for _ in range(6):
        for name, save in contestants.items():
            start = time.perf_counter(), time.process_time()
            save()
            times[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    for name, rounds in times.items():
        wall, cpu = (statistics.median(x) for x in zip(*rounds[1:], strict=True))
        print(f"\n{name}: {wall:.2f} s, {cpu:.2f} s of processor time")
