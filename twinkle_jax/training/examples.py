"""Supervised learning: conversations from a file take the place of sampled completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from twinkle_jax.data import IGNORE, Batch, Message, PromptBatch, Trajectory, user_data_get
from twinkle_jax.data.batch import make_batch
from twinkle_jax.data.template import Template
from twinkle_jax.model import Params
from twinkle_jax.rollout import Rollout, RolloutConfig

_ENCODED_AT_ONCE = 4096  # examples


@dataclass(frozen=True)
class ExampleSource:
    """Lays examples out to learn from; nothing is sampled, and nothing has a reward.

    Attributes:
        template: of the policy.
        settings: `max_episode_tokens` is the most tokens of an example.
        width_multiple: the width of a batch is a multiple of this.
    """

    template: Template
    settings: RolloutConfig
    width_multiple: int = 1

    def sample(self, params: Params, prompts: PromptBatch, key: jax.Array) -> Rollout:
        """Lay examples out; labels are the tokens of the assistant's turns."""
        batch, row_lengths = example_rows(self.template, prompts, multiple=self.width_multiple)
        conversations = PromptBatch(conversations_of(prompts))
        return Rollout(
            batch,
            list(conversations),
            conversations.ground_truths,
            lengths=np.sum(np.asarray(batch.labels) != IGNORE, axis=1),
            row_lengths=row_lengths,
            truncated=np.zeros(len(conversations), bool),
        )

    def score(self, rollout: Rollout) -> Rollout:
        """Give no reward, NaN, to each example."""
        return rollout._replace(rewards=np.full(len(rollout.lengths), np.nan, np.float32))

    def greedy_rewards(
        self, params: Params, prompts: PromptBatch, key: jax.Array
    ) -> np.ndarray[Any, Any]:
        """Give no reward, NaN, to each example."""
        return np.full(len(prompts), np.nan, np.float32)


def example_rows(
    template: Template, examples: Sequence[Trajectory], *, multiple: int = 1
) -> tuple[Batch, np.ndarray[Any, np.dtype[np.int32]]]:
    """Make a batch of examples, and count the columns of each row without padding.

    Labels are on the tokens of the assistant's turns. Where an example has no such turn, its ground
    truth is the answer. A pair makes two rows, the first with the chosen answer.
    """
    rows = _encode(template, conversations_of(examples))
    lengths = np.asarray([len(row["input_ids"]) for row in rows], np.int32)
    batch = make_batch(rows, {}, rows=len(rows), multiple=multiple)
    # Rows without padding between tokens need neither a mask nor positions.
    return Batch(tokens=batch.tokens, labels=batch.labels), lengths


def conversations_of(examples: Sequence[Trajectory]) -> list[Trajectory]:
    """Make two conversations of each pair, with the chosen and with the rejected answer."""
    conversations = []
    for example in examples:
        conversations.append(example)
        rejected = user_data_get(example.get("user_data"), "rejected")
        if rejected is not None:
            conversations.append({**example, "messages": rejected})
    return conversations


def check_examples(
    template: Template, examples: Sequence[Trajectory], *, longest: int, argument: str
) -> None:
    """Refuse examples that the template cannot write, that are too long or have nothing to learn.

    Raises:
        ValueError: for the first of them, by its number and the option that names the file.
    """
    for start in range(0, len(examples), _ENCODED_AT_ONCE):
        numbered = [
            (f"example {number} of {argument}", conversation)
            for number, example in enumerate(examples[start : start + _ENCODED_AT_ONCE], start + 1)
            for conversation in conversations_of([example])
        ]
        try:
            rows = _encode(template, [conversation for _, conversation in numbered])
        except (TypeError, ValueError):
            for called, conversation in numbered:
                _check_example(template, conversation, called)
            raise
        for (called, _), row in zip(numbered, rows, strict=True):
            length = len(row["input_ids"])
            if length > longest:
                raise ValueError(
                    f"rollout.max_episode_tokens must be at least the tokens of each example, got "
                    f"{longest} for {length} of {called}"
                )
            if not np.any(np.asarray(row["labels"]) != IGNORE):
                raise ValueError(f"{called} must have tokens of the assistant, got none")


def _check_example(template: Template, example: Trajectory, called: str) -> None:
    try:
        _encode(template, [example])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{called} must suit the chat template: {error}") from error


def _encode(template: Template, examples: Sequence[Trajectory]) -> list[Any]:
    conversations: list[dict[str, Any]] = []
    for example in examples:
        messages = list(example["messages"])
        if not any(message["role"] == "assistant" for message in messages):
            truth = str(user_data_get(example.get("user_data"), "ground_truth"))
            messages.append(Message(role="assistant", content=truth))
        conversation: dict[str, Any] = {"messages": messages}
        if "tools" in example:
            conversation["tools"] = example["tools"]
        conversations.append(conversation)
    return [template.with_last_end(row) for row in template.batch_encode(conversations)]
