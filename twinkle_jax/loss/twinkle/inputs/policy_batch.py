"""What a policy loss reads of a batch, each thing one number a position."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from twinkle_jax.loss.masked_inputs import Mask, PerToken
from twinkle_jax.loss.twinkle.inputs.alignment import SampleValues, aligned
from twinkle_jax.loss.twinkle.inputs.labels import entry, label_logprobs, per_position, read_labels


class PolicyBatch(NamedTuple):
    """Everything [batch, time]; without advantages or behaviour log-probabilities, their place."""

    logprobs: PerToken
    behaviour_logprobs: PerToken
    reference_logprobs: PerToken | None
    advantages: PerToken
    entropies: PerToken | None
    mask: Mask


def read_policy_batch(
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    ignore_index: int,
    *,
    old_logps: SampleValues | None,
    ref_logps: SampleValues | None,
    advantages: SampleValues | None,
    entropies_needed: bool,
) -> PolicyBatch:
    """Read labels and what is about them; on policy where there are no `old_logps`."""
    labels = read_labels(inputs, ignore_index)
    mask = labels.mask
    logprobs = label_logprobs(outputs, labels)
    dtype = logprobs.dtype
    entropies = None
    if entropies_needed or outputs.get("entropies") is not None:
        _, entropies = entry("outputs", outputs, "entropies")
        entropies = per_position("outputs['entropies']", entropies, mask).astype(dtype)
    return PolicyBatch(
        logprobs,
        logprobs if old_logps is None else aligned("old_logps", old_logps, labels, dtype),
        None if ref_logps is None else aligned("ref_logps", ref_logps, labels, dtype),
        jnp.zeros_like(logprobs)
        if advantages is None
        else aligned("advantages", advantages, labels, dtype, per_sequence=True),
        entropies,
        mask,
    )
