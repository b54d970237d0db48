"""From arrays of completions to Twinkle's responses."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from twinkle_jax.data.extend_feature import extend_feature
from twinkle_jax.data.sampling import SampledSequence, SampleResponse, SampleResponses
from twinkle_jax.data.template import Template
from twinkle_jax.sampler.generate import Completions
from twinkle_jax.sampler.prompts import prompt_tokens
from twinkle_jax.sampler.rows import STOP
from twinkle_jax.sampler.stops import Stops, cut


def make_responses(
    features: Sequence[Mapping[str, Any]],
    drawn: Completions,
    num_samples: int,
    stops: Stops,
    template: Template | None,
    *,
    include_stop: bool,
) -> SampleResponses:
    """Give each prompt its completions; rows that filled up the batch are left out."""
    tokens, logprobs = np.asarray(drawn.tokens), np.asarray(drawn.logprobs)
    lengths, reasons = np.asarray(drawn.lengths), np.asarray(drawn.finish_reasons)
    responses = SampleResponses()
    for i, feature in enumerate(features):
        sequences = [
            _sequence(
                feature,
                tokens[row, : lengths[row]].tolist(),
                logprobs[row, : lengths[row]].tolist(),
                stopped=bool(reasons[row] == STOP),
                stops=stops,
                template=template,
                include_stop=include_stop,
            )
            for row in range(i * num_samples, (i + 1) * num_samples)
        ]
        responses.append(SampleResponse(sequences, prompt_tokens(feature).tolist()))
    return responses


def _sequence(
    feature: Mapping[str, Any],
    tokens: list[int],
    logprobs: list[float],
    *,
    stopped: bool,
    stops: Stops,
    template: Template | None,
    include_stop: bool,
) -> SampledSequence:
    text = None
    if template is not None:
        count, text = cut(tokens, stops.strings, template)
        whole = template.tokenizer.decode(tokens[:count])
        at_string = text != whole
        stopped = at_string or stopped
        if include_stop and at_string:
            text = _with_stop(whole, text, stops.strings)
        elif stopped and not at_string and not include_stop:
            text = template.tokenizer.decode(tokens[:-1])
        tokens, logprobs = tokens[:count], logprobs[:count]
        grown = template.concat_input_feature(feature, tokens)
    else:
        grown = extend_feature(feature, tokens, labelled=True)
    return SampledSequence(
        stop_reason="stop" if stopped else "length",
        tokens=tokens,
        logprobs=[[pair] for pair in zip(tokens, logprobs, strict=True)],
        decoded=text,
        new_input_feature=grown,
    )


def _with_stop(whole: str, text: str, strings: Sequence[str]) -> str:
    """Add the string that the text stopped at."""
    return text + next(s for s in strings if whole.startswith(s, len(text)))
