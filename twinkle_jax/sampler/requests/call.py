"""What a call of a sampler asks for, read the same way by both."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from twinkle_jax.data.sampling_types import LogprobsKind, SamplingParams
from twinkle_jax.data.template import Template
from twinkle_jax.data.trajectory import InputFeature
from twinkle_jax.sampler.requests.prompts import Prompt, read_prompts
from twinkle_jax.sampler.requests.stops import Stops, read_stops


class Call(NamedTuple):
    """Prompts, how many completions of each, how they are drawn, and what is returned of them."""

    params: SamplingParams
    num_samples: int
    features: list[InputFeature]
    stops: Stops
    template: Template | None
    logprobs_kind: LogprobsKind | None


def read_params(given: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    """Take parameters as an object, a mapping or nothing."""
    params = SamplingParams.from_dict(given) if isinstance(given, Mapping) else given
    params = SamplingParams() if params is None else params
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
    room: int,
) -> Call:
    """Read prompts and stops; `num_samples=1` leaves it to the parameters."""
    if logprobs_kind not in ("policy", "sampling", None):
        raise ValueError(
            f"logprobs_kind must be 'policy', 'sampling' or None, got {logprobs_kind!r}"
        )
    num_samples = params.num_samples if num_samples == 1 else num_samples
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}")
    features = read_prompts(inputs, template, vocab=vocab, room=room)
    stops = read_stops(params, template)
    return Call(params, num_samples, features, stops, template, logprobs_kind)
