"""Tokenizers in Hugging Face's files, read with the `tokenizers` library alone.

Text is never encoded as a control token: see `ControlTokens`.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from twinkle_jax._package import require

if TYPE_CHECKING:
    import tokenizers

NAMED_TEMPLATES = "additional_chat_templates"  # a directory of NAME.jinja
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    f"{NAMED_TEMPLATES}/*.jinja",
    "generation_config.json",
    "config.json",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
# Words of a completion, even where a tokenizer calls them special: that of Hermes does.
_TAGS = (
    *("<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>"),
    *("<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),  # of gpt-oss
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),  # of GLM-4.5
    *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),  # of Gemma 4
)
_SIGN = "\ue0f7"  # around the code of a hidden character; hidden itself where a text has it
_HIDDEN = re.compile(f"{_SIGN}([0-9a-fA-F]+){_SIGN}")

# Of the small tokenizer.
CONTROL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_UNKNOWN = "<|unknown|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}{{ message['content'] }}{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class Tokenizer:
    """A tokenizer, its special tokens and its chat template.

    Args:
        backend: of the `tokenizers` library.
        config: the contents of `tokenizer_config.json`: `eos_token`, `chat_template` and the like.
        generation_config: the contents of `generation_config.json`; `eos_token_id` is read.

    Attributes:
        backend: the tokenizer of the `tokenizers` library.
        config: the contents of `tokenizer_config.json`.
        chat_template: the source of the chat template, or None.
    """

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        config: Mapping[str, Any] | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.config = dict(config or {})
        self.generation_config = dict(generation_config or {})
        self.chat_template = _default_template(self.config.get("chat_template"))
        self.control = ControlTokens(backend, self.chat_template)

    @classmethod
    def from_pretrained(cls, path_or_id: str | Path, *, argument: str = "path_or_id") -> Self:
        """Read a tokenizer.

        Args:
            path_or_id: a directory with `tokenizer.json`, and `tokenizer_config.json` as a rule;
                or a hub id, which needs huggingface_hub.
            argument: the user's name for `path_or_id` in errors.

        Returns:
            The tokenizer.

        Raises:
            ValueError: if a file is missing or cannot be read.
            ImportError: if tokenizers is not installed, or huggingface_hub for a hub id.
        """
        require("tokenizers", "data")
        import tokenizers

        directory = locate_tokenizer(path_or_id, argument)
        try:
            backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{directory / 'tokenizer.json'} must be readable: {error}") from None
        config = _read_json(directory / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # of an old checkpoint, as transformers reads it
            config |= _read_json(directory / "special_tokens_map.json")
        if templates := _read_templates(directory):
            config["chat_template"] = templates
        generation_config = _read_json(directory / "generation_config.json")
        if not generation_config:
            # transformers reads what ends a completion in the model's configuration then, or in
            # that of its text model.
            generation_config = _read_json(directory / "config.json")
            text = generation_config.get("text_config")
            if generation_config.get("eos_token_id") is None and isinstance(text, Mapping):
                generation_config = dict(text)
        return cls(backend, config, generation_config)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the files that `from_pretrained`, transformers and vLLM read.

        The chat templates go into `tokenizer_config.json`. Files with those of another tokenizer in
        the directory are deleted: they would be read in place of this one's. `generation_config` is
        not written.
        """
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        # Its own `save` raises no OSError, as for a full disk.
        (path / "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.config}
        text = json.dumps(config, ensure_ascii=False, indent=2)
        (path / "tokenizer_config.json").write_text(text, encoding="utf-8")
        for file in _template_files(path).values():
            file.unlink()

    def __len__(self) -> int:
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a sequence."""
        return self._id_of("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a sequence."""
        return self._id_of("bos_token")

    @property
    def pad_token_id(self) -> int | None:
        """The token that fills up rows; without one, the token that ends a sequence."""
        pad_token_id = self._id_of("pad_token")
        return self.eos_token_id if pad_token_id is None else pad_token_id

    @property
    def special_tokens(self) -> dict[str, Any]:
        """Texts of special tokens by their names, `bos_token` and the like, for chat templates."""
        return {
            name: token.get("content") if isinstance(token, Mapping) else token
            for name, token in self.config.items()
            if name.endswith("_token") and isinstance(token, str | Mapping)
        }

    @property
    def stop_token_ids(self) -> list[int]:
        """All tokens at which a completion ends, the tokenizer's own first."""
        configured = self.generation_config.get("eos_token_id")
        ids = [
            self.eos_token_id,
            *(configured if isinstance(configured, list) else [configured]),
        ]
        ids = [id_ for id_ in ids if id_ is not None]
        for id_ in ids:
            if type(id_) is not int or not 0 <= id_ < 2**31:
                raise ValueError(
                    f"eos_token_id must be a token id or a list of them, got {configured!r}"
                )
        return list(dict.fromkeys(ids))

    @property
    def around_text(self) -> tuple[list[int], list[int]]:
        """Tokens that the tokenizer adds before and after a text: `<bos>` of Llama and Gemma."""
        text = self.backend.encode("a", add_special_tokens=False).ids
        ids = self.backend.encode("a", add_special_tokens=True).ids
        starts = range(len(ids) - len(text), -1, -1)  # the last one, if "a" is no token
        start = next(i for i in starts if ids[i : i + len(text)] == text)
        return ids[:start], ids[start + len(text) :]

    def encode(self, text: str) -> list[int]:
        """Encode text without control tokens: text that spells one is encoded as characters.

        Args:
            text: any text.

        Returns:
            Token ids, without special tokens at the beginning or end.

        Raises:
            ValueError: if the tokenizer can encode a part of the text as a special token only, or
                the text has an unpaired surrogate.
        """
        return self.control.encode(self.control.hide(text)).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Turn token ids into text.

        Args:
            ids: token ids.
            skip_special_tokens: whether to leave special tokens out. `<think>`, `<answer>`,
                `<tool_call>` and their ends stay, even where the tokenizer calls them special, and
                so do those of other tool calls, such as `[TOOL_CALLS]`: rewards and parsers of tool
                calls look for them.

        Returns:
            The text.
        """
        plain = [int(id_) for id_ in ids]
        if skip_special_tokens and self.control.special_tags:
            plain = [id_ for id_ in plain if id_ not in self.control.special_ids]
            skip_special_tokens = False
        return str(self.backend.decode(plain, skip_special_tokens=skip_special_tokens))

    def _id_of(self, name: str) -> int | None:
        token = self.config.get(name)
        token = token.get("content") if isinstance(token, Mapping) else token
        if token is None:
            return None
        if not isinstance(token, str):
            raise ValueError(f"{name} must be text, or have it as 'content', got {token!r:.80}")
        id_ = self.backend.token_to_id(token)
        if id_ is None:
            raise ValueError(f"{name} must be a token of the vocabulary, got {token!r}")
        return int(id_)


def _default_template(source: Any) -> str | None:
    """Join the templates that a tokenizer has by name: `tool_use` where there are tools."""
    named = source
    if isinstance(source, list) and all(isinstance(entry, Mapping) for entry in source):
        named = {entry.get("name"): entry.get("template") for entry in source}
    template = named.get("default") if isinstance(named, Mapping) else named
    if not isinstance(template, str | None):
        raise ValueError(f"chat_template must be text, or texts by name, got {source!r:.80}")
    with_tools = named.get("tool_use") if isinstance(named, Mapping) else None
    if template is not None and isinstance(with_tools, str):
        # The signs + leave white space around the tags as it is; a line break at the end of a
        # template is not part of it.
        with_tools, without = with_tools.removesuffix("\n"), template.removesuffix("\n")
        return f"{{% if tools +%}}{with_tools}{{%+ else +%}}{without}{{%+ endif %}}"
    return template


def _template_files(directory: Path) -> dict[str, Path]:
    """Find the files of chat templates, by the names of the templates."""
    named = {file.stem: file for file in sorted((directory / NAMED_TEMPLATES).glob("*.jinja"))}
    default = directory / "chat_template.jinja"
    return ({"default": default} if default.is_file() else {}) | named


def _read_templates(directory: Path) -> str | list[dict[str, str]] | None:
    """Read the chat templates that have files, in the form of `tokenizer_config.json`."""
    files = _template_files(directory)
    texts = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    if list(texts) == ["default"]:
        return texts["default"]
    return [{"name": name, "template": text} for name, text in texts.items()]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON: {error}") from None
    if not isinstance(contents, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(contents).__name__}")
    return contents


def locate_tokenizer(path_or_id: str | Path, argument: str) -> Path:
    """Return the directory of a tokenizer; download a hub id. `argument` names it in errors."""
    if not isinstance(path_or_id, str | Path):
        raise TypeError(f"{argument} must be a directory or a hub id, got {path_or_id!r}")
    directory = Path(path_or_id).expanduser()
    if not directory.is_dir():
        if not isinstance(path_or_id, str) or not _HUB_ID.fullmatch(path_or_id):
            raise ValueError(
                f"{argument} must be a directory or a hub id 'owner/name', got {str(path_or_id)!r}"
            )
        require("huggingface_hub", "checkpoints")
        from huggingface_hub import snapshot_download

        try:
            directory = Path(snapshot_download(path_or_id, allow_patterns=list(_FILES)))
        except Exception as error:  # of the hub, the network or the disk
            raise ValueError(
                f"{argument} must be a directory, or a hub id that can be downloaded, got "
                f"{path_or_id!r}, which is no directory here: {error}"
            ) from error
    if not (directory / "tokenizer.json").is_file():
        files = sorted(path.name for path in directory.iterdir())[:10]
        raise ValueError(f"{argument} must hold tokenizer.json, got {directory} with {files}")
    return directory


class Encoded(NamedTuple):
    """Token ids, and where in the text each begins."""

    ids: list[int]
    starts: list[int]
    text: str


class ControlTokens:
    """Hides control tokens in the text of messages, so that no message can forge one.

    Where a message spells a control token, the first character of it is hidden before the chat
    template is rendered, and restored afterwards. So a control token in the rendered text is the
    template's own, and everything else is encoded as plain text. Where nothing had to be hidden,
    which is nearly always, the text is encoded at once, as transformers does it.

    Control tokens are the special tokens, and those added tokens that the chat template writes,
    such as `<think>`. The assistant and the system may write `<think>` and the like, even if the
    tokenizer calls them special. Other added tokens, which some tokenizers have for blank lines or
    HTML, are text.

    Attributes:
        special_tags: special tokens that are words of a completion: `<think>`, `<tool_call>`.
        special_ids: the ids of the other special tokens.
    """

    def __init__(self, backend: "tokenizers.Tokenizer", chat_template: str | None) -> None:
        self._backend = backend
        self._plain: Any = None
        added = backend.get_added_tokens_decoder()
        self._ids = {token.content: id_ for id_, token in added.items()}
        self._strips = {token.content: (token.lstrip, token.rstrip) for token in added.values()}
        special = [token.content for token in added.values() if token.special]
        self.special_tags = [token for token in special if token in _TAGS]
        self._special = [token for token in special if token not in _TAGS]
        self.special_ids = {self._ids[token] for token in self._special}
        self._unknown = getattr(self._backend.model, "unk_token", None)  # text encodes to it
        self._control_ids = {id_ for token, id_ in self._ids.items() if token != self._unknown}
        template = chat_template or ""
        written = [token for token in self._ids if token.strip() and token in template]
        self._of_special = _Spellings.of(self._special)
        self._of_hidden = _Spellings.of({*special, *written})
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def hide(self, value: Any, *, trusted: bool = False) -> Any:
        """Hide control tokens in all strings and keys of a copy of a message, or other JSON value.

        Trusted ones may write tokens that are not special, such as `<think>`.
        """
        spellings = self._of_special if trusted else self._of_hidden
        if isinstance(value, Mapping):
            # Only a key that spells a whole token: templates look up the others, such as `role`.
            return {
                _hide(key, spellings)
                if isinstance(key, str) and spellings.anywhere.search(key)
                else key: self.hide(x, trusted=trusted)
                for key, x in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.hide(x, trusted=trusted) for x in value]
        return _hide(value, spellings) if isinstance(value, str) else value

    def ends_with_special(self, rendered: str) -> bool:
        """Whether rendered text ends with a special token."""
        return rendered.endswith(tuple(self._special))

    def first_token(self, rendered: str) -> int | None:
        """Return the id of the control token that rendered text begins with, if there is one."""
        match = self._pattern.match(rendered)
        return self._ids[match.group()] if match else None

    def encode(self, rendered: str) -> Encoded:
        """Encode text that was rendered from messages in which control tokens are hidden."""
        text = show(rendered)
        try:
            text.encode()  # the library has no clear error for unpaired surrogates
        except UnicodeEncodeError as error:
            part = text[max(error.start - 20, 0) : error.end + 20]
            raise ValueError(
                "text must have no unpaired surrogates, as of bytes that are not UTF-8, got "
                f"{part!r}"
            ) from error
        if text == rendered:
            encoding = self._backend.encode(text, add_special_tokens=False)
            # As many control tokens as the text spells: none was made by normalisation.
            ids = encoding.ids
            if sum(id_ in self._control_ids for id_ in ids) == len(self._pattern.findall(text)):
                return Encoded(ids, [start for start, _ in encoding.offsets], text)
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
        encoding = self._plain.encode(text, add_special_tokens=False)
        ids = encoding.ids
        special = [*self._special, *self.special_tags]
        forged = [token for token in special if self._ids[token] in ids]
        if forged and forged != [self._unknown]:
            raise ValueError(f"text must not spell special tokens, got {forged} in {text[:80]!r}")
        return ids, [start for start, _ in encoding.offsets]


def show(rendered: str) -> str:
    """Restore hidden characters."""
    return _HIDDEN.sub(lambda match: chr(int(match.group(1), 16)), rendered)


def _hidden(character: str) -> str:
    return f"{_SIGN}{ord(character):x}{_SIGN}"


class _Spellings(NamedTuple):
    """How text may spell some control tokens."""

    anywhere: re.Pattern[str]  # matches where one of them begins, or the sign of hidden characters
    starts: tuple[str, ...]  # proper beginnings of them
    ends: tuple[str, ...]  # proper ends of them

    @classmethod
    def of(cls, tokens: Iterable[str]) -> Self:
        """Make them for some tokens."""
        tokens = sorted(tokens)
        return cls(
            re.compile(f"(?={'|'.join(map(re.escape, [_SIGN, *tokens]))})"),
            tuple({token[:n] for token in tokens for n in range(1, len(token))}),
            tuple({token[-n:] for token in tokens for n in range(1, len(token))}),
        )


def _hide(text: str, spellings: _Spellings) -> str:
    """Hide characters that spell a control token, or could with a neighbouring text."""
    at = {match.start() for match in spellings.anywhere.finditer(text)}
    stripped = text.strip()
    if stripped.startswith(spellings.ends):
        at.add(len(text) - len(text.lstrip()))
    if stripped.endswith(spellings.starts):
        at.add(len(text.rstrip()) - 1)
    return "".join(_hidden(c) if i in at else c for i, c in enumerate(text)) if at else text


def small_tokenizer(
    characters: str | None = None, *, chat_template: str = CHAT_TEMPLATE
) -> Tokenizer:
    """Make a tokenizer of single bytes, or of a few characters, with tokens for a chat.

    It is small enough for tests and for a policy that learns in a minute. Control tokens come
    first: padding is 0, the end of a turn 1. A turn is a token for its role, its text, and the end.

    Args:
        characters: its characters; None: all 256 bytes, which can spell any text.
        chat_template: another template, of the same control tokens.

    Returns:
        The tokenizer, which `save_pretrained` writes in Hugging Face's format.

    Raises:
        ValueError: if a character occurs twice.
        ImportError: if tokenizers is not installed.

    Example:
        >>> tokenizer = small_tokenizer("0123456789+=")
        >>> len(tokenizer), tokenizer.encode("12+3=")
        (19, [8, 9, 17, 10, 18])
    """
    require("tokenizers", "data")
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    config: dict[str, Any] = {
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "chat_template": chat_template,
        "clean_up_tokenization_spaces": False,
    }
    if characters is None:
        control, symbols = [*CONTROL_TOKENS], sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        config["unk_token"] = _UNKNOWN
        control, symbols = [*CONTROL_TOKENS, _UNKNOWN], list(characters)
        if len(set(symbols)) < len(symbols):
            raise ValueError(f"characters must be different from each other, got {characters!r}")
    vocabulary = {token: i for i, token in enumerate([*control, *symbols])}
    backend = Backend(models.BPE(vocabulary, merges=[], unk_token=config.get("unk_token")))
    if characters is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
    else:
        backend.decoder = decoders.Fuse()
    backend.add_special_tokens(control)
    return Tokenizer(backend, config)
