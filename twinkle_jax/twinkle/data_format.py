"""Twinkle's `data_format`."""

import json
from contextlib import suppress
from typing import Any

from twinkle_jax import data
from twinkle_jax.data import (
    InputFeature,
    Message,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    Tool,
    ToolCall,
    Trajectory,
)
from twinkle_jax.loss import LossOutput
from twinkle_jax.twinkle.names import add_submodules

ModelOutput = dict[str, Any]

__all__ = [
    "InputFeature",
    "LossOutput",
    "Message",
    "ModelOutput",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "Tool",
    "ToolCall",
    "Trajectory",
    "pack_value",
    "user_data_get",
]


def pack_value(value: Any) -> str:
    """Write a value of `user_data` as JSON; what JSON does not have becomes text."""
    return json.dumps(value, ensure_ascii=False, default=str)


def user_data_get(user_data: Any, key: str, default: Any = None) -> Any:
    """Look up a value in `user_data`, and decode text that is JSON, as Twinkle's does.

    Example:
        >>> user_data_get([("level", pack_value([1])), ("ground_truth", "007")], "level")
        [1]
        >>> user_data_get([("ground_truth", "007")], "ground_truth")
        '007'
    """
    missing = object()
    value = data.user_data_get(user_data, key, missing)
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return default if value is missing else value


add_submodules(__name__, "input_feature", "message", "sampling", "trajectory")
