"""Twinkle's sampler in this process: on the policy that is trained, or on its own parameters."""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.data import (
    LogprobsKind,
    SampleResponses,
    SamplingParams,
    StopReason,
    Template,
    bucket_size,
)
from twinkle_jax.data.batch import pad_tokens
from twinkle_jax.model import (
    DecoderConfig,
    Params,
    hidden_states,
    load_adapter,
    load_pretrained,
    partition_rules,
    shard_like_params,
    with_adapter,
    without_adapter,
)
from twinkle_jax.model.decoder.layers import map_logits
from twinkle_jax.model.decoder.lora import walk
from twinkle_jax.model.decoder.sharding import row_shards
from twinkle_jax.model.huggingface.checkpoint_files import read_dtype
from twinkle_jax.sampler.conversations import Conversations
from twinkle_jax.sampler.generate import generate
from twinkle_jax.sampler.requests import (
    Actor,
    Call,
    DrawnSequence,
    End,
    Prompt,
    check_has_experts,
    describe_broken,
    longest_row,
    make_responses,
    prompt_tokens,
    read_call,
    read_params,
    scored_responses,
    template_of,
)
from twinkle_jax.sampler.sampling import Sampling
from twinkle_jax.sampler.sizes import check_count
from twinkle_jax.sampler.slots import STOP, Completions


