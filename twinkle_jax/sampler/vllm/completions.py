"""Completions of a vLLM server: requests, the kinds of log-probabilities, and checked answers."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

from twinkle_jax.data import LogprobsKind, SamplingParams
from twinkle_jax.sampler.requests import DrawnSequence, End, Stops
from twinkle_jax.sampler.vllm.client import (
    Request,
    ServerError,
    read_integer,
    read_list,
    read_logprob,
    read_object,
    refuse,
)

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]  # of a server: --logprobs-mode
TopLogprobs = list[tuple[int, float]]

_LARGEST_SEED = 2**62  # vLLM adds the number of the sample, and takes 63 bits
_TOKEN_BYTES, _TOP_BYTES = 4096, 128  # of an answer: a token with its text; one likely token more
_LOG_ZERO = -9999.0  # what vLLM writes for the logarithm of 0


class CompletionSettings(NamedTuple):
    """One prompt, and how it is completed.

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


class ServerCompletions(NamedTuple):
    """The completions of a prompt, and the log-probabilities of the prompt if requested."""

    drawn: list[DrawnSequence]
    prompt: list[TopLogprobs | None] | None


def check_params(params: SamplingParams, vocab: int) -> None:
    """Refuse parameters that vLLM does not support, or would change silently.

    Raises:
        ValueError: with the parameter's name.
    """
    temperature = params.temperature
    if temperature > 2 or 0 < temperature < 0.01:
        raise ValueError(f"temperature must be 0 or in [0.01, 2] with vLLM, got {temperature}")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocab:
            raise ValueError(
                f"{name} must be at most {vocab}, the size of the vocabulary, got "
                f"{getattr(params, name)}"
            )
    if params.seed is not None and params.seed > _LARGEST_SEED:
        raise ValueError(f"seed must be at most {_LARGEST_SEED} with vLLM, got {params.seed}")


def usable_modes(
    params: SamplingParams, kind: LogprobsKind | None, vocab: int
) -> set[LogprobsMode]:
    """List the modes in which a server gives log-probabilities of a kind.

    vLLM takes raw ones from the logits as the model computes them, before the temperature too.
    Processed ones are taken after penalty, temperature and filters, and renormalised.

    Raises:
        ValueError: if there is none: filters at a temperature other than 1.
    """
    # At temperature 0 vLLM leaves the filters out, and does not divide.
    greedy = params.temperature == 0
    changes = [] if greedy else changing_filters(params, vocab)
    changes += ["repetition_penalty"] if params.repetition_penalty != 1 else []
    modes: set[LogprobsMode] = set()
    if kind is None or not changes or kind == "sampling":
        modes.add("processed_logprobs")
    if kind is None or (
        params.temperature in (0, 1) and (kind == "policy" or greedy or not changes)
    ):
        modes.add("raw_logprobs")
    if not modes:
        raise ValueError(
            f"temperature must be 1 with {' and '.join(changes)}, since a vLLM server gives "
            f"log-probabilities of the unfiltered distribution at 1 only, got "
            f"{params.temperature}; use logprobs_kind='sampling' or None"
        )
    return modes


def changing_filters(params: SamplingParams, vocab: int) -> list[str]:
    """List the filters that may drop a token."""
    drops = {
        "top_k": 0 < params.top_k < vocab,
        "top_p": params.top_p < 1,
        "min_p": params.min_p > 0,
    }
    return [name for name, may_drop in drops.items() if may_drop]


def check_mode(
    url: str, mode: LogprobsMode, usable: set[LogprobsMode], kind: LogprobsKind | None
) -> None:
    """Refuse a server whose log-probabilities are of another distribution.

    Raises:
        ServerError: with the option that the server must be started with.
    """
    if mode not in usable:
        which = {
            "policy": "the whole distribution at the temperature, as logprobs_kind='policy' asks",
            "sampling": "the distribution drawn from, as logprobs_kind='sampling' asks",
        }
        raise ServerError(
            f"{url} must give log-probabilities of {which[kind or 'policy']}, got {mode}: start it "
            f"with --logprobs-mode {' or '.join(sorted(usable))}"
        )


def completion_request(settings: CompletionSettings, purpose: str, **more: Any) -> Request:
    """Request completions with every parameter set: no default of the server applies."""
    params, greedy = settings.params, settings.params.temperature == 0
    tops = max(_tops(params), params.prompt_logprobs or 0)
    tokens = settings.num_samples * (len(settings.prompt) + settings.max_tokens)
    body = {
        "model": settings.model,
        "prompt": settings.prompt,
        "n": 1 if greedy else settings.num_samples,  # vLLM refuses several that are the same
        "max_tokens": settings.max_tokens,
        "seed": settings.seed,
        "temperature": params.temperature,
        "top_k": max(params.top_k, 0),
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": settings.stops.strings,
        "stop_token_ids": settings.stops.tokens,
        "ignore_eos": True,  # stop_token_ids have the end of a sequence
        "skip_special_tokens": True,
        "logprobs": _tops(params),
        "prompt_logprobs": params.prompt_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **more,
    }
    return Request(
        "POST",
        "/v1/completions",
        body,
        partial(_read_completions, settings),
        purpose,
        max_bytes=2**20 + tokens * (_TOKEN_BYTES + tops * _TOP_BYTES),
    )


