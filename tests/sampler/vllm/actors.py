"""Actors whose weights change, and how far what a server said is from what they say."""

import jax
import jax.numpy as jnp
import numpy as np


def changed(actor, by=0.1):
    """Move every trained parameter a little."""
    params = jax.tree.map(lambda x: x + jnp.float32(by) * jnp.cos(3 * x), actor.state.params)
    actor.state = actor.state._replace(params=params)
    return actor


def gap(response, actor):
    """The largest difference between what server and actor say of what was drawn."""
    scored = actor.forward_only(inputs=response.inputs)["logps"]
    sequences = [seq for one in response for seq in one.sequences]
    return max(
        np.abs(row[np.flatnonzero(f["labels"] != -100)] - [x[0][1] for x in seq.logprobs]).max()
        for f, row, seq in zip(response.inputs, scored, sequences, strict=True)
    )
