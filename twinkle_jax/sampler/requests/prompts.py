"""What is sampled from: trajectories, input features or strings, as features and as an array."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from twinkle_jax.data.batch import bucket_size
from twinkle_jax.data.template import Template
from twinkle_jax.data.trajectory import IGNORE, InputFeature

Prompt = str | Mapping[str, Any]


def read_prompts(
    inputs: Prompt | Sequence[Prompt], template: Template | None, *, vocab: int, room: int
) -> list[InputFeature]:
    """Encode what is not encoded yet, and check what the policy is to read."""
    several = [inputs] if isinstance(inputs, str | Mapping) else inputs
    if not isinstance(several, Sequence) or not len(several):
        raise ValueError(
            "inputs must be trajectories, input features or strings, at least one of them, "
            f"got {inputs!r}"
        )
    features = [_read(f"inputs[{i}]", prompt, template) for i, prompt in enumerate(several)]
    for i, feature in enumerate(features):
        tokens = prompt_tokens(feature)
        if not tokens.size:
            raise ValueError(f"inputs[{i}] must have at least one token, got none")
        if tokens.size >= room:
            raise ValueError(
                f"inputs[{i}] must have fewer tokens than max_length={room}, got {tokens.size}"
            )
        beyond = tokens[(tokens < 0) | (tokens >= vocab)]
        if beyond.size:
            raise ValueError(
                f"inputs[{i}] must have tokens in [0, {vocab}), the policy's vocabulary, "
                f"got {beyond[0]}"
            )
    return features


def prompt_tokens(feature: Mapping[str, Any]) -> np.ndarray:
    """Give the ids of a feature, without what its attention mask leaves out."""
    tokens = np.asarray(feature["input_ids"]).reshape(-1)
    mask = feature.get("attention_mask")
    return tokens if mask is None else tokens[np.asarray(mask).reshape(-1) != 0]


def pad_prompts(
    features: Sequence[Mapping[str, Any]], *, multiple: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lay prompts out at the front of rows, in buckets; what fills up are prompts of one token."""
    rows = [prompt_tokens(feature) for feature in features]
    count = bucket_size(len(rows), multiple=multiple)
    time = bucket_size(max(len(row) for row in rows), smallest=16)
    tokens, mask = np.zeros((count, time), np.int32), np.zeros((count, time), bool)
    mask[len(rows) :, 0] = True
    for i, row in enumerate(rows):
        tokens[i, : len(row)], mask[i, : len(row)] = row, True
    return tokens, mask


def _read(name: str, prompt: Prompt, template: Template | None) -> InputFeature:
    if isinstance(prompt, Mapping) and prompt.get("input_ids") is not None:
        feature: Any = dict(prompt)
        ids = np.asarray(feature["input_ids"])
        if ids.size and not np.issubdtype(ids.dtype, np.integer):
            raise TypeError(f"{name}['input_ids'] must be integers, got {ids.dtype}")
        return feature
    if template is None:
        raise ValueError(
            f"{name} must have 'input_ids' where there is no template (set_template takes one), "
            f"got {prompt!r:.80}"
        )
    if isinstance(prompt, str):
        ids = np.asarray(template.tokenizer.encode(prompt), np.int32)
        return InputFeature(input_ids=ids, labels=np.full(ids.shape, IGNORE, np.int32))
    if not isinstance(prompt, Mapping):
        raise TypeError(
            f"{name} must be a trajectory, an input feature or a string, got {prompt!r}"
        )
    return template.encode(prompt, add_generation_prompt=True)
