"""Twinkle's batches: which positions have a loss, and the log-probability of what stands there."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from twinkle_jax.loss.masked_inputs import Mask, PerToken


def entry(name: str, mapping: Mapping[str, Any], *keys: str) -> tuple[str, Any]:
    """Look up the first key that holds something, or say what there is instead."""
    if not isinstance(mapping, Mapping):
        raise TypeError(f"{name} must be a mapping, got {type(mapping).__name__}")
    for key in keys:
        if mapping.get(key) is not None:
            return key, mapping[key]
    raise ValueError(f"{name} must hold {' or '.join(map(repr, keys))}, got {sorted(mapping)}")


class Labels(NamedTuple):
    """Which token stands at each position, and where a token counts."""

    tokens: Int[Array, "batch time"]
    mask: Mask
    ignore_index: int
    known: np.ndarray[Any, Any] | None
    """The labels once more, where they are known before the computation runs; else None."""

    def check(self, vocabulary: int | None = None) -> None:
        """Refuse labels that name no token, where they are known."""
        if self.known is None:
            return
        beyond = np.inf if vocabulary is None else vocabulary
        bad = (self.known != self.ignore_index) & ((self.known < 0) | (self.known >= beyond))
        if bad.any():
            row, column = (int(index) for index in np.argwhere(bad)[0])
            tokens = "a token (0 or more)" if vocabulary is None else f"a token below {vocabulary}"
            raise ValueError(
                f"inputs['labels'][{row}, {column}] must be {tokens} or "
                f"ignore_index={self.ignore_index}, got {self.known[row, column]}"
            )


def read_labels(inputs: Mapping[str, Any], ignore_index: int) -> Labels:
    """Take the labels out of a batch, as a matrix, and check what can be seen of them."""
    _, labels = entry("inputs", inputs, "labels")
    if not isinstance(labels, jax.Array):
        try:
            labels = np.asarray(labels)
        except ValueError as error:
            lengths = [len(row) for row in labels]
            raise ValueError(
                f"inputs['labels'] must have rows of equal length, got lengths {lengths}"
            ) from error
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"inputs['labels'] must be integers, got {labels.dtype}")
    if labels.ndim == 1:
        labels = labels[None]
    if labels.ndim != 2:
        raise ValueError(f"inputs['labels'] must be [batch, time], got shape {labels.shape}")
    tokens = jnp.asarray(labels).astype(jnp.int32)
    checked = Labels(tokens, tokens != ignore_index, ignore_index, visible(labels))
    checked.check()
    return checked


def label_logprobs(outputs: Mapping[str, Any], labels: Labels) -> PerToken:
    """Give the log-probability of each label, from `logps` or from `logits`."""
    key, values = entry("outputs", outputs, "logps", "logits")
    if key == "logps":
        return per_position("outputs['logps']", values, labels.mask)
    logits = floating("outputs['logits']", values)
    if logits.ndim == 2:
        logits = logits[None]
    if logits.ndim != 3 or logits.shape[:2] != labels.mask.shape:
        raise ValueError(
            f"outputs['logits'] must be [batch, time, vocabulary] with inputs['labels'] of shape "
            f"{labels.mask.shape}, got {logits.shape}"
        )
    labels.check(vocabulary=logits.shape[-1])
    return _picked(logits, labels.tokens, labels.mask)


def _picked(
    logits: Float[Array, "batch time vocab"], tokens: Int[Array, "batch time"], mask: Mask
) -> PerToken:
    logprobs = jax.nn.log_softmax(jnp.where(mask[..., None], logits, 0))
    picked = jnp.take_along_axis(logprobs, tokens[..., None], axis=-1, mode="clip")[..., 0]
    # A label outside the vocabulary that shows only at run time must not pass for another token.
    exists = (tokens >= 0) & (tokens < logits.shape[-1])
    return jnp.where(mask, jnp.where(exists, picked, jnp.nan), 0)


def per_position(name: str, values: Any, mask: Mask) -> PerToken:
    """Read an output with one number a position, [batch, time] or [batch, time, 1]."""
    array = floating(name, values)
    if array.ndim == 1:
        array = array[None]
    if array.shape == (*mask.shape, 1):
        array = array[..., 0]
    if array.shape != mask.shape:
        raise ValueError(
            f"{name} must have the shape of inputs['labels'], {mask.shape}, got {array.shape}"
        )
    return array


def floating(name: str, values: Any) -> Float[Array, "..."]:
    """Give an array in the type it is computed in: float32, or float64 where it is that."""
    array = jnp.asarray(values)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating point, got {array.dtype}")
    return array.astype(jnp.float64 if array.dtype == jnp.float64 else jnp.float32)


def visible(values: Any) -> np.ndarray[Any, Any] | None:
    """Give the values as a NumPy array if they are known now, None while they are traced."""
    if isinstance(values, jax.core.Tracer):
        return None
    if isinstance(values, jax.Array) and not values.is_fully_addressable:
        return None
    return np.asarray(jax.device_get(values))
