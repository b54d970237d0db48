"""Conversations, chat templates, tokenizers, data sets, input features and batches."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from twinkle_jax.data.prompt_files import (
    read_examples,
    read_gsm8k,
    read_jsonl,
    read_preferences,
)
from twinkle_jax.data.prompts import ArithmeticTask, PromptLoader, ReasoningGymTask
from twinkle_jax.data.rows import (
    Columns,
    Row,
    Rows,
    RowStream,
    Table,
    mix,
    read_rows,
    write_rows,
)
from twinkle_jax.data.template import ChatTemplate, Template, TruncationStrategy
from twinkle_jax.data.tokenizer import Tokenizer, small_tokenizer
from twinkle_jax.data.tool_calls import (
    ParsedToolCalls,
    ToolCallError,
    parse_cline_calls,
    parse_hermes_calls,
    parse_react_calls,
    parse_tool_calls,
)
from twinkle_jax.data.trajectory import (
    IGNORE,
    FunctionCall,
    FunctionSpec,
    InputFeature,
    LogprobsKind,
    Message,
    PromptBatch,
    SampledSequence,
    SampleResponse,
    SampleResponses,
    SamplingParams,
    StopReason,
    TokenIds,
    Tool,
    ToolCall,
    Trajectory,
    completion_text,
    copy_trajectory,
    message_text,
    user_data_get,
)

if TYPE_CHECKING:
    from twinkle_jax.data.batch import Batch, HostArray, bucket_size, pad_rows
    from twinkle_jax.data.features import Feature, Inputs, PerSequence, Piece, largest_logits

# These need jax, which rewards and data sets do without.
_LAZY = {
    **dict.fromkeys(("Batch", "HostArray", "bucket_size", "pad_rows"), "batch"),
    **dict.fromkeys(("Feature", "Inputs", "PerSequence", "Piece", "largest_logits"), "features"),
}

__all__ = [
    "IGNORE",
    "ArithmeticTask",
    "Batch",
    "ChatTemplate",
    "Columns",
    "Feature",
    "FunctionCall",
    "FunctionSpec",
    "HostArray",
    "InputFeature",
    "Inputs",
    "LogprobsKind",
    "Message",
    "ParsedToolCalls",
    "PerSequence",
    "Piece",
    "PromptBatch",
    "PromptLoader",
    "ReasoningGymTask",
    "Row",
    "RowStream",
    "Rows",
    "SampleResponse",
    "SampleResponses",
    "SampledSequence",
    "SamplingParams",
    "StopReason",
    "Table",
    "Template",
    "TokenIds",
    "Tokenizer",
    "Tool",
    "ToolCall",
    "ToolCallError",
    "Trajectory",
    "TruncationStrategy",
    "bucket_size",
    "completion_text",
    "copy_trajectory",
    "largest_logits",
    "message_text",
    "mix",
    "pad_rows",
    "parse_cline_calls",
    "parse_hermes_calls",
    "parse_react_calls",
    "parse_tool_calls",
    "read_examples",
    "read_gsm8k",
    "read_jsonl",
    "read_preferences",
    "read_rows",
    "small_tokenizer",
    "user_data_get",
    "write_rows",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"twinkle_jax.data.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'twinkle_jax.data' has no attribute {name!r}")
