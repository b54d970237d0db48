"""Batches to train on: their fields, their checks, and how rows of many lengths are padded."""

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.data.trajectory import IGNORE

HostArray = np.ndarray[Any, Any]
LARGEST = 2**31 - 1  # of int32
NO_EXPERT = -1  # leaves the choice to the router
_INTEGERS = ("tokens", "labels", "positions", "segment_ids", "teacher_tokens", "routing")
_BOOLEANS = ("mask", "rows")


class Batch(NamedTuple):
    """Rows of tokens and labels; a pytree, in which absent fields are None.

    Attributes:
        tokens: token ids. Padding may hold any id of the vocabulary.
        labels: at each position the token that follows, which the logits there predict; −100 where
            there is no loss. Those at padding do not count.
        mask: True for tokens, False for padding on any side. None: any padding is at the end of
            its row, where it needs no mask.
        rows: False for rows that were added to fill up the batch. None: all are real.
        positions: rotary positions. None: they count tokens.
        segment_ids: number of the sequence in its row, as `hidden_states` takes it. A loss that
            averages over sequences counts a row as one.
        advantages: one for each position.
        old_logps: log-probabilities under the policy that drew the tokens. None: on policy.
        ref_logps: the same under a reference policy.
        sampler_logps: log-probabilities that the sampler reported, for a loss that corrects their
            difference from `old_logps`.
        teacher_logprobs: log-probabilities under a teacher of some tokens at each position, its
            most likely ones for example.
        teacher_tokens: ids of these tokens.
        routing: experts of each token, as `hidden_states` takes them. None: the router chooses.
    """

    tokens: Int[Array, "batch time"]
    labels: Int[Array, "batch time"]
    mask: Bool[Array, "batch time"] | None = None
    rows: Bool[Array, " batch"] | None = None
    positions: Int[Array, "batch time"] | None = None
    segment_ids: Int[Array, "batch time"] | None = None
    advantages: Float[Array, "batch time"] | None = None
    old_logps: Float[Array, "batch time"] | None = None
    ref_logps: Float[Array, "batch time"] | None = None
    sampler_logps: Float[Array, "batch time"] | None = None
    teacher_logprobs: Float[Array, "batch time top"] | None = None
    teacher_tokens: Int[Array, "batch time top"] | None = None
    routing: Int[Array, "batch time layers chosen"] | None = None


def check_batch(batch: Batch, vocab_size: int) -> Batch:
    """Convert lists and NumPy arrays, and check shapes and types against the tokens.

    Integers on the host are checked before they are cast to int32. Where they are on a device, a
    token outside the vocabulary makes hidden states NaN, from its position on at least.

    Raises:
        ValueError: for an empty batch, another shape than the tokens', ids outside the vocabulary,
            or one of `teacher_logprobs` and `teacher_tokens` alone.
        TypeError: for tokens that are not integers, masks that are not booleans, or other entries
            on the host that are not numbers.
    """
    converted = {name: _convert(name, x, vocab_size) for name, x in batch._asdict().items()}
    shape = converted["tokens"].shape
    if len(shape) != 2:
        raise ValueError(f"tokens must have the shape [batch, time], got {shape}")
    if 0 in shape:
        raise ValueError(f"tokens must have at least one row and one position, got {shape}")
    teacher = converted["teacher_tokens"]
    if (teacher is None) != (converted["teacher_logprobs"] is None):
        raise ValueError("teacher_logprobs and teacher_tokens must both be given, got one of them")
    for name, array in converted.items():
        expected = shape[:1] if name == "rows" else shape
        if name.startswith("teacher_"):
            expected = *shape, 0 if teacher is None else teacher.shape[-1]
        if name == "routing" and array is not None:  # the decoder checks the rest
            expected = *shape, *array.shape[2:]
        if array is not None and array.shape != expected:
            raise ValueError(f"{name} must have the shape {expected}, got {array.shape}")
    return Batch(**converted)


