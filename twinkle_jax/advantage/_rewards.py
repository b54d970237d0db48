"""Turn whatever callers hold rewards in into arrays; refuse what would silently go wrong.

Host data (lists, NumPy, PyTorch tensors) is checked for NaN and infinity here. A JAX array stays
where it is and is not read back: what is wrong in it shows as NaN advantages.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from twinkle_jax.advantage._core import compute_dtype
from twinkle_jax.advantage._settings import describe

HostOrDevice = jax.Array | np.ndarray[Any, np.dtype[Any]]

_PLAIN = {float, int, bool}


def check_rewards(
    rewards: Any, where: Any, reward_weights: Any
) -> tuple[HostOrDevice, HostOrDevice | None, HostOrDevice | None]:
    """Return rewards, mask and weights as arrays that fit together."""
    values = as_numbers("rewards", rewards)
    if values.ndim not in (1, 2):
        raise ValueError(
            "rewards must be [N], or [N, C] for C reward components, with the K samples of a "
            f"prompt next to each other, got shape {values.shape}"
        )
    if values.size == 0:
        raise ValueError(f"rewards must hold at least one reward, got shape {values.shape}")
    mask = None if where is None else _mask(where, values.shape)
    weights = None if reward_weights is None else _weights(reward_weights, values.shape)
    if isinstance(values, np.ndarray) and not math.isfinite(np.vdot(values, values)):
        refuse_non_finite("rewards", values, mask)
    return values, mask, weights


def split_missing(rewards: Any, where: Any) -> tuple[Any, Any]:
    """Read None in a (nested) list as "missing": fill it in, and leave it out through the mask."""
    if not isinstance(rewards, list | tuple) or not _holds_none(rewards):
        return rewards, where
    rows = [row for row in rewards if isinstance(row, list | tuple)]
    width = len(rows[0]) if rows else None

    def fill(row: Any) -> Any:
        if row is None:
            return 0.0 if width is None else [0.0] * width
        return [0.0 if r is None else r for r in row] if isinstance(row, list | tuple) else row

    def present(row: Any) -> Any:
        if row is None:
            return False if width is None else [False] * width
        return [r is not None for r in row] if isinstance(row, list | tuple) else True

    filled, kept = [fill(row) for row in rewards], np.asarray([present(row) for row in rewards])
    if where is None:
        return filled, kept
    mask = _mask(where, kept.shape)
    if mask.ndim < kept.ndim:
        mask = mask[:, None]
    elif mask.ndim > kept.ndim:
        kept = kept[:, None]
    return filled, mask & kept


def _holds_none(rewards: Sequence[Any]) -> bool:
    if set(map(type, rewards)) <= _PLAIN:
        return False
    return any(
        row is None or (isinstance(row, list | tuple) and any(r is None for r in row))
        for row in rewards
    )


def as_array(name: str, value: Any) -> HostOrDevice:
    """Convert without a transfer: JAX arrays stay on the device, everything else on the host."""
    if isinstance(value, list | tuple):  # first: whether something is a jax.Array is slow to tell
        return _sequence(name, value)
    if isinstance(value, np.ndarray | jax.Array):
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(
                f"{name} must not be a NumPy masked array, whose mask would be dropped: pass "
                f"{name}.filled(0) and where=~numpy.ma.getmaskarray({name})"
            )
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
    if isinstance(value, list | tuple) and set(map(type, value)) <= _PLAIN:
        # The case that is called every step: one conversion, no further questions.
        wide = jax.dtypes.canonicalize_dtype(np.float64)
        try:
            with np.errstate(over="ignore"):  # the infinity that overflow gives is refused later
                return np.asarray(value, wide)
        except OverflowError:
            raise ValueError(f"{name} must be within the range of {wide}") from None
    array = as_array(name, value)
    dtype = array.dtype
    if dtype == np.float32:
        return array
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"{name} must be real, got complex numbers ({dtype})")
    if not any(jnp.issubdtype(dtype, kind) for kind in (np.floating, np.integer, np.bool_)):
        missing = isinstance(array, np.ndarray) and None in array.ravel().tolist()
        raise TypeError(
            f"{name} must hold numbers, got {describe(array)}"
            + (f": leave missing {name} out with where=" if missing else "")
        )
    if isinstance(array, np.ndarray):
        listed = isinstance(value, list | tuple)
        dtype = jax.dtypes.canonicalize_dtype(np.float64 if listed else compute_dtype(dtype))
        if array.dtype != dtype:
            with np.errstate(over="ignore"):
                return array.astype(dtype)
    return array


def _mask(where: Any, shape: tuple[int, ...]) -> HostOrDevice:
    mask = as_array("where", where)
    if mask.dtype != bool:
        raise TypeError(
            f"where must be boolean (True = keep), got {describe(mask)}: write where != 0"
        )
    if mask.shape not in (shape, shape[:1]):
        raise ValueError(
            f"where must have shape {shape[:1]}"
            + (f" or {shape}" if len(shape) == 2 else "")
            + f" for rewards of shape {shape}, got {mask.shape}"
        )
    return mask


def _weights(reward_weights: Any, shape: tuple[int, ...]) -> HostOrDevice:
    if len(shape) == 1:
        raise ValueError(
            "reward_weights weigh the C components of rewards of shape [N, C], "
            f"got rewards of shape {shape}"
        )
    weights = as_numbers("reward_weights", reward_weights)
    if weights.shape != shape[1:]:
        raise ValueError(
            f"reward_weights must have shape {shape[1:]} for rewards of shape {shape}, "
            f"got {weights.shape}"
        )
    if isinstance(weights, np.ndarray) and not np.isfinite(weights).all():
        refuse_non_finite("reward_weights", weights, None)
    return weights


def check_segment_ids(segment_ids: Any, num_samples: int, num_segments: int) -> HostOrDevice:
    """Return ids as signed integers of at least 32 bits, in which -1 is outside."""
    ids = as_array("segment_ids", segment_ids)
    if not jnp.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"segment_ids must hold integers, got {describe(ids)}")
    if ids.shape != (num_samples,):
        raise ValueError(
            f"segment_ids must have shape {(num_samples,)}, one id for each reward, got {ids.shape}"
        )
    if isinstance(ids, np.ndarray):  # before 64 bits are cut to 32
        wide = ids.astype(np.int64)
        return np.where((wide >= 0) & (wide < num_segments), wide, -1).astype(np.int32)
    return ids.astype(jnp.int64 if ids.dtype.itemsize == 8 else jnp.int32)


def refuse_non_finite(
    name: str, values: np.ndarray[Any, np.dtype[Any]], mask: HostOrDevice | None
) -> None:
    """Raise for the first value that is not finite and not masked, if the mask can be seen."""
    if isinstance(mask, jax.core.Tracer):
        return
    bad = ~np.isfinite(values)
    if mask is not None:
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
