"""What centred rewards are divided by: the spread of their group, that of the batch, or nothing."""

import jax.numpy as jnp
from jax import Array

from twinkle_jax.advantage.grouping.moments import Moments, moments
from twinkle_jax.advantage.grouping.samples import Samples


def scaled(samples: Samples, own: Moments, centred: Array, epsilon: Array, *, scale: str) -> Array:
    """Divide `centred` `[N]` by a standard deviation plus epsilon; exactly 0 without signal."""
    if scale == "group":
        # A quotient is stored for each group; what a `where` chooses, XLA works out again for each
        # sample, from all of its group.
        factor = 1 / jnp.where(own.has_signal, own.std + epsilon, 1)
        centred = centred * samples.groups.to_samples(factor)
    result = samples.zero_without_signal(own, centred)
    if scale == "batch":
        everyone = moments(samples.values, samples.where, samples.batch)
        # 0 / 0 where epsilon is 0 and nothing in the batch differs is still no signal.
        result = jnp.where(everyone.has_signal, result / (everyone.std + epsilon), 0)
    return result
