"""A tokenizer small enough for tests and for a policy that learns in a minute."""

from twinkle_jax.data.missing_extra import require
from twinkle_jax.data.tokenizer import Tokenizer

CONTROL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}{{ message['content'] }}{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def small_tokenizer(
    characters: str | None = None, *, chat_template: str = CHAT_TEMPLATE
) -> Tokenizer:
    """Make a tokenizer of single bytes, or of a few characters, with tokens for a chat.

    Control tokens come first: padding is 0, the end of a turn 1. A turn is a token for its role,
    its text, and the end.

    Args:
        characters: which characters there are; None for all 256 bytes, which can spell any text.
        chat_template: another template, of the same control tokens.

    Returns:
        The tokenizer, which `save_pretrained` writes in Hugging Face's format.

    Raises:
        ValueError: if a character is there twice.
        ImportError: if tokenizers is not installed.

    Example:
        >>> tokenizer = small_tokenizer("0123456789+=")
        >>> len(tokenizer), tokenizer.encode("12+3=")
        (19, [8, 9, 17, 10, 18])
    """
    require("tokenizers", "data")
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    symbols = list(characters or ())
    if len(set(symbols)) < len(symbols):
        raise ValueError(f"characters must be different from each other, got {characters!r}")
    control = [*CONTROL_TOKENS, *(["<|unknown|>"] if characters is not None else [])]
    if characters is None:
        symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*control, *symbols])}
    unknown = None if characters is None else "<|unknown|>"
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], unk_token=unknown))
    if characters is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
    else:
        backend.decoder = decoders.Fuse()
    backend.add_special_tokens(control)
    config = {
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "chat_template": chat_template,
        "clean_up_tokenization_spaces": False,
    }
    return Tokenizer(backend, config if unknown is None else {**config, "unk_token": unknown})