class JaxSampler:
    """Samples from a policy in this process, with Twinkle's interface.

    With `model`, the policy's current parameters are used at every call, adapters included: there
    is no copy to synchronise. With `model_id` the sampler loads its own.

    No two calls share noise: each draws from the seed and the number of earlier calls, `calls`,
    which a checkpoint should save. `seed` in the sampling parameters overrides both: calls with the
    same one draw the same.

    Args:
        model: the policy that is trained.
        model_id: a directory with a Hugging Face checkpoint, or a hub id, instead.
        template: encodes conversations and decodes tokens; by default the model's, or else one
            for the tokenizer beside the checkpoint, if there is one.
        max_length: the most tokens of a row, prompt included; None: `max_position_embeddings` of
            the checkpoint, but at most 4,096.
        dtype: compute type, with `model_id`; a model has its own.
        mesh: devices to run on, with `model_id`; likewise.
        seed: seed of all calls.
        return_routed_experts: whether the `new_input_feature` of a sequence has `routed_experts`,
            for a mixture of experts.

    Raises:
        ValueError: if not exactly one of `model` and `model_id` is given, a number is out of range,
            or `return_routed_experts` is set for a model without experts.
        TypeError: if something has the wrong type.
    """

    def __init__(
        self,
        model: Actor | None = None,
        *,
        model_id: str | Path | None = None,
        template: Template | None = None,
        max_length: int | None = None,
        dtype: DTypeLike = "float32",
        mesh: Mesh | None = None,
        seed: int = 0,
        return_routed_experts: bool = False,
    ) -> None:
        if (model is None) == (model_id is None):
            raise ValueError(
                "either model or model_id must be given, "
                f"got {'neither' if model is None else 'both'}"
            )
        if isinstance(model, str | Path):
            raise TypeError(f"model must be a policy, got {model!r}: a checkpoint is model_id")
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
            raise TypeError(f"seed must be an integer, got {seed!r}")
        self._model, self._params = model, None
        self._shardings: Any = None  # of the parameters while it sleeps
        if model is not None:
            self.config, source = model.config, model.source
            self.dtype, self.mesh = model.dtype, model.mesh
        else:
            self.dtype, self.mesh = read_dtype(dtype), mesh
            rules = None if mesh is None else partition_rules(mesh)
            assert model_id is not None
            decoder = load_pretrained(
                model_id, dtype=self.dtype, mesh=mesh, partition=rules, argument="model_id"
            )
            self.config, source, self._params = decoder.config, decoder.source, decoder.params
        model_template = None if model is None else model.template
        if template is None and isinstance(model_template, Template):
            template = model_template
        self.template = template or template_of(source)
        self.max_length = longest_row(max_length, self.config)
        self.seed, self.calls = seed, 0
        self.return_routed_experts = return_routed_experts
        if return_routed_experts:
            check_has_experts("return_routed_experts", self.config)

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
            inputs: trajectories, input features or strings, or one of them. A trajectory is
                encoded with the generation prompt, or without it if `max_tokens` is 0 and it is
                only scored; a string as it is.
            sampling_params: how to draw; None for temperature 1 and no filters.
            num_samples: completions of each prompt; 1 leaves it to the parameters.
            logprobs_kind: which log-probabilities the sequences have. `'policy'`: of the full
                distribution at the temperature, as training computes them for the same tokens.
                `'sampling'`: of the distribution after penalty and filters. None: none.

        Returns:
            A list with a response for each prompt, in order.

        Raises:
            ValueError: if a prompt is empty or leaves no room for a token, or a parameter is
                unsupported; the message names it.
            TypeError: if something has the wrong type.
            RuntimeError: if the policy's logits are not finite.
        """
        params = read_params(sampling_params)
        if params.logprobs not in (None, 0, 1):
            raise ValueError(
                "logprobs must be None, 0 or 1 with JaxSampler, which has log-probabilities of "
                f"drawn tokens only, got {params.logprobs}"
            )
        vocab = self.config.vocab_size
        if params.prompt_logprobs is not None and params.prompt_logprobs > vocab:
            raise ValueError(
                f"prompt_logprobs must be at most {vocab}, the policy's vocabulary, "
                f"got {params.prompt_logprobs}"
            )
        call = read_call(
            inputs,
            params,
            num_samples,
            self.template,
            logprobs_kind,
            vocab=vocab,
            max_length=self.max_length,
        )
        tokens, mask = _pad_prompts(call.features, multiple=row_shards(self.mesh))
        if params.max_tokens == 0:
            responses = scored_responses(call)
            self._score_prompts(responses, tokens, mask, params.prompt_logprobs)
            return responses
        limits = self.max_length - mask.sum(axis=1)
        limits = limits if params.max_tokens is None else limits.clip(max=params.max_tokens)
        limits[len(call.features) :] = 1
        drawn = generate(
            self.params,
            self.config,
            tokens,
            mask,
            self._key(params.seed),
            _sampling(call),
            num_samples=call.num_samples,
            max_new_tokens=bucket_size(int(limits.max()), smallest=16),
            max_tokens=limits,
            compute_dtype=self.dtype,
            mesh=self.mesh,
            keep_routing=self.return_routed_experts,
        )
        prompt_lengths = mask.sum(axis=1)[: len(call.features)].repeat(call.num_samples)
        responses = make_responses(call, _read_arrays(drawn, prompt_lengths, logprobs_kind))
        self._score_prompts(responses, tokens, mask, params.prompt_logprobs)
        return responses

    def stream(
        self,
        inputs: Prompt,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        block: int = 8,
    ) -> Iterator[tuple[str, StopReason | None]]:
        """Draw one completion, and yield its text while it is drawn.

        The distribution is that of `sample`; the noise of a seed is another one.

        Args:
            inputs: one prompt, as for `sample`.
            sampling_params: likewise; one completion.
            block: tokens that are drawn at a time.

        Yields:
            Further text, and why the completion has ended with the last one, None before. Text that
            may become part of a stop string waits for what follows.

        Raises:
            ValueError: for what `sample` refuses, several completions, or without a template.
            TypeError: if something has the wrong type.
            RuntimeError: if the policy's logits are not finite.
        """
        check_count("block", block)
        params = read_params(sampling_params)
        limits = {"vocab": self.config.vocab_size, "max_length": self.max_length}
        call = read_call(inputs, params, 1, self.template, None, **limits)
        if len(call.features) * call.num_samples != 1 or params.max_tokens == 0:
            raise ValueError(
                "inputs must be one prompt for one completion of at least one token, got "
                f"{len(call.features)} prompts, num_samples={call.num_samples}, "
                f"max_tokens={params.max_tokens}"
            )
        if self.template is None:
            raise ValueError("the sampler must have a template to stream text: set_template")
        prompt, text = prompt_tokens(call.features[0]).tolist(), ""
        tokens: list[int] = []
        limit = self.max_length - len(prompt)
        limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
        rows = Conversations(
            self.params,
            self.config,
            1,
            _sampling(call),
            max_length=self.max_length,
            max_new_tokens=block,
            compute_dtype=self.dtype,
            mesh=self.mesh,
        )
        key = self._key(params.seed)
        while True:
            count = len(tokens)
            keys = jax.random.fold_in(key, count)[None]
            drawn = rows.go_on({0: [*prompt, *tokens]}, keys, {0: min(block, limit - count)})
            (row,) = _read_arrays(drawn, np.array([len(prompt) + count]), None)
            tokens += row.tokens
            sequence = make_responses(call, [row._replace(tokens=tokens)])[0].sequences[0]
            assert sequence.decoded is not None
            if sequence.stop_reason == "stop" or len(tokens) == limit:
                yield sequence.decoded[len(text) :], sequence.stop_reason
                return
            if further := settled_text(sequence.decoded, call.stops.strings)[len(text) :]:
                text += further
                yield further, None

    @property
    def params(self) -> Any:
        """The parameters to sample from: the model's current ones, or the sampler's own."""
        if self._shardings is not None:
            raise ValueError("the sampler is asleep: call wake_up or sync_weights")
        return self._params if self._model is None else self._model.params

    def with_params(self, params: Any) -> Self:
        """Return a sampler that draws from other parameters, and shares everything else."""
        other = copy(self)
        other._model, other._params = None, params
        return other

    def with_adapter(self, adapter_path: str | Path) -> Self:
        """Return a sampler that draws with an adapter over the parameters, which it shares.

        Args:
            adapter_path: a directory with an adapter in PEFT's format, or a hub id.

        Raises:
            ValueError: if the parameters hold an adapter already, or for what `load_adapter`
                refuses.
        """
        if any(path[-1] == "lora_A" for path, _ in walk(self.params)):
            raise ValueError(
                "adapter_path must be left out: the parameters hold an adapter already"
            )
        lora, adapter = load_adapter(adapter_path, self.config)
        return self.with_params(with_adapter(self.params, self.config, lora, adapter))

    def without_adapter(self) -> Self:
        """Return a sampler that draws from the parameters under the adapter, which it shares."""
        return self.with_params(without_adapter(self.params))

    def sleep(self, level: int = 1) -> None:
        """Free the devices' memory of the sampler's own parameters, until `wake_up`.

        Args:
            level: 1 keeps the parameters in the host's memory; 2 drops them, so that the next call
                must be `sync_weights`. The parameters of a `model` stay where they are.
        """
        if level not in (1, 2):
            raise ValueError(f"level must be 1 or 2, got {level!r}")
        if self._model is None and self._shardings is None:
            self._shardings = jax.tree.map(lambda x: x.sharding, self._params)
            self._params = jax.device_get(self._params) if level == 1 else None

    def wake_up(self) -> None:
        """Bring the parameters back to their devices."""
        if self._shardings is None:
            return
        if self._params is None:
            raise ValueError("level must be 1 to wake up, got 2: call sync_weights")
        self._params = jax.device_put(self._params, self._shardings)
        self._shardings = None

    def sync_weights(self, actor: Actor) -> None:
        """Copy a policy's parameters, adapters included; does nothing for the sampler's `model`.

        Raises:
            ValueError: if the policy has another configuration.
            TypeError: if it is no policy.
        """
        if actor is None:
            raise TypeError("actor must be a policy, got None")
        if actor is self._model:
            return
        if actor.config != self.config:
            raise ValueError("actor must have the configuration of the sampler, got another one")
        if self._model is not None:
            raise ValueError("actor must be the model that this sampler samples from, got another")

        def copied(params: Any) -> Any:  # training donates the original ones
            return jax.tree.map(lambda x: jnp.array(x, self.dtype, copy=True), params)

        params = actor.params
        shardings = None if self.mesh is None else shard_like_params(params, self.mesh)
        self._params = jax.device_put(jax.jit(copied)(params), shardings)
        self._shardings = None

    def set_template(self, template: Template) -> None:
        """Set the template that encodes conversations and decodes tokens."""
        self.template = template

    def _score_prompts(
        self, responses: SampleResponses, tokens: np.ndarray, mask: np.ndarray, top: int | None
    ) -> None:
        """Add the log-probabilities of its prompt to each response, if they are asked for."""
        if top is None:
            return
        scores = score_prompts(
            self.params,
            self.config,
            tokens,
            mask,
            top=top,
            compute_dtype=self.dtype,
            mesh=self.mesh,
        )
        logprobs, top_logprobs, top_tokens = (np.asarray(x) for x in scores)
        for row, response in enumerate(responses):
            # The first token has no log-probability: nothing precedes it.
            before_last = slice(len(response.prompt_token_ids or ()) - 1)
            response.prompt_logprobs = [None, *logprobs[row, before_last].tolist()]
            if top:
                pairs = zip(
                    top_tokens[row, before_last], top_logprobs[row, before_last], strict=True
                )
                response.topk_prompt_logprobs = [
                    None,
                    *(list(zip(a.tolist(), b.tolist(), strict=True)) for a, b in pairs),
                ]

    def _key(self, seed: int | None) -> jax.Array:
        call, self.calls = self.calls, self.calls + 1
        if seed is not None:
            return key_of_seed(seed)
        return jax.random.fold_in(key_of_seed(self.seed), call)


def key_of_seed(seed: int) -> jax.Array:
    """Make a key from all bits of a seed, of which JAX reads the lower 32."""
    if seed >= 2**32:
        seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    return jax.random.key(seed)


def _sampling(call: Call) -> Sampling:
    params = call.params
    return Sampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        stop_tokens=call.stops.tokens,
    )


def settled_text(text: str, stops: Sequence[str]) -> str:
    """Leave out the end that further tokens may change: part of a character or of a stop string."""
    text = text.rstrip("\ufffd")
    partial = (n for stop in stops for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n]))
    return text[: len(text) - max(partial, default=0)]


def _pad_prompts(
    features: Sequence[Mapping[str, Any]], *, multiple: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pad prompts on the right to bucketed sizes; filler rows are prompts of one token."""
    rows = [prompt_tokens(feature) for feature in features]
    count = bucket_size(len(rows), multiple=multiple)
    time = bucket_size(max(len(row) for row in rows), smallest=16)
    tokens, mask = pad_tokens(rows, length=time, count=count)
    mask[len(rows) :, 0] = True
    return tokens, mask


