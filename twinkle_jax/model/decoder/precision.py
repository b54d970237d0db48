"""bfloat16 is bfloat16 on a CPU, and float32 is float32 on GPUs and TPUs.

XLA has no bfloat16 arithmetic on a CPU: it computes in float32 and rounds in between. Its fusions
(YNNPACK's) drop some of these roundings, depending on the shapes. A token would then get other
log-probabilities in whole rows (the trainer) than in a decoding step (the sampler). `rounded`,
`multiply` and `matmul` make the compiler round where the program says so, and `mean_square` adds
in one order.

By default JAX lets GPUs round the factors of float32 products to TensorFloat-32, and TPUs to
bfloat16. Within `tracing_for` they are not rounded, see `product_precision`.

In other types and on other backends nothing here adds an instruction. The backend is known while
tracing: that of the mesh, or JAX's default.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from twinkle_jax.loss.token_logprobs import product_precision

_backend: ContextVar[str | None] = ContextVar("backend", default=None)


@contextmanager
def tracing_for(backend: str, dtype: DTypeLike, mesh: Mesh | None) -> Iterator[None]:
    """Trace products of a type for devices that need not be JAX's default ones.

    Raises:
        TypeError: if it is not a floating-point type.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"compute_dtype must be a floating-point type, got {jnp.dtype(dtype)}")
    token = _backend.set(backend)
    device = None if mesh is None else mesh.devices.flat[0]
    try:
        with jax.default_matmul_precision(product_precision(dtype, device)):
            yield
    finally:
        _backend.reset(token)


def same_tracing() -> Callable[[], AbstractContextManager[None]]:
    """Return a context that traces as here: for the gradient of a function, traced later."""
    backend = _backend.get()
    precision: Any = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]

    @contextmanager
    def context() -> Iterator[None]:
        token = _backend.set(backend)
        try:
            with jax.default_matmul_precision(precision):
                yield
        finally:
            _backend.reset(token)

    return context


def traced_backend() -> str:
    """Return the backend that is traced for."""
    return _backend.get() or jax.default_backend()


def exact_product(x: Float[Array, "*rows into"], y: Float[Array, "into out"]) -> Array:
    """Multiply arrays of one type into float32, without rounding float32 factors."""
    precision = product_precision(x.dtype)
    return jnp.matmul(x, y, precision=precision, preferred_element_type=jnp.float32)


def rounded(x: Float[Array, "*shape"], dtype: DTypeLike | None = None) -> Float[Array, "*shape"]:
    """Cast to `dtype`, by default x's own, such that no fusion drops the rounding."""
    x = x if dtype is None else x.astype(dtype)
    return _through_bits(x) if _rounds_in_software(x) else x


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def spread(
    weights: Float[Array, "*some"], shape: tuple[int, ...], dtype: DTypeLike
) -> Float[Array, "*shape"]:
    """Round weights to `dtype` and repeat them for all rows; gradients are summed in float32.

    Without this a GPU sums the gradient of a bias or of a norm over all tokens in 16 bits.
    """
    return jnp.broadcast_to(rounded(weights, dtype), shape)


@spread.defjvp
def _(
    shape: tuple[int, ...], dtype: DTypeLike, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    change = jnp.broadcast_to(tangents[0].astype(wide), shape)
    return spread(*primals, shape, dtype), change.astype(dtype)


def multiply(product: Callable[..., Array], x: Array, y: Array) -> Array:
    """Apply a product, such as `jnp.matmul`, to arrays of one type; round the result to that type.

    With a float32 result, XLA sums bfloat16 products on a CPU in the same order for any number of
    rows. With a bfloat16 result it converts the factors to float32, and the order depends on the
    number of rows.
    """
    if _rounds_in_software(x):
        return rounded(_summed_in_float32(product, x, y))
    return product(x, y)


def matmul(
    x: Float[Array, "rows into"], matrix: Float[Array, "into out"]
) -> Float[Array, "rows out"]:
    """Multiply rows by a matrix, which is rounded to their type first."""
    return multiply(jnp.matmul, x, rounded(matrix, x.dtype))


def mean_square(x: Float[Array, "*batch width"]) -> Float[Array, "*batch 1"]:
    """Average the squares of each row's entries in float32.

    A CPU's order of additions in a reduction depends on the number of rows. Where a result rounded
    to bfloat16 follows, halves are added to each other here: the same order for any number.
    """
    squares = jnp.square(x.astype(jnp.float32))
    if not _rounds_in_software(x):
        return jnp.mean(squares, axis=-1, keepdims=True)
    return _sum_of_halves(squares) / x.shape[-1]


@jax.custom_jvp
def _sum_of_halves(x: Float[Array, "*batch width"]) -> Float[Array, "*batch 1"]:
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        rest = x[..., 2 * half :]
        x = x[..., :half] + x[..., half : 2 * half]
        x = jnp.concatenate([x, rest], axis=-1) if rest.shape[-1] else x
    return x


@_sum_of_halves.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _sum_of_halves(*primals), jnp.sum(tangents[0], axis=-1, keepdims=True)


def _rounds_in_software(x: Array) -> bool:
    return x.dtype == jnp.bfloat16 and traced_backend() == "cpu"


@jax.custom_jvp
def _through_bits(x: Array) -> Array:
    """Return x by way of its bits as integers: a cast that the compiler cannot optimise away."""
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
    """Differentiate the plain product: products of gradients are computed in bfloat16."""
    (x, y), (dx, dy) = primals, tangents
    value = product(x, y, preferred_element_type=jnp.float32).astype(x.dtype)
    return value, product(dx, y) + product(x, dy)
