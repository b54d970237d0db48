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
from twinkle_jax.loss import LossOutput
from twinkle_jax.twinkle.names import add_submodules

__all__ = [
    "InputFeature",
    "LossOutput",
    "Message",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "Tool",
    "ToolCall",
    "Trajectory",
    "user_data_get",
]

add_submodules(__name__, "input_feature", "message", "sampling", "trajectory")
