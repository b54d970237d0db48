"""From completions to Twinkle's responses."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from twinkle_jax.data.sampling_types import (
    LogprobsKind,
    SampledSequence,
    SampleResponse,
    SampleResponses,
)
from twinkle_jax.data.trajectory import extend_feature
from twinkle_jax.sampler.completions import STOP, Completions
from twinkle_jax.sampler.requests.call import Call
from twinkle_jax.sampler.requests.prompts import prompt_tokens
from twinkle_jax.sampler.requests.stops import cut

End = Literal["token", "string", "length"]


class Drawn(NamedTuple):
    """One completion as a sampler drew it.

    Attributes:
        tokens: its tokens, the one that ended it included.
        logprobs: for each of them pairs of a token and its log-probability, its own first.
        end: at a stop token, behind a stop string, or where there was no more room.
    """

    tokens: list[int]
    logprobs: list[list[tuple[int, float]]]
    end: End


def read_arrays(completions: Completions, rows: int, kind: LogprobsKind | None) -> list[Drawn]:
    """Take completions out of arrays; rows that only filled up the batch are left out."""
    stopped = np.asarray(completions.finish_reasons) == STOP
    lengths = np.asarray(completions.lengths)
    tokens = np.asarray(completions.tokens)
    sampling = kind == "sampling"
    logprobs = np.asarray(completions.sampling_logprobs if sampling else completions.logprobs)
    found = []
    for row in range(rows):
        own = tokens[row, : lengths[row]].tolist()
        scores = logprobs[row, : lengths[row]].tolist()
        pairs = [[pair] for pair in zip(own, scores, strict=True)]
        found.append(Drawn(own, pairs, "token" if stopped[row] else "length"))
    return found


def make_responses(call: Call, drawn: Sequence[Drawn]) -> SampleResponses:
    """Give each prompt its completions, which are ordered by prompt, then by sample."""
    responses = SampleResponses()
    for i, feature in enumerate(call.features):
        own = drawn[i * call.num_samples : (i + 1) * call.num_samples]
        sequences = [_sequence(feature, one, call) for one in own]
        responses.append(SampleResponse(sequences, prompt_tokens(feature).tolist()))
    return responses


def _sequence(feature: Mapping[str, Any], drawn: Drawn, call: Call) -> SampledSequence:
    tokens, stopped = drawn.tokens, drawn.end != "length"
    template, strings = call.template, call.stops.strings
    include_stop = call.params.include_stop_str_in_output
    text = None
    if template is not None:
        count, text = cut(tokens, strings, template)
        whole = template.tokenizer.decode(tokens[:count])
        at_string = text != whole
        stopped = at_string or stopped
        if include_stop and at_string:
            text = _with_stop(whole, text, strings)
        elif drawn.end == "token" and not at_string and not include_stop:
            text = template.tokenizer.decode(tokens[:-1])
        tokens = tokens[:count]
        grown = template.concat_input_feature(feature, tokens)
    else:
        grown = extend_feature(feature, tokens, labelled=True)
    return SampledSequence(
        stop_reason="stop" if stopped else "length",
        tokens=tokens,
        logprobs=None if call.logprobs_kind is None else drawn.logprobs[: len(tokens)],
        decoded=text,
        new_input_feature=grown,
        logprobs_kind=call.logprobs_kind,
    )


def _with_stop(whole: str, text: str, strings: Sequence[str]) -> str:
    """Add the string that the text stopped at."""
    return text + next(s for s in strings if whole.startswith(s, len(text)))
