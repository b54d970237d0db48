"""Tokenizers in Hugging Face's files, read with the `tokenizers` library alone."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from twinkle_jax.data.control_tokens import ControlTokens
from twinkle_jax.data.missing_extra import require

if TYPE_CHECKING:
    import tokenizers

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


class Tokenizer:
    """A tokenizer and what its files say beside it: special tokens and a chat template.

    Args:
        backend: of the `tokenizers` library.
        config: what `tokenizer_config.json` holds: `eos_token`, `chat_template` and the like.
        generation_config: what `generation_config.json` holds, of which `eos_token_id` is read.

    Attributes:
        backend: the tokenizer of the `tokenizers` library.
        config: as given.
        chat_template: the source of the chat template, or None.
        control: tells control tokens from text that spells them.
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
    def from_pretrained(cls, path_or_id: str | Path) -> Self:
        """Read a tokenizer.

        Args:
            path_or_id: a directory with `tokenizer.json`, and `tokenizer_config.json` as a rule;
                or a hub id, which needs huggingface_hub.

        Returns:
            The tokenizer.

        Raises:
            ValueError: if a file is missing, or is not what it should be.
            ImportError: if tokenizers is not installed.
        """
        require("tokenizers", "data")
        import tokenizers

        directory = _directory(path_or_id)
        try:
            backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{directory / 'tokenizer.json'} must be readable: {error}") from None
        config = _read_json(directory / "tokenizer_config.json")
        template = directory / "chat_template.jinja"
        if template.is_file():
            config["chat_template"] = template.read_text(encoding="utf-8")
        return cls(backend, config, _read_json(directory / "generation_config.json"))

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the files that `from_pretrained`, transformers and vLLM read."""
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(path / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.config}
        text = json.dumps(config, ensure_ascii=False, indent=2)
        (path / "tokenizer_config.json").write_text(text, encoding="utf-8")

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
        """The token that fills up rows; the one that ends a sequence if there is no other."""
        own = self._id_of("pad_token")
        return self.eos_token_id if own is None else own

    @property
    def stop_token_ids(self) -> list[int]:
        """All tokens at which a completion ends, the tokenizer's own first."""
        given = self.generation_config.get("eos_token_id")
        given = given if isinstance(given, list) else [given]
        ids = [self.eos_token_id, *given]
        return list(dict.fromkeys(id_ for id_ in ids if id_ is not None))

    def encode(self, text: str) -> list[int]:
        """Encode text that is only text: what spells a special token in it is spelled out.

        Args:
            text: any text.

        Returns:
            Token ids, nothing added to them.

        Raises:
            ValueError: if the tokenizer can write a part of the text as a special token only.
        """
        return self.control.encode(self.control.hide(text)).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Turn token ids into text.

        Args:
            ids: token ids.
            skip_special_tokens: whether to leave special tokens out.

        Returns:
            The text.
        """
        plain = [int(id_) for id_ in ids]
        return str(self.backend.decode(plain, skip_special_tokens=skip_special_tokens))

    def _id_of(self, name: str) -> int | None:
        token = self.config.get(name)
        token = token.get("content") if isinstance(token, Mapping) else token
        if token is None:
            return None
        id_ = self.backend.token_to_id(token)
        if id_ is None:
            raise ValueError(f"{name} must be a token of the vocabulary, got {token!r}")
        return int(id_)


def _default_template(given: Any) -> str | None:
    """Choose among several templates, which some tokenizers have, the one called default."""
    if isinstance(given, list):
        given = {entry["name"]: entry["template"] for entry in given}
    if isinstance(given, Mapping):
        given = given.get("default")
    return given


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON: {error}") from None
    if not isinstance(read, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(read).__name__}")
    return read


def _directory(path_or_id: str | Path) -> Path:
    directory = Path(path_or_id).expanduser()
    if not directory.is_dir():
        if not isinstance(path_or_id, str) or not _HUB_ID.fullmatch(path_or_id):
            raise ValueError(
                f"path_or_id must be a directory or a hub id 'owner/name', got {str(path_or_id)!r}"
            )
        require("huggingface_hub", "checkpoints")
        from huggingface_hub import snapshot_download

        directory = Path(snapshot_download(str(path_or_id), allow_patterns=list(_FILES)))
    if not (directory / "tokenizer.json").is_file():
        found = sorted(path.name for path in directory.iterdir())[:10]
        raise ValueError(f"{directory} must hold tokenizer.json, got {found}")
    return directory