def _tops(params: SamplingParams) -> int:
    """Return how many likely tokens to request; `logprobs=1` means the drawn one alone."""
    return 0 if params.logprobs == 1 else params.logprobs or 0


def _read_completions(settings: CompletionSettings, answer: Any) -> ServerCompletions:
    """Read completions.

    Raises:
        ValueError: if the answer does not fit the request.
    """
    count = 1 if settings.params.temperature == 0 else settings.num_samples
    answer = read_object("an object", answer)
    if answer.get("model") != settings.model:
        refuse(f"model {settings.model!r}", answer.get("model"))
    choices = [read_object("choices that are objects", x) for x in read_list("choices", answer)]
    indices = [read_integer("an index in each choice", x.get("index")) for x in choices]
    if sorted(indices) != list(range(count)):
        refuse(f"{count} choices, numbered from 0", indices)
    choices.sort(key=lambda choice: int(choice["index"]))
    drawn = [_read_choice(settings, choice) for choice in choices]
    prompt = None
    if settings.params.prompt_logprobs is not None:
        prompt = _read_prompt_logprobs(settings, choices[0])
    return ServerCompletions(drawn * (settings.num_samples // count), prompt)


def _read_choice(settings: CompletionSettings, choice: Mapping[str, Any]) -> DrawnSequence:
    if choice.get("prompt_token_ids") != settings.prompt:
        refuse("the prompt_token_ids that were sent", choice.get("prompt_token_ids"))
    tokens = [_read_token(settings, x) for x in read_list("token_ids", choice)]
    if not 1 <= len(tokens) <= settings.max_tokens:
        refuse(f"1 to {settings.max_tokens} token_ids", len(tokens))
    scores = read_object("logprobs that are an object", choice.get("logprobs"))
    logprobs = [read_logprob("token_logprobs", x) for x in read_list("token_logprobs", scores)]
    tops: list[TopLogprobs] = [[] for _ in tokens]
    if _tops(settings.params):
        name = "top_logprobs"
        tops = [_read_top(settings, name, x, "token_id:") for x in read_list(name, scores)]
    for name, values in (("token_logprobs", logprobs), ("top_logprobs", tops)):
        if len(values) != len(tokens):
            refuse(f"{name} for {len(tokens)} token_ids", len(values))
    pairs = [
        [(token, logprob), *(x for x in top if x[0] != token and x[1] > _LOG_ZERO)]
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
    ]
    return DrawnSequence(tokens, pairs, _read_end(settings, choice, tokens))


def _read_end(settings: CompletionSettings, choice: Mapping[str, Any], tokens: list[int]) -> End:
    """Read why a completion ended; its tokens must agree."""
    reason, stop = choice.get("finish_reason"), choice.get("stop_reason")
    if reason == "length" and len(tokens) == settings.max_tokens:
        return "length"
    if reason == "stop" and tokens[-1] in settings.stops.tokens:
        return "token"
    if reason == "stop" and stop in settings.stops.strings:
        return "string"
    return refuse(
        f"finish_reason and stop_reason that fit {len(tokens)} tokens of at most "
        f"{settings.max_tokens}, the last {tokens[-1]}",
        (reason, stop),
    )


def _read_prompt_logprobs(
    settings: CompletionSettings, choice: Mapping[str, Any]
) -> list[TopLogprobs | None]:
    entries = read_list("prompt_logprobs", choice)
    if len(entries) != len(settings.prompt):
        refuse(f"prompt_logprobs for {len(settings.prompt)} tokens", len(entries))
    rows: list[TopLogprobs | None] = [None]
    for token, entry in zip(settings.prompt[1:], entries[1:], strict=True):
        entry = read_object("prompt_logprobs that are objects", entry)
        scores = {key: read_object("prompt_logprobs", x).get("logprob") for key, x in entry.items()}
        pairs = _read_top(settings, "prompt_logprobs", scores, "")
        of_token = [pair for pair in pairs if pair[0] == token]
        if not of_token:
            refuse(f"the prompt_logprobs of token {token}", sorted(scores))
        rows.append(of_token + [pair for pair in pairs if pair[0] != token])
    return rows


def _read_top(settings: CompletionSettings, name: str, scores: Any, prefix: str) -> TopLogprobs:
    """Read a mapping from tokens to log-probabilities."""
    pairs = []
    for key, value in read_object(f"{name} by token", scores).items():
        digits = key.removeprefix(prefix)
        if not (key.startswith(prefix) and digits.isascii() and digits.isdigit()):
            refuse(f"{name} by '{prefix}ID'", key)
        token = _read_token(settings, int(digits[:20]))
        pairs.append((token, read_logprob(name, value)))
    return pairs


def _read_token(settings: CompletionSettings, value: Any) -> int:
    if not 0 <= read_integer("token_ids that are integers", value) < settings.vocab:
        refuse(f"token_ids in [0, {settings.vocab})", value)
    return int(value)
