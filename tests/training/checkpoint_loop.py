"""Saves checkpoints of one step after another until it is killed; what each holds is known.

Prints each step that is saved. With `background` the next step does not wait for that.
"""

import sys

import jax
import jax.numpy as jnp


def state(step):
    """What the checkpoint of a step holds."""
    key = jax.random.key(step)
    return {"weights": jax.random.bits(key, (300, 200)), "key": key, "count": jnp.int32(step)}


if __name__ == "__main__":
    from twinkle_jax.training.checkpoint import RunCheckpoints

    checkpoints, wait = RunCheckpoints(sys.argv[1], keep=2), sys.argv[2] != "background"
    for step in range(1, 10_000):
        checkpoints.save(step, state(step), {"step": step}, wait=wait)
        sys.stdout.write(f"{step if wait else step - 1}\n")
        sys.stdout.flush()
