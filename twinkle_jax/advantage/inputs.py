"""Convert and check arguments: numbers, masks, static settings, coefficients.

A JAX array stays where it is and is not read back. Everything else becomes a NumPy array, in
which NaN and infinities are found, and raise.
"""

import operator
import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np


class TorchTensor(Protocol):
    """A PyTorch tensor, recognised without importing PyTorch."""

    def detach(self) -> Any:
        """Detach from the gradient graph."""

    def cpu(self) -> Any:
        """Move to the host."""


class HoldsArray(Protocol):
    """A wrapper of a JAX array, such as an NNX variable."""

    def __jax_array__(self) -> jax.Array:
        """Return the array."""


HostOrDevice = jax.Array | np.ndarray[Any, np.dtype[Any]]
ArrayLike = HostOrDevice | Sequence[Any] | np.generic | float | TorchTensor | HoldsArray
"""Numbers, or the booleans of a mask: an array, a tracer, a tensor, or lists of these."""
Scalar = float | jax.Array | np.ndarray[Any, np.dtype[Any]] | np.number[Any]
"""A coefficient: a Python number, or a scalar array, which may be traced."""
AxisName = Hashable | Sequence[Hashable]
"""A `shard_map` or `vmap` axis, or several of them."""
Scale = Literal["group", "batch", "none"]
"""What centred rewards are divided by: the standard deviation of their group, of the batch, 1."""

_NARROW, _WIDE = jnp.dtype(jnp.float32), jnp.dtype(jnp.float64)


def compute_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Float64 stays; float16, bfloat16, integers and booleans are computed in float32."""
    return _WIDE if dtype == _WIDE else _NARROW


def common_dtype(*arrays: HostOrDevice | None) -> jnp.dtype:
    """Float64 if any of them is, else float32."""
    wide = any(array is not None and array.dtype == _WIDE for array in arrays)
    return _WIDE if wide else _NARROW


def describe(value: Any) -> str:
    """Describe an argument for an error message."""
    if isinstance(value, jax.core.Tracer):
        return f"a traced array ({jax.typeof(value)})"
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array ({value.dtype}{list(value.shape)})"
    return f"{type(value).__name__} {value!r}"


# --- arrays -------------------------------------------------------------------------------------


def as_array(name: str, value: Any) -> HostOrDevice:
    """Convert without a transfer: JAX arrays stay on the device, everything else on the host."""
    if isinstance(value, list | tuple):
        return _from_sequence(name, value)
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


def _from_sequence(name: str, value: Sequence[Any]) -> HostOrDevice:
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
        array = _from_objects(name, array)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{name} must be real, got complex numbers ({array.dtype})")
    if not any(jnp.issubdtype(array.dtype, kind) for kind in (np.floating, np.integer, np.bool_)):
        raise TypeError(f"{name} must hold numbers, got {describe(array)}")
    if isinstance(array, jax.Array):
        return array
    # A list of Python floats is as precise as the default type of JAX allows.
    dtype = np.float64 if isinstance(value, list | tuple) else compute_dtype(array.dtype)
    with np.errstate(over="ignore"):  # overflow gives an infinity, which raises later
        return array.astype(jax.dtypes.canonicalize_dtype(dtype), copy=False)


def _from_objects(name: str, array: Any) -> HostOrDevice:
    """Convert whole numbers that are too large for any integer type of NumPy."""
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
    """Raise for the first number on the host that is not finite, and not known to be masked."""
    if isinstance(values, np.ndarray):
        hint = "; leave it out with where=" if name == "rewards" else ""
        rule = f"{name} must be finite (and within the range of {values.dtype})"
        refuse(rule, values, ~np.isfinite(values), mask, hint)


def refuse(
    rule: str,
    values: np.ndarray[Any, np.dtype[Any]],
    bad: Any,
    mask: HostOrDevice | None,
    hint: str = "",
) -> None:
    """Raise for the first bad entry that the mask keeps; with a traced mask, never.

    The mask has the shape of `bad`, or one entry for each of its rows. If `bad` has one entry a
    sample, the mask may be one of components: a sample is kept if one of its components is.
    """
    if isinstance(mask, jax.core.Tracer) or not bad.any():
        return
    if mask is not None:
        keep: Any = np.asarray(mask)
        if bad.ndim == 1:
            keep = keep.reshape(len(bad), -1).any(axis=1)
        bad = bad & (keep if keep.ndim == bad.ndim else keep[:, None])
    if bad.any():
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        place = index[0] if len(index) == 1 else index
        raise ValueError(f"{rule}, got {values[index]} at index {place}{hint}")


def check_shape(name: str, array: HostOrDevice, shape: tuple[int, ...], why: str) -> None:
    """Raise unless the array has this shape; `why` is appended to it in the message."""
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}{why}, got {array.shape}")


# --- settings, fixed at compile time --------------------------------------------------------------


def check_scale(scale: Any) -> str:
    """Return `scale` if it is one of the three."""
    hint = " (write scale='none' for no scaling)" if scale is None else ""
    return check_choice("scale", scale, get_args(Scale), hint)


def check_choice(name: str, value: Any, choices: Sequence[str], hint: str = "") -> str:
    """Return a string that must be one of `choices`."""
    known = ", ".join(map(repr, choices))
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {known} as a string, got {describe(value)}{hint}")
    if value not in choices:
        raise ValueError(f"{name} must be one of {known}, got {value!r}")
    return value


def check_size(name: str, value: Any, *, least: int = 1, why: str = "") -> int:
    """Return a static count, a Python or NumPy integer, as an int of at least `least`."""
    if isinstance(value, jax.Array | np.ndarray):
        raise TypeError(
            f"{name} must be a static Python int, got {describe(value)}: it decides shapes, so "
            f"mark it static (jax.jit(..., static_argnames={name!r})) or close over it"
        )
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a positive int, got {describe(value)}")
    size = operator.index(value)
    if size < least:
        raise ValueError(f"{name} must be at least {least}, got {size}{why}")
    return size


def check_axis_name(axis_name: Any) -> Any:
    """Return a hashable axis name, or a tuple of them."""
    return tuple(axis_name) if isinstance(axis_name, list) else axis_name


def check_flag(name: str, value: Any) -> bool:
    """Return a static bool."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, and static, got {describe(value)}")
    return bool(value)


