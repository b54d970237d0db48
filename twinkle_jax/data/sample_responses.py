"""What a sampler answers: completions, prompt by prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from twinkle_jax.data.trajectory import InputFeature, Trajectory

StopReason = Literal["length", "stop", "abort", "error"]
LogprobsKind = Literal["policy", "sampling"]


@dataclass
class SampledSequence:
    """One completion.

    Attributes:
        stop_reason: `'stop'` at a stop or the end of sequence, `'length'` where room ran out.
        tokens: the tokens that were drawn, the one that ended the sequence included.
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
        prompt_token_ids: what the model read.
        prompt_logprobs: log-probability of each token of the prompt at temperature 1, before
            filters; None for the first.
        topk_prompt_logprobs: likewise, pairs of the most likely tokens.
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
        found: list[Any] = []
        for i, feature in enumerate(self.inputs):
            if "messages" not in feature:
                raise ValueError(f"sequence {i} must have messages, got {sorted(feature)}")
            trajectory = {key: value for key, value in feature.items() if key in kept}
            found.append({**trajectory, "completion_length": lengths[i]})
        return found
