"""How long a step waits for its checkpoint: `pytest tests/benchmarks/test_checkpoint.py -s`.

A state of 100 MB in forty arrays; saves that wait and saves that do not alternate, and medians are
printed. A save that does not wait copies the arrays to the host; on a CPU they are there.
"""

import statistics
import time

import jax
import jax.numpy as jnp

from twinkle_jax.training.checkpoint import RunCheckpoints


def test_a_step_waits_for_a_copy(tmp_path):
    keys = jax.random.split(jax.random.key(0), 40)
    arrays = {f"x{i}": jax.random.normal(key, (2500, 250)) for i, key in enumerate(keys)}
    size = sum(x.nbytes for x in jax.tree.leaves(arrays)) / 1e6
    checkpoints = RunCheckpoints(tmp_path, keep=1)
    waited, copied, written = [], [], []
    for step in range(0, 20, 2):
        start = time.perf_counter()
        checkpoints.save(step, arrays, {})
        waited.append(time.perf_counter() - start)
        arrays = jax.block_until_ready(jax.tree.map(jnp.negative, arrays))
        start = time.perf_counter()
        checkpoints.save(step + 1, arrays, {}, wait=False)
        copied.append(time.perf_counter() - start)
        checkpoints.finish()
        written.append(time.perf_counter() - start)
    seconds = [statistics.median(values) for values in (waited, copied, written)]
    print(
        f"\n{size:.0f} MB: a save takes {seconds[0]:.2f} s; in the background it takes "
        f"{seconds[2]:.2f} s, of which the step waits {seconds[1]:.3f} s"
    )