# --- coefficients, which may be traced ------------------------------------------------------------


def check_coefficient(name: str, value: Any, *beside: HostOrDevice | None) -> Any:
    """Return a real scalar: a Python number as it is, or an array without axes.

    If the arrays are on a device, a Python number is put there explicitly, in their type, so that
    `jax.transfer_guard` sees no implicit transfer.
    """
    if type(value) in (float, int):
        arrays = [array for array in beside if array is not None]
        if any(isinstance(array, np.ndarray | jax.core.Tracer) for array in arrays):
            return float(value)
        return jax.device_put(np.asarray(value, common_dtype(*arrays)))
    if not isinstance(value, jax.Array | np.ndarray | np.number):
        raise TypeError(f"{name} must be a number, got {describe(value)}")
    if value.shape != ():
        raise ValueError(f"{name} must be a scalar, got shape {value.shape}")
    if not jnp.issubdtype(value.dtype, np.floating):
        raise TypeError(
            f"{name} must be a Python number or of a floating type, got {describe(value)}"
        )
    return value


# --- one entry a token, `[..., time]` -------------------------------------------------------------


def check_tokens(
    arrays: Mapping[str, Any], mask_name: str, mask: Any, *, required: bool = False
) -> tuple[list[HostOrDevice], HostOrDevice | None]:
    """Return numbers and their mask, of the shape of the first array; kept ones are finite.

    Args:
        arrays: by name; the first decides the shape.
        mask_name: the name of the mask where the user passed it.
        mask: True = keep, or None for all.
        required: whether None raises.
    """
    numbers = {name: as_numbers(name, array) for name, array in arrays.items()}
    first = next(iter(numbers))
    shape = numbers[first].shape
    for name, array in numbers.items():
        _check_time_axis(name, array, first, shape)
    keep = None
    if mask is not None or required:
        keep = as_mask(mask_name, mask)
        _check_time_axis(mask_name, keep, first, shape)
    for name, array in numbers.items():
        refuse_non_finite(name, array, keep)
    return list(numbers.values()), keep


def check_token_mask(mask: Any) -> HostOrDevice:
    """Return a boolean mask with a time axis."""
    keep = as_mask("mask", mask)
    _check_time_axis("mask", keep, "mask", keep.shape)
    return keep


def check_per_row(name: str, values: Any, like: str, shape: tuple[int, ...]) -> HostOrDevice:
    """Return one number for each row of an array of tokens, finite if on the host."""
    array = as_numbers(name, values)
    check_shape(name, array, shape[:-1], f", one for each row of {like}, {shape}")
    refuse_non_finite(name, array, None)
    return array


def _check_time_axis(name: str, array: HostOrDevice, like: str, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} must have the shape of {like}, {shape}, got {array.shape}")
    if array.ndim < 1 or array.size == 0:
        raise ValueError(
            f"{name} must be [..., time] with at least one step, got shape {array.shape}"
        )
