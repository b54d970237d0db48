"""Conversations and their token ids: dictionaries with Twinkle's keys."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import numpy as np

TokenIds = Sequence[int] | np.ndarray[Any, Any]
"""Token ids or labels of one sequence."""
IGNORE = -100
"""The label of positions without a loss."""


class FunctionCall(TypedDict, total=False):
    """The name of a function and its arguments: a dictionary, or JSON where a template wants it."""

    name: str
    arguments: str | dict[str, Any]


class ToolCall(TypedDict, total=False):
    """A call of a tool, in OpenAI's shape: `{'type': 'function', 'function': …}`."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionSpec(TypedDict, total=False):
    """The name of a function, what it does, and the JSON schema of its parameters."""

    name: str
    description: str
    parameters: str | dict[str, Any]


class Tool(TypedDict, total=False):
    """A tool that may be called, in OpenAI's shape: `{'type': 'function', 'function': …}`."""

    type: Literal["function"]
    function: FunctionSpec


class Message(TypedDict, total=False):
    """One turn of a conversation.

    `content` is a string, or a list of parts such as `{'type': 'text', 'text': '…'}`.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[dict[str, str]]
    tool_calls: list[ToolCall]
    reasoning_content: str


class Trajectory(TypedDict, total=False):
    """A conversation, the tools that it may call, and the user's data about it.

    `user_data` is a list of pairs of a name and a value, such as `[('ground_truth', '42')]`.
    `completion_length` counts the tokens that were sampled last.
    """

    messages: list[Message]
    tools: list[Tool]
    user_data: list[tuple[str, Any]]
    completion_length: int


class InputFeature(TypedDict, total=False):
    """The tokens and labels of a conversation; a trajectory's keys may stand beside these.

    `labels` holds at each position the token that follows, which the logits there predict, and
    −100 where there is no loss.
    """

    input_ids: TokenIds
    labels: TokenIds
    attention_mask: TokenIds
    position_ids: TokenIds
    length: int
    messages: list[Message]
    tools: list[Tool]
    user_data: list[tuple[str, Any]]


def user_data_get(
    user_data: Mapping[str, Any] | Sequence[Sequence[Any]] | None, key: str, default: Any = None
) -> Any:
    """Look up a value in a trajectory's `user_data`.

    Args:
        user_data: pairs of a name and a value, or a dictionary, or None.
        key: the name.
        default: what is returned where the name is missing.

    Returns:
        The value of the first pair with this name.

    Raises:
        ValueError: if an entry is not a pair.

    Example:
        >>> user_data_get([("ground_truth", "42"), ("level", 3)], "ground_truth")
        '42'
    """
    pairs = user_data.items() if isinstance(user_data, Mapping) else user_data or ()
    for pair in pairs:
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise ValueError(f"user_data must be pairs of a name and a value, got {pair!r}")
        if pair[0] == key:
            return pair[1]
    return default


def copy_trajectory(trajectory: Mapping[str, Any]) -> Trajectory:
    """Copy a trajectory, so that changes of the copy leave the original as it is.

    Args:
        trajectory: dictionaries and lists are copied at every depth, values in `user_data` too;
            anything else, such as arrays, is shared.

    Returns:
        The copy.

    Example:
        >>> prompt = Trajectory(messages=[{"role": "user", "content": " 1+1= "}])
        >>> copy = copy_trajectory(prompt)
        >>> copy["messages"][0]["content"] = "1+1="
        >>> prompt["messages"][0]["content"]
        ' 1+1= '
    """
    return _copy(dict(trajectory))


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_copy(x) for x in value]
    if isinstance(value, tuple):
        return tuple(_copy(x) for x in value)
    return value


def message_text(message: Mapping[str, Any]) -> str:
    """Join the text of all parts of a message.

    Args:
        message: with `content`, a string, a list of text parts, or None.

    Returns:
        The text, with nothing between the parts.

    Raises:
        ValueError: if a part is not text.

    Example:
        >>> message_text({"role": "user", "content": [{"type": "text", "text": "Hello"}]})
        'Hello'
    """
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list | tuple) else [content]
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise ValueError(f"a message's content must be text, got {part!r}")
        texts.append(text)
    return "".join(texts)


def completion_text(trajectory: Mapping[str, Any]) -> str:
    """Return the text of the assistant's last message; empty if there is none.

    Args:
        trajectory: with `messages`.

    Returns:
        The text of the last message whose role is assistant.

    Example:
        >>> turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
        >>> completion_text({"messages": turns})
        '2'
    """
    for message in reversed(trajectory.get("messages") or ()):
        if message.get("role") == "assistant":
            return message_text(message)
    return ""


def extend_feature(
    feature: Mapping[str, Any], tokens: list[int], *, labelled: bool
) -> InputFeature:
    """Copy a feature with tokens added.

    Args:
        feature: an input feature; its labels hold at each position the token that follows.
        tokens: what is added.
        labelled: whether the added tokens get labels, as sampled ones do.

    Returns:
        The longer feature. The last position before the new tokens predicts the first of them.
    """
    ids = np.asarray(feature["input_ids"], np.int32).reshape(-1)
    labels = feature.get("labels")
    labels = np.full(ids.shape, IGNORE) if labels is None else np.asarray(labels).reshape(-1)
    new = np.asarray(tokens, np.int32)
    if new.size:
        following = new if labelled else np.full(new.shape, IGNORE)
        labels = np.concatenate([labels[:-1], following, [IGNORE]])
    longer: Any = dict(feature)
    longer["input_ids"] = np.concatenate([ids, new])
    longer["labels"] = labels.astype(np.int32)
    if feature.get("attention_mask") is not None:
        mask = np.asarray(feature["attention_mask"]).reshape(-1)
        longer["attention_mask"] = np.concatenate([mask, np.ones(new.shape, mask.dtype)])
    if feature.get("position_ids") is not None:
        positions = np.asarray(feature["position_ids"]).reshape(-1)
        added = positions[-1:] + 1 + np.arange(new.size)
        longer["position_ids"] = np.concatenate([positions, added])
    if "length" in longer:
        longer["length"] = int(longer["input_ids"].size)
    return longer
