"""bfloat16 on a CPU: every rounding takes place, and products sum in one order.

XLA has no bfloat16 arithmetic on a CPU: it computes in float32, and rounds in between. Its fusions
(YNNPACK's) drop some of these roundings, and which ones depends on shapes. A token then gets other
log-probabilities in whole rows, as the trainer reads them, than in a decoding step, as the sampler
does. The functions here have the compiler round where the program says so. On other backends,
and in other types, they add no instruction.

Whether a program is for a CPU is known where it is traced: from the mesh, or from JAX's default
backend.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

_backend: ContextVar[str | None] = ContextVar("backend", default=None)


@contextmanager
def tracing_for(backend: str) -> Iterator[None]:
    """Trace for a backend that need not be JAX's default one."""
    token = _backend.set(backend)
    try:
        yield
    finally:
        _backend.reset(token)


def rounded(x: Float[Array, "*shape"], dtype: DTypeLike | None = None) -> Float[Array, "*shape"]:
    """Cast to a type, by default the one that x has, so that no fusion drops the rounding."""
    x = x if dtype is None else x.astype(dtype)
    return _through_bits(x) if _rounds_in_software(x) else x


def multiply(product: Callable[..., Array], x: Array, y: Array) -> Array:
    """Take a product, such as `jnp.matmul`, of two arrays of one type, and round it to this type.

    In bfloat16 the CPU's compiler sums products of bfloat16 in the same order for any number of
    rows if the result is to be float32, and else converts factors to float32, whose order depends
    on it.
    """
    if _rounds_in_software(x):
        return rounded(_summed_in_float32(product, x, y))
    return product(x, y)


def matmul(
    x: Float[Array, "rows into"], matrix: Float[Array, "into out"]
) -> Float[Array, "rows out"]:
    """Multiply rows by a matrix, which is rounded to their type first."""
    return multiply(jnp.matmul, x, rounded(matrix, x.dtype))


def _rounds_in_software(x: Array) -> bool:
    return x.dtype == jnp.bfloat16 and (_backend.get() or jax.default_backend()) == "cpu"


@jax.custom_jvp
def _through_bits(x: Array) -> Array:
    """Give x as it is, as integers in between: the compiler does not see that nothing happens."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(x.dtype)


@_through_bits.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _through_bits(*primals), tangents[0]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _summed_in_float32(product: Callable[..., Array], x: Array, y: Array) -> Array:
    return product(x, y, preferred_element_type=jnp.float32).astype(x.dtype)


@_summed_in_float32.defjvp
def _(
    product: Callable[..., Array], primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Differentiate as without the detour: products of gradients are of bfloat16."""
    (x, y), (dx, dy) = primals, tangents
    value = product(x, y, preferred_element_type=jnp.float32).astype(x.dtype)
    return value, product(dx, y) + product(x, dy)
