"""The engine on a vLLM server: it has the weights of each step, and draws the completions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from twinkle_jax.data import SamplingParams, Template, Trajectory
from twinkle_jax.data.settings import positive
from twinkle_jax.model import Params
from twinkle_jax.rollout import hosts
from twinkle_jax.rollout.engine import PromptCompletions, TurnEngine, pad_prompts, prompt_ids
from twinkle_jax.rollout.rollout import RolloutConfig
from twinkle_jax.sampler import LENGTH, STOP, Actor, Completions, ServerError, vLLMSampler
from twinkle_jax.sampler.requests import DrawnSequence, Stops
from twinkle_jax.sampler.vllm_sampler import check_params, usable_modes
from twinkle_jax.sampler.vllm_server import Client, Deadline, Request


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
        overlap: whether the completions of the next step are sampled while the update of this one
            runs, by the policy before that update; where a checkpoint or an evaluation is due, not.
    """

    url: str | None = None
    served_name: str | None = None
    shared_dir: str | None = None
    timeout: float = positive(default=3600.0)
    tolerance: float | None = positive(default=None)
    seeded: bool = True
    overlap: bool = False


class ServerEngine:
    """Draws on a vLLM server, which loads the policy's weights whenever they have changed.

    The log-probabilities of what is drawn are of the whole distribution at the temperature, as
    those of [`LocalEngine`][twinkle_jax.rollout.LocalEngine]; where the server cannot give these,
    as with filters at a temperature other than 1, the call is refused.

    With several processes, each draws an equal share of the completions. The weights, of which each
    holds a part, are written by all and loaded once.

    Args:
        sampler: the client of the server, with a `shared_dir`, and with several processes a
            [`SharedClient`][twinkle_jax.rollout.SharedClient] as its `loader`.
        actor: makes the policy that the server is to have from trained parameters.
        template: encodes conversations, and decodes tokens.
        settings: of sampling; checked here, before anything is drawn.
        mesh: of the parameters; None for one device.
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
        mesh: Mesh | None = None,
        seeded: bool = True,
    ) -> None:
        self.template = template
        self._mesh, self._seeded = mesh, seeded
        self._sampler, self._actor = sampler, actor
        self._loaded: Any = None  # a leaf of the parameters whose weights the server has
        params = _sampling_params(settings)
        check_params(params, sampler.config.vocab_size)
        usable_modes(params, "policy", sampler.config.vocab_size)

    @property
    def row_shards(self) -> int:
        """Number of devices that rows are spread over; the rows of a call must be a multiple."""
        return 1 if self._mesh is None else int(self._mesh.shape["data"] * self._mesh.shape["fsdp"])

    def load(self, params: Params) -> None:
        """Have the server load these parameters, unless it has them already.

        Raises:
            ServerError: if it cannot, or its log-probabilities are not the policy's.
        """
        leaf = jax.tree.leaves(params)[0]
        if leaf is not self._loaded:
            self._loaded = None
            try:
                self._sampler.sync_weights(self._actor(params))
            except ServerError as error:
                hosts.fail(error)
            self._loaded = leaf

    def draw(
        self,
        params: Params,
        prompts: Sequence[Trajectory],
        key: jax.Array,
        settings: RolloutConfig,
    ) -> PromptCompletions:
        """Draw completions; arrays of the host, or with several processes spread over devices.

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
        rows = hosts.agreed(
            "encoding prompts",
            lambda: prompt_ids(self.template, prompts, longest=settings.max_prompt_tokens),
        )
        seeds = np.asarray(_prompt_seeds(key, len(rows))).tolist()
        limits = [settings.max_new_tokens] * len(rows)
        drawn = self.complete(rows, seeds, limits, settings, settings.num_samples)
        if hosts.several():  # the process that holds a row decodes and scores it
            drawn = hosts.spread_rows(drawn, self._mesh)
        return PromptCompletions(*pad_prompts(rows), drawn)

    def converse(self, params: Params, count: int, settings: RolloutConfig) -> TurnEngine:
        """Draw turns of `count` rows; the server's cache of prefixes has what it read before."""
        self.load(params)
        return _ServerTurns(self, count, settings)

    def cancel(self) -> None:
        """End what another thread draws, with a ServerError there."""
        self._sampler.cancel()

    def complete(
        self,
        rows: Sequence[list[int]],
        seeds: Sequence[int],
        limits: Sequence[int],
        settings: RolloutConfig,
        num_samples: int = 1,
    ) -> Completions:
        """Draw completions of token ids, with the weights that were loaded last; host arrays."""
        part = hosts.deal(len(rows))

        def draw() -> Completions:
            if part.start == part.stop:
                return _on_rows([], settings.max_new_tokens)
            answers = self._sampler.complete(
                rows[part],
                _sampling_params(settings),
                num_samples,
                Stops(list(self.template.tokenizer.stop_token_ids), []),
                seeds[part] if self._seeded else [None] * (part.stop - part.start),
                limits=limits[part],
            )
            drawn = [one for answer in answers for one in answer.drawn]
            return _on_rows(drawn, settings.max_new_tokens)

        drawn = hosts.agreed("sampling on the server", draw)
        of_prompts = jax.tree.map(lambda x: x.reshape(-1, num_samples, *x.shape[1:]), drawn)
        gathered = hosts.gather_rows(of_prompts, len(rows))
        completions: Completions = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), gathered)
        return completions


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
        numbers = list(rows)

        def scatter(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            of_all_rows = np.zeros((self.count, *values.shape[1:]), values.dtype)
            of_all_rows[numbers] = values
            return of_all_rows

        scattered: Completions = jax.tree.map(scatter, drawn)
        return scattered


class SharedClient(Client):
    """A client of all processes: process 0 sends, and each has the answers.

    All processes must send the same requests at the same point.
    """

    def decide(self, compute: Callable[[], str]) -> str:
        """Return in each process what process 0 computes."""
        return str(hosts.first_decides("naming an adapter", compute))

    def send_requests(self, deadline: Deadline, requests: Sequence[Request]) -> list[Any]:
        """Send requests from process 0, and read the answers in each.

        Raises:
            SharedServerError: in all processes, for what `Client.send_requests` raises.
        """

        def send() -> list[Any]:
            return Client.send_requests(self, deadline, [_with_json(x) for x in requests])

        try:
            answers = hosts.first_decides("asking the server", send)
        except hosts.SharedError as error:
            raise SharedServerError(str(error)) from error
        pairs = zip(requests, answers, strict=True)
        return [request.read and request.read(answer) for request, answer in pairs]


class SharedServerError(ServerError, hosts.SharedError):
    """A server cannot be reached, or answers invalidly; raised in all processes."""


def _with_json(request: Request) -> Request:
    """Have a request return the JSON of its answer, once that is read without an error."""
    read = request.read
    return request if read is None else request._replace(read=lambda json: (read(json), json)[1])


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
