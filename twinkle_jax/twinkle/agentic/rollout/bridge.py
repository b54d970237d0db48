"""`twinkle_agentic.rollout.bridge`: what is said between two turns of the assistant, as tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from twinkle_jax.data import Template
from twinkle_jax.data.trajectory import extend_feature


def extend_with_bridge(
    pif: Mapping[str, Any], tool_messages: Sequence[Mapping[str, Any]], template: Any
) -> dict[str, Any]:
    """Append messages of tools, and where the assistant speaks next, without labels.

    Tokens so far stay as they are. A [`Template`][twinkle_jax.data.Template] of ours encodes what
    follows the assistant's last words, in which no text can pass for a control token; with another
    one, its tokenizer's chat template must extend what it rendered before.

    Args:
        pif: an input feature with `messages`.
        tool_messages: what tools answered.
        template: encodes them.

    Returns:
        The longer feature.

    Raises:
        RuntimeError: if labels and tokens are not as many, or the chat template does not extend
            the conversation.
    """
    before, new = list(pif.get("messages") or []), list(tool_messages)
    count = len(pif["input_ids"])
    labels = pif.get("labels")
    if labels is not None and len(labels) not in (0, count):
        raise RuntimeError(f"labels length must be that of input_ids, {count}, got {len(labels)}")
    if isinstance(template, Template):
        return as_lists(template.extend_input_feature(pif, new))
    render = template.tokenizer.apply_chat_template
    short = render(before, tokenize=False, add_generation_prompt=False)
    longer = render([*before, *new], tokenize=False, add_generation_prompt=True)
    if not longer.startswith(short):
        raise RuntimeError(
            "chat template must render a longer conversation as a prefix-extension of the shorter "
            f"one, got {longer[-80:]!r} after {short[-80:]!r}"
        )
    if longer == short:
        raise RuntimeError("chat template must render messages of tools, got an empty string")
    tokens = template.tokenizer.encode(longer[len(short) :], add_special_tokens=False)
    extended = extend_feature(pif, tokens, labelled=False)
    return as_lists(extended) | {"messages": [*before, *new]}


def as_lists(value: Any) -> Any:
    """Turn arrays, at any depth, into lists and numbers."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: as_lists(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(as_lists(x) for x in value)
    return value
