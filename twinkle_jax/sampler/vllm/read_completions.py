"""Reading the completions of a vLLM server, with mistrust: they must be what was asked for."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from twinkle_jax.data.sampling_params import SamplingParams
from twinkle_jax.sampler.requests.responses import Drawn, End
from twinkle_jax.sampler.requests.stops import Stops
from twinkle_jax.sampler.vllm.json_values import (
    IMPOSSIBLE,
    entries,
    integer,
    logprob,
    mapping,
    refuse,
)

TopLogprobs = list[tuple[int, float]]


class Asked(NamedTuple):
    """One prompt, and what to do with it.

    Attributes:
        model: the name that the server has for the model or the adapter.
        prompt: token ids.
        num_samples: completions.
        max_tokens: the most tokens of each.
        seed: of their randomness; None leaves it to the server.
        params: how to draw.
        stops: where to end.
        vocab: token ids lie below it.
    """

    model: str
    prompt: list[int]
    num_samples: int
    max_tokens: int
    seed: int | None
    params: SamplingParams
    stops: Stops
    vocab: int


class Completions(NamedTuple):
    """What was drawn for a prompt, and the log-probabilities of the prompt where asked for."""

    drawn: list[Drawn]
    prompt: list[TopLogprobs | None] | None


def read_completions(asked: Asked, answer: Any) -> Completions:
    """Take completions from an answer.

    Raises:
        ValueError: for whatever is not as it was asked for.
    """
    wanted = 1 if asked.params.temperature == 0 else asked.num_samples
    answer = mapping("an object", answer)
    if answer.get("model") != asked.model:
        refuse(f"model {asked.model!r}", answer.get("model"))
    choices = [mapping("choices that are objects", x) for x in entries("choices", answer)]
    if sorted(integer("an index in each choice", x.get("index")) for x in choices) != list(
        range(wanted)
    ):
        refuse(f"{wanted} choices, numbered from 0", [x.get("index") for x in choices])
    choices.sort(key=lambda choice: int(choice["index"]))
    drawn = [_drawn(asked, choice) for choice in choices]
    prompt = None
    if asked.params.prompt_logprobs is not None:
        prompt = _prompt_logprobs(asked, choices[0])
    return Completions(drawn * (asked.num_samples // wanted), prompt)


def _drawn(asked: Asked, choice: Mapping[str, Any]) -> Drawn:
    if choice.get("prompt_token_ids") != asked.prompt:
        refuse("the prompt_token_ids that were sent", choice.get("prompt_token_ids"))
    tokens = [_token(asked, x) for x in entries("token_ids", choice)]
    if not 1 <= len(tokens) <= asked.max_tokens:
        refuse(f"1 to {asked.max_tokens} token_ids", len(tokens))
    scores = mapping("logprobs that are an object", choice.get("logprobs"))
    logprobs = [logprob("token_logprobs", x) for x in entries("token_logprobs", scores)]
    tops: list[TopLogprobs] = [[] for _ in tokens]
    if asked.params.logprobs:
        tops = [_top(asked, x, "token_id:") for x in entries("top_logprobs", scores)]
    if not len(logprobs) == len(tops) == len(tokens):
        refuse(f"token_logprobs for {len(tokens)} token_ids", len(logprobs))
    pairs = [
        [(token, own), *(x for x in top if x[0] != token and x[1] > IMPOSSIBLE)]
        for token, own, top in zip(tokens, logprobs, tops, strict=True)
    ]
    return Drawn(tokens, pairs, _end(asked, choice, tokens))


def _end(asked: Asked, choice: Mapping[str, Any], tokens: list[int]) -> End:
    """Say why a completion ended, if that can be."""
    reason, stop = choice.get("finish_reason"), choice.get("stop_reason")
    if reason == "length" and len(tokens) == asked.max_tokens:
        return "length"
    if reason == "stop" and tokens[-1] in asked.stops.tokens:
        return "token"
    if reason == "stop" and stop in asked.stops.strings:
        return "string"
    return refuse(
        f"finish_reason and stop_reason that fit {len(tokens)} tokens of at most "
        f"{asked.max_tokens}, the last {tokens[-1]}",
        (reason, stop),
    )


def _prompt_logprobs(asked: Asked, choice: Mapping[str, Any]) -> list[TopLogprobs | None]:
    given = entries("prompt_logprobs", choice)
    if len(given) != len(asked.prompt):
        refuse(f"prompt_logprobs for {len(asked.prompt)} tokens", len(given))
    found: list[TopLogprobs | None] = [None]
    for token, entry in zip(asked.prompt[1:], given[1:], strict=True):
        entry = mapping("prompt_logprobs that are objects", entry)
        scores = {key: mapping("prompt_logprobs", x).get("logprob") for key, x in entry.items()}
        pairs = _top(asked, scores, "")
        own = [pair for pair in pairs if pair[0] == token]
        if not own:
            refuse(f"the prompt_logprobs of token {token}", sorted(scores))
        found.append(own + [pair for pair in pairs if pair[0] != token])
    return found


def _top(asked: Asked, scores: Any, prefix: str) -> TopLogprobs:
    """Read a mapping from tokens to log-probabilities."""
    pairs = []
    for key, value in mapping("log-probabilities by token", scores).items():
        number = key.removeprefix(prefix)
        if not (key.startswith(prefix) and number.isascii() and number.isdigit()):
            refuse(f"tokens as '{prefix}ID'", key)
        pairs.append((_token(asked, int(number[:20])), logprob("log-probabilities", value)))
    return pairs


def _token(asked: Asked, value: Any) -> int:
    if not 0 <= integer("token_ids that are integers", value) < asked.vocab:
        refuse(f"token_ids in [0, {asked.vocab})", value)
    return int(value)
