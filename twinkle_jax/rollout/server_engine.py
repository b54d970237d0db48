"""The engine on a vLLM server: it has the weights of each step, and draws the completions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from twinkle_jax.data import SamplingParams, Template, Trajectory
from twinkle_jax.data.settings import positive
from twinkle_jax.model import Params
from twinkle_jax.rollout.engine import PromptCompletions, TurnEngine, pad_prompts, prompt_ids
from twinkle_jax.rollout.rollout import RolloutConfig
from twinkle_jax.sampler import LENGTH, STOP, Actor, Completions, vLLMSampler
from twinkle_jax.sampler.requests import DrawnSequence, Stops
from twinkle_jax.sampler.vllm_sampler import check_params, usable_modes


@dataclass(frozen=True)
class ServerConfig:
    """A vLLM server that samples in place of this process; its key is in `VLLM_API_KEY`.

    Attributes:
        url: of the server, http://HOST:PORT; none: this process samples, on the devices that train.
        served_name: what the server calls the model; none: as in --model.
        shared_dir: where the weights of each step are written, for the server to load; it must
            see them under the same path. None: weights in output_dir.
        timeout: seconds that the server may take for the completions of a step, or of a turn.
        tolerance: mean difference of log-probabilities, in nats, up to which the server has the
            weights that it was told to load; none: 0.001 in float32, 0.1 in bfloat16.
        seeded: whether each prompt has a seed of its own, so that a server repeats what it drew;
            false is faster.
    """

    url: str | None = None
    served_name: str | None = None
    shared_dir: str | None = None
    timeout: float = positive(default=3600.0)
    tolerance: float | None = positive(default=None)
    seeded: bool = True


class ServerEngine:
    """Draws on a vLLM server, which loads the policy's weights whenever they have changed.

    The log-probabilities of what is drawn are of the whole distribution at the temperature, as
    those of [`LocalEngine`][twinkle_jax.rollout.LocalEngine]; where the server cannot give these,
    as with filters at a temperature other than 1, the call is refused. Runs of one process only.

    Args:
        sampler: the client of the server, with a `shared_dir`.
        actor: makes the policy that the server is to have from trained parameters.
        template: encodes conversations, and decodes tokens.
        settings: of sampling; checked here, before anything is drawn.
        row_shards: number of devices that rows are spread over.
        seeded: whether each prompt has a seed of its own.

    Raises:
        ValueError: if a vLLM server cannot sample with these settings.
    """

    def __init__(
        self,
        sampler: vLLMSampler,
        actor: Callable[[Params], Actor],
        template: Template,
        settings: RolloutConfig,
        *,
        row_shards: int = 1,
        seeded: bool = True,
    ) -> None:
        self.template, self.row_shards = template, row_shards
        self._sampler, self._actor, self._seeded = sampler, actor, seeded
        self._loaded: Any = None  # a leaf of the parameters whose weights the server has
        params = _sampling_params(settings)
        check_params(params, sampler.config.vocab_size)
        usable_modes(params, "policy", sampler.config.vocab_size)

    def load(self, params: Params) -> None:
        """Have the server load these parameters, unless it has them already.

        Raises:
            ServerError: if it cannot, or its log-probabilities are not the policy's.
        """
        leaf = jax.tree.leaves(params)[0]
        if leaf is not self._loaded:
            self._loaded = None
            self._sampler.sync_weights(self._actor(params))
            self._loaded = leaf

    def draw(
        self,
        params: Params,
        prompts: Sequence[Trajectory],
        key: jax.Array,
        settings: RolloutConfig,
    ) -> PromptCompletions:
        """Draw completions; they are arrays of the host.

        Args:
            params: the current trained parameters.
            prompts: conversations in which the assistant speaks next.
            key: of this call; each prompt draws with a seed of its own.
            settings: without `auto` values.

        Raises:
            ValueError: if a prompt is too long.
            ServerError: if the server cannot be reached, takes too long, has other weights, or
                answers invalidly.
        """
        self.load(params)
        rows = prompt_ids(self.template, prompts, longest=settings.max_prompt_tokens)
        seeds = np.asarray(_prompt_seeds(key, len(rows))).tolist()
        limits = [settings.max_new_tokens] * len(rows)
        drawn = self.complete(rows, seeds, limits, settings, settings.num_samples)
        tokens, mask = pad_prompts(rows)
        return PromptCompletions(tokens, mask, _on_rows(drawn, settings.max_new_tokens))

    def converse(self, params: Params, count: int, settings: RolloutConfig) -> TurnEngine:
        """Draw turns of `count` rows; the server's cache of prefixes has what it read before."""
        self.load(params)
        return _ServerTurns(self, count, settings)

    def complete(
        self,
        rows: Sequence[list[int]],
        seeds: Sequence[int],
        limits: Sequence[int],
        settings: RolloutConfig,
        num_samples: int = 1,
    ) -> list[DrawnSequence]:
        """Draw completions of token ids, with the weights that were loaded last."""
        answers = self._sampler.complete(
            rows,
            _sampling_params(settings),
            num_samples,
            Stops(list(self.template.tokenizer.stop_token_ids), []),
            seeds if self._seeded else [None] * len(rows),
            limits=limits,
        )
        return [one for answer in answers for one in answer.drawn]


