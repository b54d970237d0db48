"""Arguments and results of samplers: parameters, and completions by prompt."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Literal, Self

from twinkle_jax.data.trajectory import InputFeature, Trajectory

StopReason = Literal["length", "stop", "abort", "error"]
LogprobsKind = Literal["policy", "sampling"]

_Rule = tuple[Callable[[Any], bool], str, type[Any]]  # the test, its words in errors, the type


def _integer(least: int, *also: int | None) -> _Rule:
    others = "".join(f"{value} or " for value in also)

    def fits(value: Any) -> bool:
        return value in also or value >= least

    return fits, f"{others}an int of at least {least}", Integral


def _number(fits: Callable[[float], bool], must: str) -> _Rule:
    return fits, must, Real


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
        max_tokens: maximum tokens of a completion; None: as many as the model allows. 0 with
            `prompt_logprobs`: prompts are scored, and there are no completions.
        seed: of the random numbers; None: the sampler's own.
        stop: a string, strings, or token ids, at which a completion ends.
        include_stop_str_in_output: whether the stop string is part of the completion.
        temperature: what logits are divided by; 0 takes the most likely token.
        top_k: how many of the most likely tokens may be drawn; −1: all.
        top_p: the most likely tokens up to this probability may be drawn.
        repetition_penalty: above 1, tokens that occurred before become less likely.
        logprobs: how many log-probabilities to return for each token. None, 0 and 1: the drawn
            token's alone. More: the drawn token's, then those of so many likely tokens that are
            others; on a vLLM server only.
        prompt_logprobs: how many likely tokens' to return for each token of the prompt, beside its
            own; None: none at all.
        num_samples: completions of each prompt.
        min_p: tokens may be drawn that have this share of the most likely one's probability.

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
            values.setdefault("max_tokens", values.pop("max_new_tokens"))
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise TypeError(f"sampling parameters must be of {', '.join(known)}, got {name!r}")
        return cls(**values)


def _check(name: str, value: Any) -> None:
    fits, must, kind = _ALLOWED[name]
    if value is None and "None" in must:
        return
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} must be {must}, got {value!r}")
    if not fits(value):
        raise ValueError(f"{name} must be {must}, got {value!r}")


def _check_stops(stop: Any) -> str | list[str] | list[int] | None:
    if stop is None:
        return None
    must = "stop must be a string that is not empty, a list of such strings, or token ids"
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple):
        raise TypeError(f"{must}, got {stop!r}")
    strings = all(isinstance(x, str) for x in stops)
    ids = all(isinstance(x, int) and not isinstance(x, bool) for x in stops)
    if not strings and not ids:
        raise TypeError(f"{must}, got {stop!r}")
    if not stops:
        return None
    if any(x == "" if strings else x < 0 for x in stops):
        raise ValueError(f"{must}, got {stop!r}")
    return stop if isinstance(stop, str) else list(stops)


@dataclass
class SampledSequence:
    """One completion.

    Attributes:
        stop_reason: `'stop'` at a stop or the end of sequence, `'length'` at the limit of tokens.
        tokens: the tokens that were drawn, with the one that ended the sequence.
        logprobs: for each of them a list of pairs of a token and its log-probability, the drawn
            token first; None where none were asked for.
        decoded: its text.
        new_input_feature: prompt and completion, to train on: `labels` at each position the token
            that follows, −100 where the policy did not choose it.
        logprobs_kind: which distribution `logprobs` are of. `'policy'`: all tokens at the
            temperature, before repetition penalty and filters, as training computes them: right as
            `old_logps`. `'sampling'`: what was drawn from, renormalised after penalty, top-k, top-p
            and min-p: wrong in a ratio with training's. At temperature 0 `'policy'` is at
            temperature 1, and `'sampling'` is 0. None: unknown, or there are none.
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
        sequences: as many as were asked for.
        prompt_token_ids: tokens of the prompt.
        prompt_logprobs: log-probability of each token of the prompt at temperature 1, before
            filters; None for the first.
        topk_prompt_logprobs: likewise, pairs of the most likely tokens and their log-probabilities.
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
