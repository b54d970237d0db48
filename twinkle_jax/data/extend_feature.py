"""Features that grow by sampled tokens, or by what others say."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from twinkle_jax.data.trajectory import IGNORE, InputFeature


def extend_feature(
    feature: Mapping[str, Any], tokens: list[int], *, labelled: bool
) -> InputFeature:
    """Copy a feature with tokens added; labels are at each position the token that follows."""
    ids = np.asarray(feature["input_ids"], np.int32).reshape(-1)
    given = feature.get("labels")
    labels = np.full(ids.shape, IGNORE) if given is None else np.asarray(given).reshape(-1)
    new = np.asarray(tokens, np.int32)
    following = new if labelled else np.full(new.shape, IGNORE)
    grown: Any = dict(feature)
    grown["input_ids"] = np.concatenate([ids, new])
    if new.size:
        labels = np.concatenate([labels[:-1], following, [IGNORE]])
    grown["labels"] = labels.astype(np.int32)
    if feature.get("attention_mask") is not None:
        mask = np.asarray(feature["attention_mask"]).reshape(-1)
        grown["attention_mask"] = np.concatenate([mask, np.ones(new.shape, mask.dtype)])
    if feature.get("position_ids") is not None:
        positions = np.asarray(feature["position_ids"]).reshape(-1)
        grown["position_ids"] = np.concatenate(
            [positions, positions[-1:] + 1 + np.arange(new.size)]
        )
    if "length" in grown:
        grown["length"] = int(grown["input_ids"].size)
    return grown
