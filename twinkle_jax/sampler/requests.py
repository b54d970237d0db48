"""What Twinkle's samplers share: the policy's interface, reading of calls, making of responses."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from jax.sharding import Mesh

from twinkle_jax.data import (
    IGNORE,
    InputFeature,
    LogprobsKind,
    SampledSequence,
    SampleResponse,
    SampleResponses,
    SamplingParams,
    Template,
)
from twinkle_jax.data.batch import NO_EXPERT, HostArray, read_integers
from twinkle_jax.data.trajectory import extend_feature
from twinkle_jax.model import DecoderConfig, Params
from twinkle_jax.sampler.sizes import check_count

Prompt = str | Mapping[str, Any]  # a string, a trajectory or an input feature
End = Literal["token", "string", "length"]

_LONGEST = 4096  # tokens of a row by default, if the checkpoint allows as many


class Actor(Protocol):
    """A policy that is trained: what samplers use of Twinkle's `TransformersModel`.

    Attributes:
        config: the decoder.
        source: directory of the checkpoint that it was read from; None if there is none.
        dtype: compute type.
        mesh: devices of its parameters; None for one.
    """

    config: DecoderConfig
    source: Path | None
    dtype: np.dtype[Any]
    mesh: Mesh | None

    @property
    def template(self) -> Any:
        """The template that encodes conversations; None before it is set."""

    @property
    def params(self) -> Params:
        """All current parameters, adapters included."""

    def save(self, name: Path, /) -> Any:
        """Write the adapter in PEFT's format, or a checkpoint if there is no adapter."""

    def forward_only(self, *, inputs: Any) -> dict[str, np.ndarray]:
        """Score the tokens of input features; `logps` [rows, time]."""


class Stops(NamedTuple):
    """Token ids that end a row while it is drawn, and strings at which its text is cut."""

    tokens: list[int]
    strings: list[str]


class Call(NamedTuple):
    """A checked call of `sample`: prompts, number of completions, parameters, stops."""

    params: SamplingParams
    num_samples: int
    features: list[InputFeature]
    stops: Stops
    template: Template | None
    logprobs_kind: LogprobsKind | None


class DrawnSequence(NamedTuple):
    """One completion as a sampler drew it.

    `routing` has the experts of each token but the last, those of the prompt included,
    [tokens - 1, layers, chosen], where they were asked for.
    """

    tokens: list[int]  # a stop token included
    logprobs: list[list[tuple[int, float]]]  # of each token, the drawn one first
    end: End  # a stop token, a stop string, or the limit of tokens
    routing: HostArray | None = None


# From the checkpoint.


def template_of(source: Path | None) -> Template | None:
    """Make a template for the tokenizer beside a checkpoint, if there is one."""
    if source is None or not (Path(source) / "tokenizer.json").is_file():
        return None
    template = Template(source, use_chat_template=False, max_length=None)
    has_chat_template = template.tokenizer.chat_template is not None
    return Template(template.tokenizer, max_length=None) if has_chat_template else template


def check_has_experts(name: str, config: DecoderConfig) -> None:
    """Refuse to return the experts of a model without any."""
    if config.experts is None:
        raise ValueError(
            f"{name} must be False for a model without experts, got True for {config.model_type!r}"
        )


def longest_row(max_length: int | None, config: DecoderConfig) -> int:
    """Return the most tokens of a row, prompt included.

    Raises:
        ValueError: if there is no room for a prompt and a completion, or the decoder does not
            support such rows.
        TypeError: if it is not an integer.
    """
    if max_length is not None:
        check_count("max_length", max_length, 2)
    longest = config.attention.longest_row
    if max_length is not None and longest is not None and max_length > longest:
        raise ValueError(
            f"max_length must be at most {longest}, the longest row of this decoder's rotary "
            f"scaling, got {max_length}"
        )
    original = json.loads(config.original or "{}")
    text = original.get("text_config", original)
    made_for = int(text.get("max_position_embeddings") or _LONGEST)
    return max_length or min(made_for, longest or _LONGEST, _LONGEST)


# The call.


