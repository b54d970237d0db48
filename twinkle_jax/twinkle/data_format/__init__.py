"""Twinkle's `data_format`."""

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

__all__ = [
    "InputFeature",
    "Message",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "Tool",
    "ToolCall",
    "Trajectory",
    "user_data_get",
]