def _convert(name: str, value: Any, vocab_size: int) -> Any:
    if value is None:
        return None
    if isinstance(value, jax.Array):
        if name in _INTEGERS and not jnp.issubdtype(value.dtype, jnp.integer):
            raise TypeError(f"{name} must be integers, got {value.dtype}")
        array: Any = value
    elif name in _INTEGERS:
        integers = read_integers(name, value)
        if name in ("tokens", "labels", "teacher_tokens"):
            ids = integers[integers != IGNORE] if name == "labels" else integers
            cast_integers(name, ids, 0, vocab_size - 1)
        return cast_integers(name, integers)
    else:
        array = np.asarray(value) if name in _BOOLEANS else _read_floats(name, value)
    if name in _BOOLEANS and array.dtype != np.bool_:
        raise TypeError(f"{name} must be booleans, True for what counts, got {array.dtype}")
    return array


def _read_floats(name: str, values: Any) -> HostArray:
    """Convert numbers to float32; refuse None, which NumPy would make NaN, and booleans."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"{name} must be a rectangular array, got rows of many lengths") from None
    if not jnp.isdtype(array.dtype, ("integral", "real floating")):
        raise TypeError(f"{name} must be real numbers, got {array.dtype}")
    return array.astype(np.float32)


def without_labels_of_padding(batch: Batch) -> Batch:
    """Leave out labels at padding: what would score them is the hidden state of no token."""
    if batch.mask is None:
        return batch
    return batch._replace(labels=jnp.where(batch.mask, batch.labels, IGNORE))


def read_integers(name: str, values: Any) -> HostArray:
    """Convert integers of any width to an array; refuse everything else."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"{name} must be a rectangular array, got rows of many lengths") from None
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    # An unsigned integer beyond int64 stays beyond every bound.
    return np.minimum(array, 2**63 - 1).astype(np.int64) if array.dtype == np.uint64 else array


def cast_integers(
    name: str, array: HostArray, low: int = -LARGEST, high: int = LARGEST
) -> HostArray:
    """Cast integers in [low, high] to int32; refuse others, which could wrap around."""
    outside = array[(array < low) | (array > high)]
    if outside.size:
        raise ValueError(f"{name} must be in [{low}, {high}], got {int(outside[0])}")
    return array.astype(np.int32)


