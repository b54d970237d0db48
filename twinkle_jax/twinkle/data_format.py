"""Twinkle's `data_format`."""

from typing import Any

from twinkle_jax.data import (
    InputFeature,
    Message,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    Tool,
    ToolCall,
    Trajectory,
    user_data_get,
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
    "user_data_get",
]

add_submodules(__name__, "input_feature", "message", "sampling", "trajectory")
