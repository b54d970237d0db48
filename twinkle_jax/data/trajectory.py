"""Conversations, input features, and what samplers take and return: Twinkle's keys and fields."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Literal, Self, TypedDict

import numpy as np

TokenIds = Sequence[int] | np.ndarray[Any, Any]
"""Token ids or labels of one sequence."""
IGNORE = -100
"""The label of positions without a loss."""
StopReason = Literal["length", "stop", "abort", "error"]
LogprobsKind = Literal["policy", "sampling"]


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

    `content` is a string, or a list of parts such as `{'type': 'text', 'text': '…'}`. A `weight` of
    0 leaves a turn of the assistant out of what is learned.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[dict[str, str]]
    tool_calls: list[ToolCall]
    reasoning_content: str
    weight: Literal[0, 1]


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
    """The tokens and labels of a conversation; it may have a trajectory's keys, too.

    `labels` holds at each position the token that follows, which the logits there predict, and
    −100 where there is no loss. `routed_experts`, [time, layers, chosen], are the experts that each
    token goes through in a mixture of experts. Where there are fewer than tokens, and where a
    number is that of no expert, the router chooses.
    """

    input_ids: TokenIds
    labels: TokenIds
    attention_mask: TokenIds
    position_ids: TokenIds
    routed_experts: Any
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


def make_trajectory(
    messages: list[Message], answer: str | None, columns: list[tuple[str, Any]], system: str | None
) -> Trajectory:
    """Make the trajectory of a problem: with a system message, if one is given and none is there.

    The answer comes first in `user_data`, as `'ground_truth'`, and the columns after it.
    """
    if system is not None and messages[0]["role"] != "system":
        messages = [Message(role="system", content=system), *messages]
    truth = [] if answer is None else [("ground_truth", answer)]
    return Trajectory(messages=messages, user_data=[*truth, *columns])


def copy_trajectory(trajectory: Mapping[str, Any]) -> Trajectory:
    """Copy a trajectory, so that changes of the copy leave the original as it is.

    Args:
        trajectory: dictionaries and lists are copied at every depth, values in `user_data` too;
            anything else, such as arrays, is shared.

    Returns:
        The copy.

    Raises:
        TypeError: if it is no dictionary.

    Example:
        >>> prompt = Trajectory(messages=[{"role": "user", "content": " 1+1= "}])
        >>> copy = copy_trajectory(prompt)
        >>> copy["messages"][0]["content"] = "1+1="
        >>> prompt["messages"][0]["content"]
        ' 1+1= '
    """
    if not isinstance(trajectory, Mapping):
        raise TypeError(f"a trajectory must be a dictionary, got {trajectory!r:.80}")
    return copy_nested(dict(trajectory))


def copy_nested(value: Any) -> Any:
    """Copy dictionaries, lists and tuples at every depth; anything else is shared."""
    if isinstance(value, dict):
        return {key: copy_nested(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        kinds = set(map(type, value))  # much faster than to look at each of many numbers
        nested = any(issubclass(kind, dict | list | tuple) for kind in kinds)
        items = [copy_nested(x) for x in value] if nested else value
        return tuple(items) if isinstance(value, tuple) else list(items)
    return value


class PromptBatch(list[Trajectory]):
    """Copies of prompts and their ground truths; changing them does not change the data set."""

    @classmethod
    def of(cls, prompts: Iterable[Trajectory]) -> "PromptBatch":
        """Return a batch as it is, and make one of other prompts."""
        return prompts if isinstance(prompts, cls) else cls(prompts)

    def __init__(self, trajectories: Iterable[Trajectory] = ()) -> None:
        super().__init__(copy_trajectory(trajectory) for trajectory in trajectories)

    @property
    def ground_truths(self) -> list[Any]:
        """`'ground_truth'` of each prompt's `user_data`, None where there is none."""
        return [user_data_get(prompt.get("user_data"), "ground_truth") for prompt in self]


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
    """Copy a feature with tokens added, which have labels if they were sampled.

    The last position before the new tokens predicts the first of them.
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


_Rule = tuple[Callable[[Any], bool], str, type[Any]]  # a test, its description, the type


def _integer(least: int, *special: int | None) -> _Rule:
    alternatives = "".join(f"{value} or " for value in special)

    def is_valid(value: Any) -> bool:
        return value in special or value >= least

    return is_valid, f"{alternatives}an int of at least {least}", Integral


def _number(is_valid: Callable[[float], bool], description: str) -> _Rule:
    return is_valid, description, Real


_ALLOWED = {
    "max_tokens": _integer(0, None),
    "seed": _integer(0, None),
    "top_k": _integer(1, -1),
    "logprobs": _integer(0, None),
    "prompt_logprobs": _integer(0, None),
    "num_samples": _integer(1),
    "temperature": _number(lambda x: 0 <= x < math.inf, "a finite number of at least 0"),
    "top_p": _number(lambda x: 0 < x <= 1, "a number in (0, 1]"),
    "min_p": _number(lambda x: 0 <= x <= 1, "a number in [0, 1]"),
    "repetition_penalty": _number(lambda x: 0 < x < math.inf, "a finite number above 0"),
}


@dataclass
class SamplingParams:
    """Parameters of sampling, checked when they are set.

    Attributes:
        max_tokens: maximum tokens of a completion; None: as many as the model allows. 0, together
            with `prompt_logprobs`, only scores prompts: trajectories are encoded without the
            generation prompt, and sequences have no tokens, and the prompt as `new_input_feature`.
        seed: of the random numbers; None: the sampler's own.
        stop: a string, strings, or token ids, at which a completion ends.
        include_stop_str_in_output: whether the stop string is part of the completion.
        temperature: what logits are divided by; 0 takes the most likely token.
        top_k: how many of the most likely tokens may be sampled; −1: all.
        top_p: the most likely tokens up to this total probability may be sampled.
        repetition_penalty: above 1, tokens that occurred before become less likely.
        logprobs: how many log-probabilities to return for each token. None, 0 and 1: the sampled
            token's only. More: also those of that many other likely tokens; on a vLLM server only.
        prompt_logprobs: how many likely tokens' log-probabilities to return for each token of the
            prompt, besides its own; None: no log-probabilities of the prompt.
        num_samples: completions of each prompt.
        min_p: tokens below this share of the most likely one's probability are not sampled.

    Raises:
        TypeError: for a value of another type.
        ValueError: for a value out of range.

    Example:
        >>> SamplingParams(max_tokens=64, temperature=0.7).top_k
        -1
        >>> SamplingParams(top_p=0)
        Traceback (most recent call last):
            ...
        ValueError: top_p must be a number in (0, 1], got 0
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_samples: int = 1
    min_p: float = 0.0

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ALLOWED:
            _check(name, value)
        elif name == "stop":
            value = _check_stops(value)
        elif name == "include_stop_str_in_output" and not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
        super().__setattr__(name, value)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make parameters from a dictionary; `max_new_tokens` is another name for `max_tokens`."""
        values = dict(values)
        if "max_new_tokens" in values:
            new = values.pop("max_new_tokens")
            if values.setdefault("max_tokens", new) != new:
                raise ValueError(
                    "max_tokens and max_new_tokens are two names for one parameter, got "
                    f"{values['max_tokens']!r} and {new!r}"
                )
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise TypeError(f"sampling parameters must be of {', '.join(known)}, got {name!r}")
        return cls(**values)


def _check(name: str, value: Any) -> None:
    is_valid, description, kind = _ALLOWED[name]
    if value is None and "None" in description:
        return
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} must be {description}, got {value!r}")
    if not is_valid(value):
        raise ValueError(f"{name} must be {description}, got {value!r}")


def _check_stops(stop: Any) -> str | list[str] | list[int] | None:
    if stop is None:
        return None
    must = "stop must be a string that is not empty, a list of such strings, or token ids"
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple):
        raise TypeError(f"{must}, got {stop!r}")
    strings = all(isinstance(x, str) for x in stops)
    ids = all(isinstance(x, int | np.integer) and not isinstance(x, bool) for x in stops)
    if not strings and not ids:
        raise TypeError(f"{must}, got {stop!r}")
    if not stops:
        return None
    if any(x == "" if strings else x < 0 for x in stops):
        raise ValueError(f"{must}, got {stop!r}")
    if isinstance(stop, str):
        return stop
    return list(stops) if strings else [int(x) for x in stops]


@dataclass
class SampledSequence:
    """One completion.

    Attributes:
        stop_reason: `'stop'` at a stop or the end of sequence, `'length'` at the limit of tokens.
        tokens: the sampled tokens, with the one that ended the sequence.
        logprobs: for each of them a list of pairs of a token and its log-probability, the sampled
            token first; None if they were not requested.
        decoded: its text.
        new_input_feature: prompt and completion, to train on: `labels` at each position the token
            that follows, −100 where the policy did not choose it.
        logprobs_kind: which distribution `logprobs` are of. `'policy'`: all tokens at the
            temperature, before repetition penalty and filters, as training computes them: pass
            these as `old_logps`. `'sampling'`: what was drawn from, renormalised after penalty,
            top-k, top-p and min-p: not for ratios with training's. At temperature 0 `'policy'` is
            at temperature 1, and `'sampling'` is 0. None: unknown, or there are none.
    """

    stop_reason: StopReason
    tokens: list[int]
    logprobs: list[list[tuple[int, float]]] | None = None
    decoded: str | None = None
    new_input_feature: InputFeature | None = None
    logprobs_kind: LogprobsKind | None = None


@dataclass
class SampleResponse:
    """The completions of one prompt.

    Attributes:
        sequences: `num_samples` of them.
        prompt_token_ids: tokens of the prompt.
        prompt_logprobs: log-probability of each token of the prompt at temperature 1, before
            filters; None for the first.
        topk_prompt_logprobs: at each token of the prompt, pairs of the most likely tokens and their
            log-probabilities.
    """

    sequences: Sequence[SampledSequence]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None


class SampleResponses(list[SampleResponse]):
    """The responses of one call, in the order of its prompts."""

    @property
    def inputs(self) -> list[InputFeature]:
        """One feature to train on for each sequence, those of a prompt next to each other."""
        features = [s.new_input_feature for response in self for s in response.sequences]
        missing = [i for i, feature in enumerate(features) if feature is None]
        if missing:
            raise ValueError(f"sequences {missing} must have a new_input_feature, got None")
        return [feature for feature in features if feature is not None]

    @property
    def trajectories(self) -> list[Trajectory]:
        """The conversation of each sequence, its completion the last message."""
        kept = ("messages", "tools", "user_data")
        lengths = [len(s.tokens) for response in self for s in response.sequences]
        trajectories: list[Any] = []
        for i, feature in enumerate(self.inputs):
            if "messages" not in feature:
                raise ValueError(f"sequence {i} must have messages, got {sorted(feature)}")
            trajectory = {key: value for key, value in feature.items() if key in kept}
            trajectories.append({**trajectory, "completion_length": lengths[i]})
        return trajectories