def read_params(params: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    """Read parameters given as an object, as a mapping, or not at all."""
    if params is None:
        return SamplingParams()
    if isinstance(params, Mapping):
        return SamplingParams.from_dict(params)
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params must be SamplingParams, got {params!r}")
    return params


def read_call(
    inputs: Prompt | Sequence[Prompt],
    params: SamplingParams,
    num_samples: int,
    template: Template | None,
    logprobs_kind: LogprobsKind | None,
    *,
    vocab: int,
    max_length: int,
) -> Call:
    """Read prompts and stops; `num_samples=1` leaves it to the parameters."""
    if logprobs_kind not in ("policy", "sampling", None):
        raise ValueError(
            f"logprobs_kind must be 'policy', 'sampling' or None, got {logprobs_kind!r}"
        )
    if params.max_tokens == 0 and params.prompt_logprobs is None:
        raise ValueError("max_tokens must be at least 1 without prompt_logprobs, got 0")
    num_samples = params.num_samples if num_samples == 1 else num_samples
    check_count("num_samples", num_samples)
    features = _read_prompts(
        inputs, template, vocab=vocab, max_length=max_length, draws=params.max_tokens != 0
    )
    return Call(
        params, num_samples, features, read_stops(params, template), template, logprobs_kind
    )


def _read_prompts(
    inputs: Prompt | Sequence[Prompt],
    template: Template | None,
    *,
    vocab: int,
    max_length: int,
    draws: bool,
) -> list[InputFeature]:
    """Encode prompts that are not encoded yet, and check their tokens."""
    prompts = [inputs] if isinstance(inputs, str | Mapping) else inputs
    if not isinstance(prompts, Sequence) or not len(prompts):
        raise ValueError(
            "inputs must be trajectories, input features or strings, at least one of them, "
            f"got {inputs!r}"
        )
    features = [_read_prompt(f"inputs[{i}]", x, template, draws) for i, x in enumerate(prompts)]
    for i, feature in enumerate(features):
        tokens = prompt_tokens(feature)
        if not tokens.size:
            raise ValueError(f"inputs[{i}] must have at least one token, got none")
        if tokens.size >= max_length:
            raise ValueError(
                f"inputs[{i}] must have fewer tokens than max_length={max_length}, "
                f"got {tokens.size}"
            )
        invalid = tokens[(tokens < 0) | (tokens >= vocab)]
        if invalid.size:
            raise ValueError(
                f"inputs[{i}] must have tokens in [0, {vocab}), the policy's vocabulary, "
                f"got {invalid[0]}"
            )
    return features


def _read_prompt(name: str, prompt: Prompt, template: Template | None, draws: bool) -> InputFeature:
    if isinstance(prompt, Mapping) and prompt.get("input_ids") is not None:
        feature: Any = dict(prompt)
        ids = read_integers(f"{name}['input_ids']", feature["input_ids"])
        if ids.size and ids.size != ids.shape[-1]:
            raise ValueError(
                f"{name}['input_ids'] must be one row of token ids, got the shape {ids.shape}"
            )
        return feature
    if template is None:
        raise ValueError(
            f"{name} must have 'input_ids' where there is no template (set_template takes one), "
            f"got {prompt!r:.80}"
        )
    if isinstance(prompt, str):
        before, _ = template.tokenizer.around_text
        ids = np.asarray([*before, *template.tokenizer.encode(prompt)], np.int32)
        return InputFeature(input_ids=ids, labels=np.full(ids.shape, IGNORE, np.int32))
    if not isinstance(prompt, Mapping):
        raise TypeError(
            f"{name} must be a trajectory, an input feature or a string, got {prompt!r}"
        )
    return template.encode(prompt, add_generation_prompt=draws)


def prompt_tokens(feature: Mapping[str, Any]) -> np.ndarray:
    """Return the token ids of a feature, without those that its attention mask excludes."""
    tokens = np.asarray(feature["input_ids"]).reshape(-1)
    mask = feature.get("attention_mask")
    return tokens if mask is None else tokens[np.asarray(mask).reshape(-1) != 0]


def read_stops(params: SamplingParams, template: Template | None) -> Stops:
    """Join the tokenizer's end-of-sequence tokens and the stops of the parameters."""
    tokens = [] if template is None else list(template.tokenizer.stop_token_ids)
    stops: list[str | int] = (
        [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
    )
    strings = []
    for stop in stops:
        if not isinstance(stop, str):
            tokens.append(stop)
            continue
        if template is None:
            raise ValueError(f"stop must be token ids where there is no tokenizer, got {stop!r}")
        special = template.tokenizer.backend.token_to_id(stop)
        if special is not None:
            tokens.append(int(special))
        else:
            ids = template.tokenizer.encode(stop)
            if stop not in template.tokenizer.decode(ids):
                raise ValueError(f"stop must be text that the tokenizer can encode, got {stop!r}")
        strings.append(stop)
    return Stops(list(dict.fromkeys(tokens)), strings)


# The responses.


def describe_broken(broken: int, rows: int) -> str:
    """Describe completions whose log-probabilities are NaN."""
    return (
        f"the policy's logits must be finite, got NaN or infinity in {broken} of {rows} "
        "completions: its parameters or activations are too large, or not numbers"
    )


def scored_responses(call: Call) -> SampleResponses:
    """Make a response for each prompt; its sequences have no tokens, and the prompt's feature."""
    responses = SampleResponses()
    for feature in call.features:
        sequences = [
            SampledSequence("length", [], new_input_feature=feature)
            for _ in range(call.num_samples)
        ]
        responses.append(SampleResponse(sequences, prompt_tokens(feature).tolist()))
    return responses


def make_responses(call: Call, drawn: Sequence[DrawnSequence]) -> SampleResponses:
    """Make a response for each prompt, from completions ordered by prompt, then by sample."""
    responses = SampleResponses()
    for i, feature in enumerate(call.features):
        of_prompt = drawn[i * call.num_samples : (i + 1) * call.num_samples]
        sequences = [_sequence(feature, completion, call) for completion in of_prompt]
        responses.append(SampleResponse(sequences, prompt_tokens(feature).tolist()))
    return responses


def _sequence(feature: Mapping[str, Any], drawn: DrawnSequence, call: Call) -> SampledSequence:
    tokens, stopped = drawn.tokens, drawn.end != "length"
    template, strings = call.template, call.stops.strings
    include_stop = call.params.include_stop_str_in_output
    text = None
    if template is not None:
        count, text = _cut(tokens, strings, template)
        uncut_text = template.tokenizer.decode(tokens[:count])
        at_string = text != uncut_text
        stopped = at_string or stopped
        if include_stop and at_string:
            text += next(s for s in strings if uncut_text.startswith(s, len(text)))
        elif drawn.end == "token" and not at_string and not include_stop:
            text = template.tokenizer.decode(tokens[:-1])
        tokens = tokens[:count]
        extended = template.concat_input_feature(feature, tokens)
    else:
        extended = extend_feature(feature, tokens, labelled=True)
    if drawn.routing is not None:
        extended["routed_experts"] = _place_experts(extended, drawn.routing)
    return SampledSequence(
        stop_reason="stop" if stopped else "length",
        tokens=tokens,
        logprobs=None if call.logprobs_kind is None else drawn.logprobs[: len(tokens)],
        decoded=text,
        new_input_feature=extended,
        logprobs_kind=call.logprobs_kind,
    )


def _place_experts(feature: Mapping[str, Any], routing: HostArray) -> HostArray:
    """Put the experts of a row's tokens at their columns, and no expert at padding or the last."""
    size = len(feature["input_ids"])
    mask = feature.get("attention_mask")
    columns = np.arange(size) if mask is None else np.flatnonzero(np.asarray(mask))
    columns = columns[: len(routing)]
    placed = np.full((size, *routing.shape[1:]), NO_EXPERT, np.int32)
    placed[columns] = routing[: len(columns)]
    return placed


def _cut(tokens: list[int], strings: list[str], template: Template) -> tuple[int, str]:
    """Return how many tokens spell the first stop string, and the text before it.

    Without a stop string, returns the number of all tokens, and all text.
    """
    tokenizer = template.tokenizer

    def find_stop(count: int) -> int | None:
        text = tokenizer.decode(tokens[:count])
        starts = [text.find(string) for string in strings]
        return min((start for start in starts if start >= 0), default=None)

    if find_stop(len(tokens)) is None:
        return len(tokens), tokenizer.decode(tokens)
    low, high = 0, len(tokens)  # `low` tokens do not contain a stop string, `high` tokens do
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if find_stop(middle) is None else (low, middle)
    return high, tokenizer.decode(tokens[:high])[: find_stop(high)]
