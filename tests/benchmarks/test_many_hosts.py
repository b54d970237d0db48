"""What a second process costs: `pytest tests/benchmarks/test_many_hosts.py -s -p no:xdist`.

Steps of the command with the built-in policy, 512 completions a step and four updates, by two
processes of four CPU devices and by one of eight; runs alternate, and medians are printed. Beside
them the floor: the transfers between devices that a step's programs hold, those while tokens are
drawn left out, alone, as often as the step makes them, on the same two processes. On CPUs these are
made by gloo over sockets.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.compiled.costs import arrays, element_bytes, visit
from tests.compiled.program import read_program
from tests.training.joined_runs import JoinedRun, free_port
from twinkle_jax.training import (
    EvaluationConfig,
    LoggingConfig,
    MeshConfig,
    RolloutConfig,
    TrainConfig,
)

STEPS, ROUNDS, WARM_UP = 8, 2, 3
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
PROGRAMS = {  # of a step but for drawing, and how often it runs there
    "jit_lay_out_weights": 1,
    "jit_on_all_devices": 1,
    "jit__take_rows": 4,
    "jit__grad_step": 4,
    "jit__apply": 4,
    "jit_rollout_facts": 1,
}


def run_once(folder, mesh, processes, number, dump=None):
    """Seconds of each step after the first few."""
    config = TrainConfig(
        output_dir=str(folder / f"{processes}.{number}"),
        steps=STEPS,
        warm_start=0.0,
        rollout=RolloutConfig(prompts=64, num_samples=8),
        evaluation=EvaluationConfig(every=0),
        logging=LoggingConfig(checkpoint_every=99, samples_every=0),
        mesh=mesh,
    )
    variables = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    if dump is not None:
        variables |= {"XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text"}
        variables |= {"JAX_ENABLE_COMPILATION_CACHE": "0"}
    everywhere = dict.fromkeys(range(processes), variables)
    options = {"processes": processes, "devices": 8 // processes, "variables": everywhere}
    with JoinedRun(folder, config, **options) as run:
        assert run.wait() == [0] * processes, run.errors(0)
    lines = (Path(config.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step_time"] for line in lines[WARM_UP:]]


def transfers(dump):
    """Collectives of a step as (bytes of its result, times); gloo makes one an array."""
    messages = []
    for program, calls in PROGRAMS.items():
        texts = sorted(Path(dump).glob(f"*.{program}.*after_optimizations.txt"))
        for _, one, times in visit(read_program(texts[-1].read_text()), 1):
            if one.opcode in KINDS:
                sizes = [element_bytes(kind) * math.prod(x) for kind, x in arrays(one.shape)]
                sizes = [sum(sizes)] if one.opcode == "all-to-all" else sizes
                messages += [(size, times * calls) for size in sizes]
    return messages


def time_collectives(counts):
    """Seconds that such sums take, one after the other, in programs of a hundred."""
    import jax
    import jax.numpy as jnp

    mesh = jax.make_mesh((jax.device_count(),), ("devices",))
    total = 0.0
    for size, times in counts:
        shape = (jax.device_count(), max(int(size) // 4, 1))
        spread = jax.NamedSharding(mesh, jax.P("devices"))
        x = jax.jit(lambda shape=shape: jnp.ones(shape), out_shardings=spread)()

        @jax.jit
        @partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=jax.P("devices"),
            out_specs=jax.P("devices"),
            check_vma=False,  # a mean is the same on all
        )
        def add_up(x):
            return jax.lax.fori_loop(0, 100, lambda _, x: jax.lax.pmean(x, "devices"), x)

        jax.block_until_ready(add_up(x))
        start = time.perf_counter()
        jax.block_until_ready(add_up(x))
        total += (time.perf_counter() - start) / 100 * times
    return total


def floor(folder, counts, processes):
    """Seconds of the collectives alone."""
    port, started = free_port(), []
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(8 // processes)}
    for number in range(processes):
        command = [sys.executable, "-m", "tests.benchmarks.test_many_hosts"]
        command += [str(port), str(processes), str(number), json.dumps(counts)]
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in started]
    return float(outputs[0].split()[-1])


@pytest.mark.parametrize("mesh", [MeshConfig(fsdp=8), MeshConfig(data=8)], ids=["fsdp", "data"])
def test_a_step_on_two_processes(tmp_path, mesh):
    seconds = {1: [], 2: []}
    for number in range(ROUNDS):
        for processes, values in seconds.items():
            values += run_once(tmp_path, mesh, processes, number)
    one, two = (statistics.median(values) for values in seconds.values())
    run_once(tmp_path, mesh, 1, "dumped", dump=tmp_path / "dump")
    every = transfers(tmp_path / "dump")
    counts = {}
    for size, times in every:  # to the next power of two, so that few are compiled
        rounded = 1 << max(int(size) - 1, 3).bit_length()
        counts[rounded] = counts.get(rounded, 0) + times
    print(
        f"\nmesh {mesh}: a step takes {two:.2f} s on two processes, {one:.2f} s on one: "
        f"{two / one:.2f} times; it makes {sum(counts.values())} collectives of "
        f"{sum(s * n for s, n in every) / 2**20:.1f} MiB"
    )
    for processes in (1, 2):
        alone = floor(tmp_path, list(counts.items()), processes)
        print(f"  sums of these sizes alone, {processes} process(es): {alone:.2f} s")


if __name__ == "__main__":
    import jax

    where, total, rank, sizes = sys.argv[1:]
    jax.distributed.initialize(f"localhost:{where}", int(total), int(rank))
    print(time_collectives(json.loads(sizes)))
