"""Saves checkpoints of one step after another until it is killed; what each holds is known."""

import sys

import jax
import jax.numpy as jnp


def state(step):
    """What the checkpoint of a step holds."""
    key = jax.random.key(step)
    return {"weights": jax.random.bits(key, (300, 200)), "key": key, "count": jnp.int32(step)}


if __name__ == "__main__":
    from twinkle_jax.training.checkpoint import RunCheckpoints

    checkpoints = RunCheckpoints(sys.argv[1], keep=2)
    for step in range(1, 10_000):
        checkpoints.save(step, state(step), {"step": step})
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()