def _read_arrays(
    completions: Completions, prompt_lengths: Int[np.ndarray, " rows"], kind: LogprobsKind | None
) -> list[DrawnSequence]:
    """Convert the completions of so many prompts to lists; the others are filler rows."""
    rows = len(prompt_lengths)
    stopped = np.asarray(completions.finish_reasons) == STOP
    lengths = np.asarray(completions.lengths)
    tokens = np.asarray(completions.tokens)
    logprobs = np.asarray(
        completions.sampling_logprobs if kind == "sampling" else completions.logprobs
    )
    not_finite = np.isnan(logprobs[:rows]) & np.asarray(completions.mask[:rows])
    if not_finite.any():
        raise RuntimeError(describe_broken(int(not_finite.any(axis=1).sum()), rows))
    routing = None if completions.routing is None else np.asarray(completions.routing)
    drawn = []
    for row in range(rows):
        row_tokens = tokens[row, : lengths[row]].tolist()
        scores = logprobs[row, : lengths[row]].tolist()
        pairs = [[pair] for pair in zip(row_tokens, scores, strict=True)]
        experts = None
        if routing is not None:
            experts = routing[row, : prompt_lengths[row] + lengths[row] - 1]
        end: End = "token" if stopped[row] else "length"
        drawn.append(DrawnSequence(row_tokens, pairs, end, experts))
    return drawn