def bucket_size(size: int, *, smallest: int = 1, multiple: int = 1, per_doubling: int = 2) -> int:
    """Round a size up to a bucket: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48 and so on.

    Arrays of many lengths, padded to buckets, share few compilations. By default buckets are powers
    of two and the numbers half-way between them, so at most a third of a padded array is padding,
    and there are two buckets for each doubling.

    Args:
        size: the size to round up, at least 0.
        smallest: the smallest bucket.
        multiple: the result is a multiple of this, such as the number of devices.
        per_doubling: how many buckets there are from one power of two to the next, a power of two:
            with 4, at most a fifth of a padded array is padding.

    Returns:
        The bucket, rounded up to the multiple.

    Raises:
        ValueError: if the size is negative, `smallest` or `multiple` not positive, or
            `per_doubling` not a power of two.

    Example:
        >>> [bucket_size(n, smallest=16) for n in (1, 17, 25, 33, 49, 100)]
        [16, 24, 32, 48, 64, 128]
        >>> bucket_size(5, multiple=4)
        8
        >>> [bucket_size(n, per_doubling=4) for n in (9, 11, 13, 15, 17)]
        [10, 12, 14, 16, 20]
    """
    if size < 0 or smallest < 1 or multiple < 1:
        raise ValueError(
            "size must be at least 0, smallest and multiple at least 1, "
            f"got size={size}, smallest={smallest}, multiple={multiple}"
        )
    if per_doubling < 1 or per_doubling & (per_doubling - 1):
        raise ValueError(f"per_doubling must be a power of two, got {per_doubling}")
    size = max(size, smallest)
    power = 1 << (size - 1).bit_length()  # the next power of two
    step = max(power // (2 * per_doubling), 1)
    bucket = -(-size // step) * step
    return -(-bucket // multiple) * multiple


def batch_width(longest: int, *, multiple: int = 1) -> int:
    """Return the width of a batch by the tokens of its longest row, rounded up to a bucket.

    Narrower ones than 16 are not worth a compilation.
    """
    return bucket_size(longest, smallest=16, multiple=multiple)


def micro_batches(
    features: list[dict[str, HostArray]],
    loss_inputs: Mapping[str, list[HostArray] | None],
    size: int | None,
    *,
    row_multiple: int = 1,
    time_multiple: int = 1,
) -> Iterator[tuple[Batch, int]]:
    """Cut rows into micro-batches, each padded to a bucket of lengths.

    Yields a micro-batch, and how many of its rows are real. `loss_inputs` are numbers for each
    position, by their name in a batch; without a size, all rows are one micro-batch.
    """
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(f"micro_batch_size must be a positive int or None, got {size!r}")
    rows = bucket_size(len(features)) if size is None else size
    rows = -(-rows // row_multiple) * row_multiple
    for start in range(0, len(features), rows):
        part = slice(start, start + rows)
        inputs = {name: None if x is None else x[part] for name, x in loss_inputs.items()}
        batch = make_batch(features[part], inputs, rows=rows, multiple=time_multiple)
        yield batch, len(features[part])


def make_batch(
    features: list[dict[str, HostArray]],
    loss_inputs: Mapping[str, list[HostArray] | None],
    *,
    rows: int,
    multiple: int = 1,
) -> Batch:
    """Pad features on the right to a bucket of lengths, and add empty rows up to `rows`."""
    longest = max(len(feature["input_ids"]) for feature in features)
    shape = (rows, batch_width(longest, multiple=multiple))

    def pad(ragged: list[HostArray], fill: int, dtype: Any = np.int32) -> HostArray:
        return pad_rows(ragged, fill, length=shape[1], count=rows, dtype=dtype)

    arrays: dict[str, Any] = {
        "tokens": pad([feature["input_ids"] for feature in features], 0),
        "labels": pad([feature["labels"] for feature in features], IGNORE),
        "rows": np.arange(rows) < len(features),
    }
    # Padding behind the tokens needs no mask: only padding before a token does.
    if any(np.any(np.diff(feature.get("attention_mask", [])) > 0) for feature in features):
        masks = [f.get("attention_mask", np.ones_like(f["labels"])) for f in features]
        arrays["mask"] = pad(masks, 0) != 0
    if any("position_ids" in feature for feature in features):
        arrays["positions"] = pad([_positions(feature) for feature in features], 0)
    if known := [x["routed_experts"] for x in features if "routed_experts" in x]:
        none = np.full((0, *known[0].shape[1:]), NO_EXPERT)
        arrays["routing"] = pad([f.get("routed_experts", none) for f in features], NO_EXPERT)
    for name, ragged in loss_inputs.items():
        kind = np.int32 if name == "teacher_tokens" else np.float32
        arrays[name] = None if ragged is None else pad(ragged, 0, kind)
    return Batch(**arrays)


def pad_rows(
    rows: Sequence[Any] | HostArray,
    fill: float = 0,
    *,
    length: int = 0,
    count: int = 0,
    left: bool = False,
    dtype: DTypeLike | None = None,
) -> HostArray:
    """Stack rows of different lengths.

    Args:
        rows: at least one list or array, each [time, ...].
        fill: what padding holds.
        length: the least length of the result; that of the longest row if that is more.
        count: the least number of its rows; further ones are padding.
        left: whether to pad on the left.
        dtype: its type; None for that of the rows.

    Example:
        >>> pad_rows([[1, 2], [3]], -100, length=3).tolist()
        [[1, 2, -100], [3, -100, -100]]
    """
    arrays = [np.asarray(row, dtype) for row in rows]
    shape = (max(count, len(arrays)), max(length, *map(len, arrays)), *arrays[0].shape[1:])
    padded = np.full(shape, fill, reduce(np.promote_types, {x.dtype for x in arrays}))
    for out, row in zip(padded, arrays, strict=False):
        out[shape[1] - len(row) if left else 0 :][: len(row)] = row
    return padded


def pad_tokens(
    rows: Sequence[Any], *, length: int, count: int = 0, left: bool = False
) -> tuple[HostArray, HostArray]:
    """Stack rows of token ids as `pad_rows` does; return them and a mask, True for tokens."""
    ones = [np.ones(len(row), bool) for row in rows]
    tokens = pad_rows(rows, length=length, count=count, left=left, dtype=np.int32)
    return tokens, pad_rows(ones, length=length, count=count, left=left)


def _positions(feature: dict[str, HostArray]) -> HostArray:
    """Return a row's positions, or count its tokens from 0, without its padding."""
    if "position_ids" in feature:
        return feature["position_ids"]
    kept = feature.get("attention_mask", np.ones_like(feature["input_ids"]))
    return np.maximum(np.cumsum(kept) - 1, 0).astype(np.int32)