@dataclass(frozen=True)
class _ServerTurns:
    """Draws turns of a fixed number of conversations."""

    engine: ServerEngine
    count: int
    settings: RolloutConfig

    def go_on(
        self, rows: Mapping[int, Sequence[int]], keys: jax.Array, limits: Mapping[int, int]
    ) -> Completions:
        """Draw the next turn of some of the rows."""
        seeds = np.asarray(_row_seeds(keys))
        drawn = self.engine.complete(
            [list(row) for row in rows.values()],
            [int(seeds[number]) for number in rows],
            [limits[number] for number in rows],
            self.settings,
        )
        of_rows = dict(zip(rows, drawn, strict=True))
        nothing = DrawnSequence([], [], "token")
        everyone = [of_rows.get(number, nothing) for number in range(self.count)]
        return _on_rows(everyone, self.settings.max_new_tokens)


def _sampling_params(settings: RolloutConfig) -> SamplingParams:
    return SamplingParams(
        max_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k or -1,  # Twinkle's way to say all
        top_p=settings.top_p,
        min_p=settings.min_p,
        repetition_penalty=settings.repetition_penalty,
    )


def _on_rows(drawn: Sequence[DrawnSequence], width: int) -> Completions:
    """Lay completions out in rows, padded on the right."""
    tokens = np.zeros((len(drawn), width), np.int32)
    logprobs = np.zeros((len(drawn), width), np.float32)
    lengths = np.asarray([len(one.tokens) for one in drawn], np.int32)
    for i, one in enumerate(drawn):
        tokens[i, : lengths[i]] = one.tokens
        logprobs[i, : lengths[i]] = [pairs[0][1] for pairs in one.logprobs]
    reasons = [LENGTH if one.end == "length" else STOP for one in drawn]
    mask = np.arange(width, dtype=np.int32) < lengths[:, None]
    arrays: Any = tokens, mask, logprobs, logprobs, np.asarray(reasons, np.int32), lengths
    return Completions(*arrays)


def _prompt_seeds(key: jax.Array, prompts: int) -> Int[Array, " prompts"]:
    return _row_seeds(jax.random.split(key, prompts))


@jax.jit
def _row_seeds(keys: jax.Array) -> Int[Array, " rows"]:
    """Make a seed for each key; vLLM adds the number of the sample to that of a prompt."""
    bits = jax.vmap(lambda key: jax.random.bits(jax.random.clone(key), (), jnp.uint32))(keys)
    return (bits >> 1).astype(jnp.int32)
