"""A recurrence that runs backwards over time, as a parallel scan, with masked steps left out."""

import jax
import jax.numpy as jnp
from jax import Array


def discounted_sum(
    inputs: Array, decay: Array, keep: Array | None, last: Array | None = None
) -> Array:
    r"""Solve $h_t = x_t + d\, h_{next(t)}$, from the end, over the steps that are kept.

    A step is the map $h \mapsto x_t + d h$; maps compose associatively, so all of them are found
    in a number of parallel steps that grows with the logarithm of the time. A step that is masked
    is the identity, and so repeats what comes after it.

    Args:
        inputs: $x$, `[..., time]`; finite where masked.
        decay: $d$, a scalar.
        keep: True where a step counts, or None for all.
        last: what comes after the last step, `[...]`; 0 by default.

    Returns:
        $h$, `[..., time]`.
    """
    slopes = jnp.broadcast_to(decay.astype(inputs.dtype), inputs.shape)
    if keep is not None:
        slopes = jnp.where(keep, slopes, 1)
        inputs = jnp.where(keep, inputs, 0)

    def compose(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
        return earlier[0] * later[0], earlier[1] + earlier[0] * later[1]

    axis = inputs.ndim - 1
    slopes, sums = jax.lax.associative_scan(compose, (slopes, inputs), reverse=True, axis=axis)
    return sums if last is None else sums + slopes * last[..., None]