# Log-probabilities of prompts.


@partial(jax.jit, static_argnames=("config", "top", "compute_dtype", "mesh"))
def score_prompts(
    params: Params,
    config: DecoderConfig,
    tokens: Int[Array, "batch time"],
    mask: Bool[Array, "batch time"],
    *,
    top: int,
    compute_dtype: DTypeLike | None,
    mesh: Mesh | None,
) -> tuple[
    Float[Array, "batch time"], Float[Array, "batch time top"], Int[Array, "batch time top"]
]:
    """Score the token after each position, and find the `top` likely ones, at temperature 1.

    Returns:
        Log-probabilities of the next tokens, and log-probabilities and ids of the most likely ones,
        in descending order. The last column is meaningless: it has no next token.
    """
    hidden = hidden_states(
        params, config, tokens, mask, compute_dtype=compute_dtype, remat=False, mesh=mesh
    )

    def score(logits: Array, labels: Array) -> tuple[Array, Array, Array]:
        logprobs = jax.nn.log_softmax(logits)
        of_labels = jnp.take_along_axis(logprobs, labels[..., None], axis=-1)[..., 0]
        return of_labels, *jax.lax.top_k(logprobs, top)

    return map_logits(score, params, config, hidden, jnp.roll(tokens, -1, axis=1))
