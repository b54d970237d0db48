"""Twinkle's `Template`: conversations become tokens and labels, and go on after sampling."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from twinkle_jax.data.chat_template import ChatTemplate
from twinkle_jax.data.extend_feature import extend_feature
from twinkle_jax.data.rendering import Rendering
from twinkle_jax.data.tokenizer import Tokenizer
from twinkle_jax.data.trajectory import IGNORE, InputFeature, Message

_ROLE = re.compile("[A-Za-z_]+")
_KEPT = ("messages", "tools", "user_data")


class Template:
    """Encodes conversations with the chat template of a tokenizer.

    Text never becomes a control token, so no message can forge a role. Tokens that were sampled
    stay as they are, over any number of turns: they are not decoded and encoded again.

    Args:
        model_id: a tokenizer, or what `Tokenizer.from_pretrained` takes: a directory or a hub id.
        use_chat_template: False encodes the one message there is as plain text.
        max_length: the most tokens of a conversation; None for no limit.
        truncation_strategy: what is done with longer ones: `'raise'` an error, or cut `'left'` or
            `'right'`.
        default_system: a system message for conversations without one.
        chat_template: another chat template than the tokenizer's.
        template_variables: what else the chat template asks for, `enable_thinking` for one.

    Raises:
        ValueError: if there is no chat template, or an argument is out of range.

    Example:
        >>> from twinkle_jax.data import small_tokenizer
        >>> template = Template(small_tokenizer())
        >>> feature = template.encode({"messages": [{"role": "user", "content": "2+2="}]},
        ...                           add_generation_prompt=True)
        >>> template.tokenizer.decode(feature["input_ids"], skip_special_tokens=False)
        '<|user|>2+2=<|end|><|assistant|>'
    """

    def __init__(
        self,
        model_id: str | Path | Tokenizer,
        use_chat_template: bool = True,
        max_length: int | None = 8192,
        truncation_strategy: Literal["raise", "left", "right"] = "raise",
        default_system: str | None = None,
        *,
        chat_template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> None:
        if truncation_strategy not in ("raise", "left", "right"):
            raise ValueError(
                "truncation_strategy must be 'raise', 'left' or 'right', "
                f"got {truncation_strategy!r}"
            )
        if max_length is not None and (not isinstance(max_length, int) or max_length < 1):
            raise ValueError(f"max_length must be None or a positive int, got {max_length!r}")
        self.tokenizer = (
            model_id if isinstance(model_id, Tokenizer) else Tokenizer.from_pretrained(model_id)
        )
        source = chat_template or self.tokenizer.chat_template
        if use_chat_template and source is None:
            raise ValueError("the tokenizer must have a chat_template, got none: pass one")
        self.chat_template = ChatTemplate(source) if use_chat_template and source else None
        self.max_length, self.truncation_strategy = max_length, truncation_strategy
        self.default_system = default_system
        self._variables = dict(template_variables or {})

    def encode(
        self, trajectory: Mapping[str, Any], add_generation_prompt: bool = False
    ) -> InputFeature:
        """Encode a conversation.

        Args:
            trajectory: with `messages`, and maybe `tools` and `user_data`.
            add_generation_prompt: True ends where the assistant begins to speak, without labels;
                False labels what the assistant said, the tokens that end its turns included.

        Returns:
            `input_ids` and `labels`, beside what the trajectory held.

        Raises:
            ValueError: if a message has no role or text, the template refuses the conversation,
                or it is too long.
        """
        kept: Any = {key: trajectory[key] for key in _KEPT if trajectory.get(key) is not None}
        kept["messages"] = messages = self._messages(trajectory)
        encoded, spans = self._rendering().encode(
            messages, trajectory.get("tools"), prompt=add_generation_prompt
        )
        ids, starts = np.asarray(encoded.ids, np.int32), np.asarray(encoded.starts)
        said = np.zeros(ids.shape, bool)
        for begin, end in spans:
            said |= (begin <= starts) & (starts < end)
        if not ids.size:
            raise ValueError("a trajectory must give at least one token, got none")
        cut = self._cut(ids.size)
        own = np.where(said, ids, IGNORE)[cut]  # each token, where the assistant said it
        labels = np.append(own[1:], IGNORE).astype(np.int32)
        feature: InputFeature = {"input_ids": ids[cut], "labels": labels}
        feature.update(kept)
        return feature

    def batch_encode(
        self, trajectories: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False
    ) -> list[InputFeature]:
        """Encode several conversations."""
        return [self.encode(x, add_generation_prompt=add_generation_prompt) for x in trajectories]

    def concat_input_feature(
        self, prompt_input_feature: Mapping[str, Any], new_tokens: Sequence[int]
    ) -> InputFeature:
        """Add sampled tokens, which are labelled and said by the assistant.

        Args:
            prompt_input_feature: what was sampled from.
            new_tokens: what was sampled, the token that ended it included.

        Returns:
            A new feature: the ids as they are, labels kept and added, a message more.
        """
        tokens = [int(token) for token in new_tokens]
        feature = extend_feature(prompt_input_feature, tokens, labelled=True)
        if "messages" in feature:
            said = Message(role="assistant", content=self.tokenizer.decode(tokens))
            feature["messages"] = [*feature["messages"], said]
        return feature

    def extend_input_feature(
        self,
        feature: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
    ) -> InputFeature:
        """Add a turn of others after sampled tokens, so that the assistant can speak again.

        Args:
            feature: ending with what the assistant said, as `concat_input_feature` returns it.
            messages: what the user or a tool says next.
            add_generation_prompt: whether the assistant shall speak after that.

        Returns:
            A new feature: all ids so far as they are, the new turn's without labels.

        Raises:
            ValueError: if the assistant has not spoken last, or the template hides what it said.
        """
        before = list(feature.get("messages") or ())
        if self.chat_template is None or not before or before[-1].get("role") != "assistant":
            raise ValueError("feature must end with a message of the assistant, to be continued")
        tokens = self._rendering().encode_after(
            before, messages, feature.get("tools"), prompt=add_generation_prompt
        )
        if tokens and tokens[0] == int(np.asarray(feature["input_ids"])[-1]):
            tokens = tokens[1:]  # the assistant ended its turn itself
        grown = extend_feature(feature, tokens, labelled=False)
        grown["messages"] = [*before, *messages]  # type: ignore[list-item]
        return grown

    # Inside.

    def _messages(self, trajectory: Mapping[str, Any]) -> list[Message]:
        messages = trajectory.get("messages")
        if not isinstance(messages, list | tuple) or not messages:
            raise ValueError(f"messages must be a list that is not empty, got {messages!r}")
        for i, message in enumerate(messages):
            role = message.get("role") if isinstance(message, Mapping) else None
            if not isinstance(role, str) or not _ROLE.fullmatch(role):
                raise ValueError(f"messages[{i}] must have a role, a word, got {message!r}")
        if self.default_system and messages[0]["role"] != "system":
            return [Message(role="system", content=self.default_system), *messages]
        return list(messages)

    def _rendering(self) -> Rendering:
        return Rendering(self.tokenizer, self.chat_template, self._variables)

    def _cut(self, length: int) -> slice:
        if self.max_length is None or length <= self.max_length:
            return slice(None)
        if self.truncation_strategy == "raise":
            raise ValueError(
                f"a trajectory must have at most max_length={self.max_length} tokens, got {length}"
            )
        left = self.truncation_strategy == "left"
        return slice(length - self.max_length, None) if left else slice(self.max_length)
