"""A batch to train on: tokens, next to them what the loss needs to know about each."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.data.trajectory import IGNORE as IGNORE


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
        segment_ids: rows that hold several sequences, as `hidden_states` takes them.
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


def check_batch(batch: Batch) -> None:
    """Refuse arrays of other shapes than the tokens'."""
    if batch.tokens.ndim != 2:
        raise ValueError(f"expected tokens [batch, time], got tokens={batch.tokens.shape}")
    for name, array in batch._asdict().items():
        expected = batch.tokens.shape[:1] if name == "rows" else batch.tokens.shape
        if array is not None and array.shape != expected:
            raise ValueError(f"expected {name} of shape {expected}, got {array.shape}")
    for name in ("tokens", "labels"):
        array = getattr(batch, name)
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"expected {name} to be integers, got {array.dtype}")
