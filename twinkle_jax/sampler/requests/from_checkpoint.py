"""What a checkpoint says to a sampler: a template, and how long rows may be."""

import json
from pathlib import Path

from twinkle_jax.data.template import Template
from twinkle_jax.model.decoder.config import DecoderConfig

_LONGEST = 4096  # where the checkpoint does not ask for less


def own_template(source: Path | None) -> Template | None:
    """Make a template of the tokenizer beside a checkpoint, if there is one."""
    if source is None or not (Path(source) / "tokenizer.json").is_file():
        return None
    template = Template(source, use_chat_template=False, max_length=None)
    chats = template.tokenizer.chat_template is not None
    return Template(template.tokenizer, max_length=None) if chats else template


def longest_row(given: int | None, config: DecoderConfig) -> int:
    """Say how many tokens a row may have, prompt included.

    Raises:
        ValueError: if there is no room for a prompt and a completion.
    """
    if given is not None and given < 2:
        raise ValueError(f"max_length must be at least 2, got {given}")
    original = json.loads(config.original or "{}")
    text = original.get("text_config", original)
    return given or min(int(text.get("max_position_embeddings", _LONGEST)), _LONGEST)
