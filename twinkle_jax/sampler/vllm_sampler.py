"""Twinkle's sampler on a vLLM server that you run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from twinkle_jax.data import LogprobsKind, SampleResponses, SamplingParams, Template
from twinkle_jax.model import parse_config
from twinkle_jax.model.huggingface.checkpoint_files import CONFIG, locate, read_json
from twinkle_jax.sampler.requests import (
    Actor,
    Prompt,
    Stops,
    check_has_experts,
    longest_row,
    make_responses,
    prompt_tokens,
    read_call,
    read_params,
    scored_responses,
    template_of,
)
from twinkle_jax.sampler.vllm_server import (
    Client,
    CompletionSettings,
    Deadline,
    LogprobsMode,
    LostServerError,
    Routing,
    ServerCompletions,
    ServerError,
    completion_request,
)
from twinkle_jax.sampler.vllm_weights import Served, ServedPolicy, names_of

_LARGEST_SEED = 2**62  # vLLM adds the number of the sample, and takes 63 bits


class vLLMSampler:  # noqa: N801  (Twinkle's name)
    """Samples from a vLLM server that you run, with the interface of `JaxSampler`.

    Token ids go in and come out: nothing is tokenised twice. Which log-probabilities a server can
    give depends on how it was started. `--logprobs-mode processed_logprobs`: of the whole
    distribution at any temperature, as long as there are no filters and no repetition penalty.
    `raw_logprobs`: with those too, but only at temperature 1. The first call detects the mode, and
    a call that asks for log-probabilities that the server does not give raises an error. Each call
    first checks the server's model and, after `sync_weights`, its weights. Needs the extra
    `server`.

    Args:
        model_id: the model that the server has: a directory with a Hugging Face checkpoint, or a
            hub id, of which the configuration and the tokenizer are read here.
        base_url: where the server is: `http://HOST:PORT`.
        template: as for [`JaxSampler`][twinkle_jax.sampler.JaxSampler].
        max_length: likewise; a smaller `max_model_len` of the server takes precedence.
        served_name: what the server calls the model, where that is not `model_id`.
        shared_dir: where `sync_weights` writes; the server must see it under the same path.
        tolerance: by how much log-probabilities may differ from the actor's, on average over the
            probe; None: 1e-3 for an actor in float32, 0.1 for others.
        timeout: seconds that a call may take, with all its requests and their repetitions.
        retries: how often a request is sent again after a lost connection or a server error.
        api_key: the server's key; None if it has none.
        seed: seed of all calls; None: the server chooses its own, which is faster.
        return_routed_experts: whether the `new_input_feature` of a sequence has `routed_experts`,
            the experts that the server chose, for training to replay. The server needs
            `--enable-return-routed-experts`.

    Raises:
        ValueError: for a malformed address, numbers out of range, an unreadable checkpoint, or
            `return_routed_experts` for a model without experts.
        ImportError: if httpx is not installed.
    """

    def __init__(
        self,
        *,
        model_id: str | Path,
        base_url: str,
        template: Template | None = None,
        max_length: int | None = None,
        served_name: str | None = None,
        shared_dir: str | Path | None = None,
        tolerance: float | None = None,
        timeout: float = 600.0,
        retries: int = 3,
        api_key: str | None = None,
        seed: int | None = 0,
        return_routed_experts: bool = False,
    ) -> None:
        for name, value in (("timeout", timeout), ("tolerance", tolerance)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
        client = Client(base_url, api_key=api_key, retries=retries)
        source = locate(model_id, argument="model_id")
        self.config = parse_config(read_json(source, CONFIG))
        routing = Routing.of(self.config)
        if return_routed_experts:
            check_has_experts("return_routed_experts", self.config)
        self.template = template or template_of(source)
        self.max_length = longest_row(max_length, self.config)
        self.seed, self.calls = seed, 0
        self.shared_dir = None if shared_dir is None else Path(shared_dir).expanduser().resolve()
        self._served = ServedSampler(
            client,
            names_of(model_id, served_name),
            self.config.vocab_size,
            self.max_length,
            tolerance=tolerance,
            timeout=timeout,
            routing=routing if return_routed_experts else None,
        )

    def sample(
        self,
        inputs: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        num_samples: int = 1,
        logprobs_kind: LogprobsKind | None = "policy",
    ) -> SampleResponses:
        """Draw completions.

        Args:
            inputs: as for [`JaxSampler`][twinkle_jax.sampler.JaxSampler].
            sampling_params: how to draw; None for temperature 1 and no filters.
            num_samples: completions of each prompt; 1 leaves it to the parameters.
            logprobs_kind: as for [`JaxSampler.sample`][twinkle_jax.sampler.JaxSampler.sample]; None
                lets every server draw with every parameter.

        Returns:
            A list with a response for each prompt, in order.

        Raises:
            ValueError: if a prompt is empty or too long, vLLM does not take a parameter, or no
                server has log-probabilities of that kind for it; the message names it.
            TypeError: if something has the wrong type.
            ServerError: if the server cannot be reached, takes too long, has another model, other
                weights or other log-probabilities, or answers invalidly.
        """
        params = read_params(sampling_params)
        vocab = self.config.vocab_size
        check_params(params, vocab)
        call = read_call(
            inputs,
            params,
            num_samples,
            self.template,
            logprobs_kind,
            vocab=vocab,
            max_length=self.max_length,
        )
        prompts = [prompt_tokens(feature).tolist() for feature in call.features]
        answers = self._served.complete(
            prompts,
            params,
            call.num_samples,
            call.stops,
            self._seeds(params.seed, len(prompts)),
            logprobs_kind=logprobs_kind,
        )
        drawn = [one for answer in answers for one in answer.drawn]
        if logprobs_kind == "sampling" and params.temperature == 0:  # vLLM gives temperature 1
            drawn = [one._replace(logprobs=[[(x, 0.0)] for x in one.tokens]) for one in drawn]
        scored = params.max_tokens == 0
        responses = scored_responses(call) if scored else make_responses(call, drawn)
        for response, answer in zip(responses, answers, strict=True):
            if answer.prompt is not None:
                response.prompt_logprobs = [x[0][1] if x else None for x in answer.prompt]
                if top := params.prompt_logprobs:  # servers list the prompt's own token besides
                    ranked = [x and sorted(x, key=lambda pair: -pair[1]) for x in answer.prompt]
                    response.topk_prompt_logprobs = [x and x[:top] for x in ranked]
        return responses

    def sync_weights(self, actor: Actor, *, merge: bool = False) -> None:
        """Have the server load a policy's weights, and verify that it has them.

        A checkpoint, or the adapter where there is one, is written to `shared_dir`, and loaded.
        Then both sides score the same tokens, some of them drawn by the server with what it
        loaded.

        Args:
            actor: the policy.
            merge: whether to load an adapter as a whole checkpoint, added to the kernels.

        Raises:
            ValueError: if the policy has another configuration or a parameter is not finite.
            ServerError: if the server cannot load it, or its log-probabilities are not the
                policy's; `sample` then raises too, until a later call succeeds.
        """
        if replace(actor.config, tie_embeddings=False) != replace(
            self.config, tie_embeddings=False
        ):
            raise ValueError("actor must have the configuration of the sampler, got another one")
        if self.shared_dir is None:
            raise ValueError("shared_dir must be a directory that the server sees too, got None")
        self._served.load(actor, self.shared_dir, merge=merge)

    def set_template(self, template: Template) -> None:
        """Set the template that encodes conversations and decodes tokens."""
        self.template = template

    def _seeds(self, seed: int | None, prompts: int) -> list[int | None]:
        """Return a seed for each prompt: with equal seeds, vLLM draws equal completions."""
        call, self.calls = self.calls, self.calls + 1
        if seed is not None:
            entropy = [seed]
        elif self.seed is not None:
            entropy = [self.seed, call]
        else:
            return [None] * prompts
        words = np.random.SeedSequence(entropy).generate_state(prompts, np.uint64)
        return [int(word) >> 2 for word in words]


class ServedSampler(ServedPolicy):
    """Draws completions of token ids on a server, which a policy's weights are loaded into."""

    def complete(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        num_samples: int,
        stops: Stops,
        seeds: Sequence[int | None],
        *,
        limits: Sequence[int] | None = None,
        logprobs_kind: LogprobsKind | None = "policy",
        purpose: str = "inputs[{}]",
    ) -> list[ServerCompletions]:
        """Draw completions of token ids; errors are those of `vLLMSampler.sample`.

        Args:
            prompts: token ids.
            params: how to draw; its stops, seed and number of samples are not read.
            num_samples: completions of each prompt.
            stops: what ends a completion: token ids and strings.
            seeds: one for each prompt; None: the server chooses.
            limits: the most tokens of a completion of each prompt, for all of which the server must
                have room; None: `params.max_tokens`, or fewer where there is less room.
            logprobs_kind: as for `vLLMSampler.sample`.
            purpose: what errors call a request, with {} for the number of its prompt.
        """
        modes = usable_modes(params, logprobs_kind, self.vocab)
        deadline = Deadline(self.timeout)
        served, mode = self.check(deadline)
        check_mode(self._client.url, mode, modes, logprobs_kind)
        requests = []
        for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            if limits is None:
                limit = self._limit(i, prompt, served, params)
            else:
                limit = limits[i]
                self._check_room(len(prompt) + limit, served)
            settings = CompletionSettings(
                served.name,
                prompt,
                num_samples,
                limit,
                seed,
                params,
                stops,
                self.vocab,
                self.routing,
            )
            requests.append(completion_request(settings, purpose.format(i)))
        try:
            answers: list[ServerCompletions] = self._client.send_requests(deadline, requests)
            # A server that was restarted meanwhile has other weights for what was sent again.
            self._check_weights(self._client, deadline, served, LostServerError)
        except ServerError:
            if deadline.remaining:
                self.check(deadline)  # one that was restarted may not know the adapter
            raise
        return answers

    def wait(self, seconds: float) -> None:
        """Wait, or end the wait at `cancel`."""
        self._client.cancelled.wait(seconds)

    def cancel(self) -> None:
        """End all calls, those that are running in other threads and later ones, with an error."""
        self._client.cancelled.set()

    def _limit(self, i: int, prompt: list[int], served: Served, params: SamplingParams) -> int:
        """Return the most tokens of a completion, here and on the server."""
        room = min(self._max_length, served.max_length) - len(prompt)
        if room < 1:
            raise ValueError(
                f"inputs[{i}] must have fewer tokens than the server's max_model_len="
                f"{served.max_length}, got {len(prompt)}"
            )
        # A server draws at least one token, which is left out where none is asked for.
        return room if params.max_tokens is None else min(room, max(params.max_tokens, 1))

    def _check_room(self, tokens: int, served: Served) -> None:
        if tokens > served.max_length:
            raise ServerError(
                f"{self._client.url} must have room for rows of {tokens} tokens, got a "
                f"max_model_len of {served.max_length}: start it with --max-model-len "
                f"{max(tokens, self._max_length)}, as later rows may have"
            )


# What vLLM supports, and which log-probabilities it can give.


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
