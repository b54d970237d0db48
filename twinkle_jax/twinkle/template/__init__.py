"""Twinkle's `template`: what encodes conversations, by name, and the parsers of tool calls."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twinkle_jax.data import InputFeature, Tokenizer, TruncationStrategy
from twinkle_jax.data import Template as BaseTemplate
from twinkle_jax.twinkle.names import local_id
from twinkle_jax.twinkle.template.tools import (
    ClineParser,
    HermesQwenParser,
    ReActParser,
    ToolCallParser,
    ToolCallRegistry,
)

__all__ = [
    "ClineParser",
    "HermesQwenParser",
    "Qwen3_5Template",
    "ReActParser",
    "Template",
    "ToolCallParser",
    "ToolCallRegistry",
]


class Template(BaseTemplate):
    """A [`Template`][twinkle_jax.data.Template] with Twinkle's arguments and keys.

    Features have `attention_mask`, `position_ids` and `length` too.

    Args:
        model_id: a directory, an id on the Hugging Face hub, or a tokenizer.
        use_chat_template: False encodes the one message there is as plain text.
        max_length: the most tokens of a conversation; None for no limit.
        truncation_strategy: what is done with longer ones.
        default_system: a system message for conversations without one.
        enable_thinking: what the chat template is told by this name.
        template_variables: what else it asks for.
    """

    def __init__(
        self,
        model_id: str | Path | Tokenizer,
        use_chat_template: bool = True,
        max_length: int | None = 8192,
        truncation_strategy: TruncationStrategy = "raise",
        default_system: str | None = None,
        enable_thinking: bool = True,
        **template_variables: Any,
    ) -> None:
        super().__init__(
            local_id(model_id),
            use_chat_template,
            max_length,
            truncation_strategy,
            default_system,
            template_variables={"enable_thinking": enable_thinking, **template_variables},
        )
        self.model_id, self.enable_thinking = model_id, enable_thinking

    def encode_all(
        self, trajectories: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False
    ) -> tuple[list[int], list[InputFeature]]:
        """Encode several conversations, and say which one each feature is of."""
        sources, features = super().encode_all(trajectories, add_generation_prompt)
        for feature in features:
            size = len(feature["input_ids"])
            feature["attention_mask"] = np.ones(size, np.int32)
            feature["position_ids"] = np.arange(size)
            feature["length"] = size
        return sources, features

    def check(self, trajectory: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return a conversation if it can be encoded; None if not."""
        try:
            return trajectory if self.batch_encode([trajectory]) else None
        except ValueError:
            return None

    def batch_check(self, trajectories: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Check several."""
        return [self.check(trajectory) for trajectory in trajectories]

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        """Return the text of tokens."""
        return self.tokenizer.decode(token_ids, **options)

    def batch_decode(self, token_ids: Sequence[Sequence[int]], **options: Any) -> list[str]:
        """Return the texts of several."""
        return [self.decode(ids, **options) for ids in token_ids]


class Qwen3_5Template(Template):  # noqa: N801  (Twinkle's name)
    """The template of Qwen3.5 and Qwen3 checkpoints: text only."""
