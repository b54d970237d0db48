"""Tokens of a conversation in which no text can pass for a control token.

Where a message's text spells a control token, the first character of it is hidden before the
template is rendered, and shown again afterwards. So a control token that is found in what was
rendered is the template's own, and everything else is encoded as plain text. Where nothing had to
be hidden, which is nearly always, the whole is encoded at once, as transformers does it.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import tokenizers

_SIGN = "\ue0f7"  # a private character; where a text has it, it is hidden too
_HIDDEN = re.compile(f"{_SIGN}([0-9a-fA-F]+){_SIGN}")


class Encoded(NamedTuple):
    """Token ids, and where in the text each begins."""

    ids: list[int]
    starts: list[int]
    text: str


class ControlTokens:
    """What hides control tokens in messages, and encodes what was rendered.

    Control tokens are the special ones, and the added ones that the chat template writes, `<think>`
    for one, which only the assistant and the system may write too. Others, which some tokenizers
    have for blank lines or HTML, are text.

    Args:
        backend: the tokenizer of the `tokenizers` library whose tokens they are.
        chat_template: the source of its chat template, or None.
    """

    def __init__(self, backend: "tokenizers.Tokenizer", chat_template: str | None) -> None:
        self._backend = backend
        self._plain: Any = None
        added = backend.get_added_tokens_decoder()
        self._ids = {token.content: id_ for id_, token in added.items()}
        self._strips = {token.content: (token.lstrip, token.rstrip) for token in added.values()}
        self._special = [token.content for token in added.values() if token.special]
        self._unknown = getattr(self._backend.model, "unk_token", None)  # not a forgery
        template = chat_template or ""
        written = [token for token in self._ids if token.strip() and token in template]
        self._hidden = list({*self._special, *written})
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def hide(self, value: Any, *, trusted: bool = False) -> Any:
        """Hide what spells control tokens in all strings of a message, or of other JSON.

        Args:
            value: strings, dictionaries and lists of them, and what else JSON has.
            trusted: whether tokens that are not special may be written, `<think>` for one.

        Returns:
            A copy with those strings in which something was hidden.
        """
        if isinstance(value, Mapping):
            return {key: self.hide(x, trusted=trusted) for key, x in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(x, trusted=trusted) for x in value]
        if isinstance(value, str):
            return self._hide(value, self._special if trusted else self._hidden)
        return value

    def _hide(self, text: str, tokens: list[str]) -> str:
        at = {match.start() for match in re.finditer(_SIGN, text)}
        for token in tokens:
            at.update(match.start() for match in re.finditer(f"(?={re.escape(token)})", text))
        at.update(_at_edges(text, tokens))
        return "".join(_hidden(c) if i in at else c for i, c in enumerate(text)) if at else text

    def ends_with_special(self, rendered: str) -> bool:
        """Whether the last that was rendered is a special token."""
        return rendered.endswith(tuple(self._special))

    def encode(self, rendered: str) -> Encoded:
        """Encode what was rendered of hidden messages."""
        text = show(rendered)
        if text == rendered:
            whole = self._backend.encode(text, add_special_tokens=False)
            control = {id_ for token, id_ in self._ids.items() if token != self._unknown}
            found = sum(id_ in control for id_ in whole.ids)
            if found == len(self._pattern.findall(text)):
                return Encoded(list(whole.ids), [start for start, _ in whole.offsets], text)
        return self._encode_pieces(rendered, text)

    def _encode_pieces(self, rendered: str, text: str) -> Encoded:
        encoded = Encoded([], [], text)
        at, begin, strip = 0, 0, False
        for match in [*self._pattern.finditer(rendered), None]:
            piece = show(rendered[begin : match.start() if match else None])
            strip_end = match is not None and self._strips[match.group()][0]
            kept = piece.rstrip() if strip_end else piece
            kept = kept.lstrip() if strip else kept
            ids, starts = self._encode_text(kept)
            offset = at + (len(piece) - len(piece.lstrip()) if strip else 0)
            encoded.ids.extend(ids)
            encoded.starts.extend(offset + start for start in starts)
            at += len(piece)
            if match is not None:
                encoded.ids.append(self._ids[match.group()])
                encoded.starts.append(at)
                strip = self._strips[match.group()][1]
                at, begin = at + len(match.group()), match.end()
        return encoded

    def _encode_text(self, text: str) -> tuple[list[int], list[int]]:
        """Encode without the added tokens, which the library would find in any text."""
        if self._plain is None:
            import tokenizers

            parts = json.loads(self._backend.to_str())
            without = parts | {"added_tokens": [], "post_processor": None}
            self._plain = tokenizers.Tokenizer.from_str(json.dumps(without))
        found = self._plain.encode(text, add_special_tokens=False)
        forged = [token for token in self._special if self._ids[token] in found.ids]
        if forged and forged != [self._unknown]:
            raise ValueError(f"text must not spell special tokens, got {forged} in {text[:80]!r}")
        return list(found.ids), [start for start, _ in found.offsets]


def show(rendered: str) -> str:
    """Show again what was hidden."""
    return _HIDDEN.sub(lambda match: chr(int(match.group(1), 16)), rendered)


def _hidden(character: str) -> str:
    return f"{_SIGN}{ord(character):x}{_SIGN}"


def _at_edges(text: str, tokens: Iterable[str]) -> set[int]:
    """Find the edge characters with which a neighbouring text could complete a control token."""
    stripped = text.strip()
    if not stripped:
        return set()
    first = len(text) - len(text.lstrip())
    at = set()
    for token in tokens:
        parts = range(1, len(token))
        if any(stripped.startswith(token[-n:]) for n in parts):
            at.add(first)
        if any(stripped.endswith(token[:n]) for n in parts):
            at.add(first + len(stripped) - 1)
    return at
