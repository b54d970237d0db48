"""What a batch says of the policies that have seen it, before anything is learnt from it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from twinkle_jax.data import Batch
from twinkle_jax.data.trajectory import IGNORE
from twinkle_jax.loss import kl_k3


@jax.jit
def rollout_facts(batch: Batch) -> dict[str, Float[Array, ""]]:
    """Estimate entropy, and divergence from the reference policy if there is one, from samples."""
    assert batch.old_logps is not None
    kept = batch.labels != IGNORE
    tokens = jnp.maximum(jnp.sum(kept, dtype=jnp.float32), 1)
    facts = {"entropy": -jnp.sum(jnp.where(kept, batch.old_logps, 0)) / tokens}
    if batch.ref_logps is not None:
        divergence = kl_k3(batch.old_logps, batch.ref_logps, kept)
        facts["kl"] = jnp.sum(jnp.where(kept, divergence, 0)) / tokens
    return facts


@jax.jit
def largest_difference(logps: Float[Array, "rows time"], batch: Batch) -> Float[Array, ""]:
    """Compare the log-probabilities of all labels with those in a batch."""
    assert batch.old_logps is not None
    return jnp.max(jnp.where(batch.labels != IGNORE, jnp.abs(logps - batch.old_logps), 0))
