"""Conversations as the text of a chat template, and which of it the assistant said.

What messages say is hidden from the template's own control tokens while it runs, so that no message
can forge one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle_jax.data.chat_template import ChatTemplate
from twinkle_jax.data.control_tokens import Encoded, show
from twinkle_jax.data.tokenizer import Tokenizer
from twinkle_jax.data.trajectory import message_text

_MARK = "\ue0f8"  # stands for the assistant's last words, to find what follows them
_TRUSTED = ("assistant", "system")  # may write <think> and the like, but no special token

Messages = Sequence[Mapping[str, Any]]
Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class Rendering:
    """A chat template with what it is run with.

    Attributes:
        tokenizer: makes tokens of the text.
        chat_template: None: a conversation is one message, its text.
        variables: what else the chat template asks for.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    variables: Mapping[str, Any]

    def encode(self, messages: Messages, tools: Any, *, prompt: bool) -> tuple[Encoded, Spans]:
        """Encode messages, and say from where to where in the text the assistant spoke.

        With `prompt` the text ends where the assistant begins to speak, and nothing is its own.
        """
        if self.chat_template is None:
            encoded = self._plain(messages)
            return encoded, [] if prompt else [(0, len(encoded.text))]
        hidden = [self._hidden(message) for message in messages]
        text = self._render(hidden, tools, prompt)
        spans = [] if prompt else self._spans(hidden, tools, text)
        return self.tokenizer.control.encode(text), spans

    def encode_after(
        self, before: Messages, messages: Messages, tools: Any, *, prompt: bool
    ) -> list[int]:
        """Encode what stands behind the assistant's last words, `before` ending with them."""
        hidden = [self._hidden(message) for message in [*before, *messages]]
        hidden[len(before) - 1]["content"] = _MARK
        _, mark, after = self._render(hidden, tools, prompt).rpartition(_MARK)
        if not mark:
            raise ValueError("chat_template must render the assistant's last message, it does not")
        return self.tokenizer.control.encode(after).ids

    def _hidden(self, message: Mapping[str, Any]) -> dict[str, Any]:
        read = {**message, "content": message_text(message)}
        trusted = message["role"] in _TRUSTED
        return dict(self.tokenizer.control.hide(read, trusted=trusted))

    def _plain(self, messages: Messages) -> Encoded:
        if len(messages) != 1:
            raise ValueError(f"messages must be one without chat template, got {len(messages)}")
        text = message_text(messages[0])
        return self.tokenizer.control.encode(self.tokenizer.control.hide(text))

    def _render(self, messages: Any, tools: Any, prompt: bool) -> str:
        assert self.chat_template is not None
        special = {
            name: token.get("content") if isinstance(token, Mapping) else token
            for name, token in self.tokenizer.config.items()
            if name.endswith("_token") and isinstance(token, str | Mapping)
        }
        tools = self.tokenizer.control.hide(tools)
        variables = {**special, **self.variables}
        return self.chat_template.render(messages, tools, add_generation_prompt=prompt, **variables)

    def _spans(self, hidden: Messages, tools: Any, text: str) -> Spans:
        """Find from where to where the assistant spoke, in what is shown of the text."""
        spans = []
        for i, message in enumerate(hidden):
            if message["role"] != "assistant":
                continue
            before = self._render(hidden[:i], tools, True)
            until = self._render(hidden[: i + 1], tools, False)
            if not (until.startswith(before) and text.startswith(until)):
                raise ValueError(
                    f"messages[{i}] must be rendered in the same way whatever follows it, and "
                    "after the generation prompt, which this chat_template does not: encode each "
                    "turn by itself, or add sampled tokens by concat_input_feature"
                )
            trailing = until.rstrip()
            ends = self.tokenizer.control.ends_with_special(trailing)
            spans.append((len(show(before)), len(show(trailing if ends else until))))
        return spans
