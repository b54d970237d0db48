"""A recurrence that runs backwards over time, as a parallel scan, with masked steps left out."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

BLOCK = 8
"""Steps that are walked one after the other."""


def discounted_sum(
    inputs: Array, decay: Array, keep: Array | None, last: Array | None = None
) -> Array:
    r"""Solve $h_t = x_t + d\, h_{next(t)}$, from the end, over the steps that are kept.

    A step is the map $h \mapsto x_t + d h$, and maps compose associatively: eight steps in a row
    are one map as well. So time is cut into blocks of eight, the blocks, an eighth as many steps,
    are solved in the same way, and each block is then walked from what comes after it. Blocks do
    not wait for each other, so the number of steps in a row grows with the logarithm of the time.
    A step that is masked is the identity, and so repeats what comes after it.

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
    return _solve(slopes, inputs, last)


def _solve(slopes: Array, inputs: Array, last: Array | None) -> Array:
    *batch, time = inputs.shape
    if time <= BLOCK:
        walked = _walk(jnp.unstack(slopes, axis=-1), jnp.unstack(inputs, axis=-1), last)
        return jnp.stack(walked, axis=-1) if time else inputs

    def blocks(steps: Array, identity: int) -> tuple[Array, ...]:
        """The first step of every block, the second, ...; what is missing at the end is added."""
        padding = [(0, 0)] * len(batch) + [(0, -time % BLOCK)]
        steps = jnp.pad(steps, padding, constant_values=identity)
        return jnp.unstack(steps.reshape(*batch, steps.shape[-1] // BLOCK, BLOCK), axis=-1)

    slopes_in, inputs_in = blocks(slopes, 1), blocks(inputs, 0)
    from_zero = _walk(slopes_in, inputs_in, None)[0]
    firsts = _solve(functools.reduce(jnp.multiply, slopes_in), from_zero, last)
    end = jnp.zeros_like(firsts[..., :1]) if last is None else last[..., None]
    after = jnp.concatenate([firsts[..., 1:], end], axis=-1)
    steps = jnp.stack(_walk(slopes_in, inputs_in, after), axis=-1)
    return steps.reshape(*batch, steps.shape[-2] * BLOCK)[..., :time]


def _walk(slopes: Sequence[Array], inputs: Sequence[Array], after: Array | None) -> list[Array]:
    """Take steps one after the other, from the last: what stands after each, in order of time."""
    reached = []
    for slope, step in zip(reversed(slopes), reversed(inputs), strict=True):
        after = step if after is None else step + slope * after
        reached.append(after)
    return reached[::-1]
