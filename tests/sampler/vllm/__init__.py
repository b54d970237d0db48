"""What tests of the sampler on servers share: an actor whose weights change."""

import jax
import jax.numpy as jnp


@jax.jit
def moved(params, by=0.1):
    """Every parameter a little elsewhere."""
    return jax.tree.map(lambda x: x + by * jnp.cos(3 * x), params)


def changed(actor, by=0.1):
    """Move every trained parameter a little."""
    actor.state = actor.state._replace(params=moved(actor.state.params, by))
    return actor
