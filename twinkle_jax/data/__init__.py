"""What goes in: conversations, data sets, input features, batches, and their sizes."""

from typing import TYPE_CHECKING, Any

from twinkle_jax.data.arithmetic import ArithmeticTask
from twinkle_jax.data.buckets import bucket_size
from twinkle_jax.data.chat_template import ChatTemplate
from twinkle_jax.data.loader import PromptBatch, PromptLoader
from twinkle_jax.data.prompt_files import read_gsm8k, read_jsonl
from twinkle_jax.data.reasoning_gym_task import ReasoningGymTask
from twinkle_jax.data.sample_responses import (
    LogprobsKind,
    SampledSequence,
    SampleResponse,
    SampleResponses,
    StopReason,
)
from twinkle_jax.data.sampling_params import SamplingParams
from twinkle_jax.data.small_tokenizer import small_tokenizer
from twinkle_jax.data.template import Template
from twinkle_jax.data.tokenizer import Tokenizer
from twinkle_jax.data.trajectory import (
    InputFeature,
    Message,
    Tool,
    ToolCall,
    Trajectory,
    completion_text,
    copy_trajectory,
    message_text,
    user_data_get,
)

if TYPE_CHECKING:
    from twinkle_jax.data.batch import Batch

__all__ = [
    "ArithmeticTask",
    "Batch",
    "ChatTemplate",
    "InputFeature",
    "LogprobsKind",
    "Message",
    "PromptBatch",
    "PromptLoader",
    "ReasoningGymTask",
    "SampleResponse",
    "SampleResponses",
    "SampledSequence",
    "SamplingParams",
    "StopReason",
    "Template",
    "Tokenizer",
    "Tool",
    "ToolCall",
    "Trajectory",
    "bucket_size",
    "completion_text",
    "copy_trajectory",
    "message_text",
    "read_gsm8k",
    "read_jsonl",
    "small_tokenizer",
    "user_data_get",
]


def __getattr__(name: str) -> Any:
    if name == "Batch":  # arrays of jax, which rewards and data sets do without
        from twinkle_jax.data.batch import Batch

        return Batch
    raise AttributeError(f"module 'twinkle_jax.data' has no attribute {name!r}")
