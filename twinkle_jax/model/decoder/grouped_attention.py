"""Attention for CPUs: a group's queries in one product, and a gradient written by hand.

On a CPU, moving small arrays costs as much as multiplying them. XLA's own implementation takes the
groups one by one and turns logits and probabilities to and fro, more so in its gradient. Here they
are laid out once, `[batch * group, query, source]`, and every product reads its factors as they
lie; the two that need a transposed one get a copy of it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

ByGroup = Float[Array, "groups rows width"]
Visible = Bool[Array, "#groups rows source"]
_MASKED = -1e30
_KEYS, _VALUES = (((2,), (2,)), ((0,), (0,))), (((2,), (1,)), ((0,), (0,)))


def grouped_attention(
    query: Float[Array, "batch time heads width"],
    key: Float[Array, "batch source groups width"],
    value: Float[Array, "batch source groups width"],
    visible: Bool[Array, "#batch 1 time source"],
) -> Float[Array, "batch time heads width"]:
    r"""Compute $\operatorname{softmax}(Q K^\top / \sqrt{d}) V$ over what is visible.

    Logits and softmax are float32 at least. Every query must see something. There is no `jvp`.
    """
    batch, time, heads, width = query.shape
    groups = key.shape[2]
    by_group = visible if len(visible) == 1 else jnp.repeat(visible, groups, axis=0)
    queries = query.reshape(batch, time, groups, -1, width).transpose(0, 2, 3, 1, 4)
    attended = _attend(
        queries.reshape(batch * groups, -1, width),
        key.swapaxes(1, 2).reshape(batch * groups, -1, width),
        value.swapaxes(1, 2).reshape(batch * groups, -1, width),
        jnp.tile(by_group[:, 0], (1, heads // groups, 1)),
    )
    by_time = attended.reshape(batch, groups, -1, time, width).transpose(0, 3, 1, 2, 4)
    return by_time.reshape(batch, time, heads, width)


@jax.custom_vjp
def _attend(query: ByGroup, key: ByGroup, value: ByGroup, visible: Visible) -> ByGroup:
    return _forward(query, key, value, visible)[0]


def _forward(
    query: ByGroup, key: ByGroup, value: ByGroup, visible: Visible
) -> tuple[ByGroup, tuple[Array, ...]]:
    logits = _product(query, key, _KEYS) * query.shape[-1] ** -0.5
    logits = jnp.where(visible, logits, _MASKED)
    exps = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    inverse = 1 / jnp.sum(exps, axis=-1, keepdims=True)
    attended = _product(exps.astype(value.dtype), value, _VALUES) * inverse
    return attended.astype(query.dtype), (query, key, value, exps, inverse)


def _backward(residuals: tuple[Array, ...], d_attended: ByGroup) -> tuple[Array | None, ...]:
    query, key, value, exps, inverse = residuals
    dtype = query.dtype
    # exps * inverse are the probabilities; the factor is taken where it is of a smaller array.
    scaled = d_attended.astype(exps.dtype) * inverse
    d_exps = _product(scaled.astype(dtype), value, _KEYS)
    # The mean could be had from what was attended to, but not with the same rounding.
    mean = jnp.sum(exps * d_exps, axis=-1, keepdims=True) * inverse
    d_logits = exps * (d_exps - mean)
    d_logits = (d_logits * query.shape[-1] ** -0.5).astype(dtype)
    return (
        _product(d_logits, key, _VALUES).astype(dtype),
        _product(_turned(d_logits), query, _VALUES).astype(dtype),
        _product(_turned(exps.astype(dtype)), scaled.astype(dtype), _VALUES).astype(dtype),
        None,
    )


_attend.defvjp(_forward, _backward)


def _turned(x: ByGroup) -> ByGroup:
    # XLA would take a transposition back into the product, where it costs more than by itself.
    return jax.lax.optimization_barrier(x.swapaxes(1, 2))


def _product(left: ByGroup, right: ByGroup, dimensions: jax.lax.DotDimensionNumbers) -> ByGroup:
    widest = jnp.float64 if left.dtype == jnp.float64 else jnp.float32
    return jax.lax.dot_general(left, right, dimensions, preferred_element_type=widest)
