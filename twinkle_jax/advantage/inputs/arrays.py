"""Turn whatever callers hold numbers in into arrays; refuse what would silently go wrong.

A JAX array stays where it is and is not read back. Everything else becomes a NumPy array, whose
NaN and infinities can be seen, and are refused.
"""

import sys
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np


class TorchTensor(Protocol):
    """A PyTorch tensor, told without importing PyTorch."""

    def detach(self) -> Any:
        """Leave the graph of gradients."""

    def cpu(self) -> Any:
        """Move to the host."""


class HoldsArray(Protocol):
    """A container of a JAX array, such as an NNX variable."""

    def __jax_array__(self) -> jax.Array:
        """Return the array."""


HostOrDevice = jax.Array | np.ndarray[Any, np.dtype[Any]]
ArrayLike = HostOrDevice | Sequence[Any] | np.generic | float | TorchTensor | HoldsArray
"""Numbers, or the booleans of a mask: an array, a tracer, a tensor, or lists of these."""
Scalar = float | jax.Array | np.ndarray[Any, np.dtype[Any]] | np.number[Any]
"""A coefficient: a Python number, or a scalar array, which may be traced."""

_NARROW, _WIDE = jnp.dtype(jnp.float32), jnp.dtype(jnp.float64)


def compute_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Float64 stays; float16, bfloat16, integers and booleans are computed in float32."""
    return _WIDE if dtype == _WIDE else _NARROW


def common_dtype(*arrays: HostOrDevice | None) -> jnp.dtype:
    """Float64 if any of them is, else float32."""
    wide = any(array is not None and array.dtype == _WIDE for array in arrays)
    return _WIDE if wide else _NARROW


def describe(value: Any) -> str:
    """Say what arrived, shortly."""
    if isinstance(value, jax.core.Tracer):
        return f"a traced array ({jax.typeof(value)})"
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array ({value.dtype}{list(value.shape)})"
    return f"{type(value).__name__} {value!r}"


def as_array(name: str, value: Any) -> HostOrDevice:
    """Convert without a transfer: JAX arrays stay on the device, everything else on the host."""
    if isinstance(value, list | tuple):
        return _sequence(name, value)
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{name} must not be a NumPy masked array, whose mask would be dropped, got one: pass "
            f"{name}.filled(0) and where=~numpy.ma.getmaskarray({name})"
        )
    if isinstance(value, np.ndarray | jax.Array):
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        narrow = value.dtype in (torch.bfloat16, torch.float16)
        tensor: np.ndarray[Any, np.dtype[Any]] = (value.float() if narrow else value).numpy()
        return tensor
    if hasattr(value, "__jax_array__"):
        return jnp.asarray(value)
    if isinstance(value, str | bytes | dict | set) or value is None:
        raise TypeError(f"{name} must be an array or a list of numbers, got {describe(value)}")
    return np.asarray(value)


def _sequence(name: str, value: Sequence[Any]) -> HostOrDevice:
    """Convert a list, which may hold numbers, rows of numbers, or arrays."""
    torch = sys.modules.get("torch")
    if torch is not None and any(issubclass(kind, torch.Tensor) for kind in set(map(type, value))):
        value = [as_array(name, v) for v in value]
    try:
        return np.asarray(value)
    except jax.errors.TracerArrayConversionError:
        return jnp.asarray(value)
    except ValueError:
        lengths = sorted({len(row) if hasattr(row, "__len__") else 0 for row in value})
        raise ValueError(
            f"{name} must be a list of numbers or of rows of equal length, got rows of lengths "
            f"{lengths} (0: a number)"
        ) from None


def as_numbers(name: str, value: Any) -> HostOrDevice:
    """Convert to real numbers; host data also to the type that it is computed in."""
    array = as_array(name, value)
    if array.dtype == object:
        array = _of_objects(name, array)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{name} must be real, got complex numbers ({array.dtype})")
    if not any(jnp.issubdtype(array.dtype, kind) for kind in (np.floating, np.integer, np.bool_)):
        raise TypeError(f"{name} must hold numbers, got {describe(array)}")
    if isinstance(array, jax.Array):
        return array
    listed = isinstance(value, list | tuple)
    dtype = np.float64 if listed else compute_dtype(array.dtype)
    with np.errstate(over="ignore"):  # the infinity that overflow gives is refused later
        return array.astype(jax.dtypes.canonicalize_dtype(dtype), copy=False)


def _of_objects(name: str, array: Any) -> HostOrDevice:
    """Read whole numbers too large for any type of NumPy, and say what else stands there."""
    objects = array.ravel().tolist()
    if not all(isinstance(entry, int | float) for entry in objects):
        hint = f": leave missing {name} out with where=" if None in objects else ""
        raise TypeError(f"{name} must hold numbers, got {describe(array)}{hint}")
    try:
        return np.asarray(array, np.float64)
    except OverflowError:
        largest = jax.dtypes.canonicalize_dtype(np.float64)
        raise ValueError(f"{name} must be within the range of {largest}, got more") from None


def as_mask(name: str, value: Any) -> HostOrDevice:
    """Convert to booleans."""
    mask = as_array(name, value)
    if mask.dtype != bool:
        raise TypeError(
            f"{name} must be boolean (True = keep), got {describe(mask)}: write {name} != 0"
        )
    return mask


def refuse_non_finite(name: str, values: HostOrDevice, mask: HostOrDevice | None) -> None:
    """Raise for the first value on the host that is not finite and, as far as is seen, kept."""
    if not isinstance(values, np.ndarray) or isinstance(mask, jax.core.Tracer):
        return
    bad = ~np.isfinite(values)
    if mask is not None and bad.any():
        keep = np.asarray(mask)
        bad &= keep if keep.ndim == bad.ndim else keep[:, None]
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        place = where[0] if len(where) == 1 else where
        raise ValueError(
            f"{name} must be finite (and within the range of {values.dtype}), "
            f"got {values[where]} at index {place}"
            + ("; leave it out with where=" if name == "rewards" else "")
        )
