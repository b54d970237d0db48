"""A batch to train on: tokens, next to them what the loss needs to know about each."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.data.integers import cast_integers, read_integers
from twinkle_jax.data.trajectory import IGNORE as IGNORE

_INTEGERS = ("tokens", "labels", "positions", "segment_ids")
_BOOLEANS = ("mask", "rows")


class Batch(NamedTuple):
    """Rows of tokens and labels; a pytree, in which what is None is absent.

    Attributes:
        tokens: token ids. Padding may hold any id of the vocabulary.
        labels: at each position the token that follows, which the logits there predict; −100 where
            there is no loss.
        mask: True for tokens, False for padding on any side. None: padding, if there is any,
            follows the tokens of its row, where it needs no mask.
        rows: False for rows that were added to fill up the batch. None: all are real.
        positions: rotary positions. None: they count tokens.
        segment_ids: rows that hold several sequences, as `hidden_states` takes them. A loss that
            averages over sequences takes a row for one.
        advantages: one for each position.
        old_logps: log-probabilities under the policy that drew the tokens. None: on policy.
        ref_logps: the same under a reference policy.
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


def check_batch(batch: Batch, vocab_size: int) -> Batch:
    """Take lists and NumPy arrays too; refuse other shapes than the tokens', and wrong types.

    Integers on the host are checked before they are cast to int32. Where they are on a device, an
    id outside the vocabulary makes its row NaN.
    """
    batch = Batch(**{n: _taken(n, value, vocab_size) for n, value in batch._asdict().items()})
    if batch.tokens.ndim != 2:
        raise ValueError(f"tokens must have the shape [batch, time], got {batch.tokens.shape}")
    for name, array in batch._asdict().items():
        expected = batch.tokens.shape[:1] if name == "rows" else batch.tokens.shape
        if array is not None and array.shape != expected:
            raise ValueError(f"{name} must have the shape {expected}, got {array.shape}")
    return batch


def _taken(name: str, value: Any, vocab_size: int) -> Any:
    if value is None:
        return None
    if isinstance(value, jax.Array):
        if name in _INTEGERS and not jnp.issubdtype(value.dtype, jnp.integer):
            raise TypeError(f"{name} must be integers, got {value.dtype}")
        array: Any = value
    elif name in _INTEGERS:
        integers = read_integers(name, value)
        if name in ("tokens", "labels"):
            real = integers if name == "tokens" else integers[integers != IGNORE]
            cast_integers(name, real, 0, vocab_size - 1)
        return cast_integers(name, integers)
    else:
        array = np.asarray(value, np.float32 if name not in _BOOLEANS else None)
    if name in _BOOLEANS and array.dtype != np.bool_:
        raise TypeError(f"{name} must be booleans, True for what counts, got {array.dtype}")
    return array
