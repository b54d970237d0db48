"""Asking a vLLM server for completions of token ids."""

from functools import partial
from typing import Any

from twinkle_jax.data.sampling_params import SamplingParams
from twinkle_jax.sampler.vllm.read_completions import Asked, read_completions
from twinkle_jax.sampler.vllm.request import Request

_LARGEST_SEED = 2**62  # vLLM adds the number of the sample, and takes 63 bits
_TOKEN_BYTES, _ENTRY_BYTES = 4096, 128  # of an answer: a token with its text; one more of them


def check_params(params: SamplingParams, vocab: int) -> None:
    """Refuse what vLLM cannot do, or would do otherwise without saying so.

    Raises:
        ValueError: with the parameter's name.
    """
    temperature = params.temperature
    if temperature > 2 or 0 < temperature < 0.01:
        raise ValueError(
            f"temperature must be 0 or in [0.01, 2] with vLLM, which takes no other, got "
            f"{temperature}"
        )
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocab:
            raise ValueError(
                f"{name} must be at most {vocab}, the tokens there are, got {getattr(params, name)}"
            )
    if params.seed is not None and params.seed > _LARGEST_SEED:
        raise ValueError(f"seed must be at most {_LARGEST_SEED} with vLLM, got {params.seed}")


def completion_request(asked: Asked, purpose: str, **more: Any) -> Request:
    """Write a request for completions, of which nothing is left to the server's defaults."""
    params, greedy = asked.params, asked.params.temperature == 0
    beside = max(params.logprobs or 0, params.prompt_logprobs or 0)
    tokens = asked.num_samples * (len(asked.prompt) + asked.max_tokens)
    body = {
        "model": asked.model,
        "prompt": asked.prompt,
        "n": 1 if greedy else asked.num_samples,  # vLLM refuses to draw what is certain twice
        "max_tokens": asked.max_tokens,
        "seed": asked.seed,
        "temperature": params.temperature,
        "top_k": max(params.top_k, 0),
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": asked.stops.strings,
        "stop_token_ids": asked.stops.tokens,
        "ignore_eos": True,  # what ends a sequence is among the ids
        "skip_special_tokens": True,
        "logprobs": params.logprobs or 0,
        "prompt_logprobs": params.prompt_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **more,
    }
    most = 2**20 + tokens * (_TOKEN_BYTES + beside * _ENTRY_BYTES)
    path = "/v1/completions"
    return Request("POST", path, body, partial(read_completions, asked), purpose, most)
