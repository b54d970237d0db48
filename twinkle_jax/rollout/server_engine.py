"""The engine on a vLLM server: it has the weights of each step, and draws the completions.

It may draw those of the next step while the update of this one runs.
"""

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from twinkle_jax.data import PromptBatch, SamplingParams, Template, Trajectory
from twinkle_jax.data.settings import positive, seconds
from twinkle_jax.model import Params
from twinkle_jax.model.decoder.sharding import row_shards
from twinkle_jax.rollout import hosts
from twinkle_jax.rollout.engine import (
    PromptCompletions,
    TurnEngine,
    among_all_rows,
    check_logits,
    pad_prompts,
    prompt_ids,
)
from twinkle_jax.rollout.hosts import Made
from twinkle_jax.rollout.rollout import Rollout, RolloutConfig, RolloutSource
from twinkle_jax.sampler import LENGTH, STOP, Actor, Completions, ServerError
from twinkle_jax.sampler.requests import DrawnSequence, Stops
from twinkle_jax.sampler.vllm_sampler import ServedSampler, check_params, usable_modes
from twinkle_jax.sampler.vllm_server import (
    Client,
    Deadline,
    LostServerError,
    Request,
    Routing,
    ServerCompletions,
)


@dataclass(frozen=True)
class ServerConfig:
    """A vLLM server that samples in place of this process; its key is in `VLLM_API_KEY`.

    Attributes:
        url: of the server, http://HOST:PORT; none: this process samples, on the devices that train.
        served_name: what the server calls the model; none: as in --model.
        shared_dir: where the weights of each step are written, for the server to load; it must
            see them under the same path; none: weights in output_dir.
        timeout: seconds that the server may take for the completions of a step or of a turn, or
            to load weights.
        tolerance: mean difference of log-probabilities, in nats, up to which the server has the
            weights that it was told to load; none: 0.001 in float32, 0.1 in bfloat16.
        seeded: whether each prompt has a seed of its own, so that a server repeats what it drew;
            false is faster.
        patience: seconds that the run waits for a server that is gone, restarts or is busy, which
            then loads the weights and draws again; afterwards the run ends.
        overlap: whether the completions of the next step are sampled while the update of this one
            runs, by the policy before that update; not before a checkpoint or an evaluation. With
            several processes, for completions of one turn.
    """

    url: str | None = None
    served_name: str | None = None
    shared_dir: str | None = None
    timeout: float = seconds(default=3600.0)
    tolerance: float | None = positive(default=None)
    seeded: bool = True
    patience: float = seconds(default=600.0)
    overlap: bool = False


class ServerEngine:
    """Draws on a vLLM server, which loads the policy's weights whenever they have changed.

    The log-probabilities of what is drawn are of the whole distribution at the temperature, as
    those of [`LocalEngine`][twinkle_jax.rollout.LocalEngine]; where the server cannot give these,
    as with filters at a temperature other than 1, the call is refused.

    With several processes, each draws an equal share of the completions. The weights, of which each
    holds a part, are written by all and loaded once: the server then has a `SharedClient`.

    Args:
        server: draws.
        shared_dir: where weights are written, for the server to load.
        actor: makes the policy that the server is to have from trained parameters.
        template: encodes conversations, and decodes tokens.
        settings: of sampling; checked here, before anything is drawn.
        mesh: of the parameters; None for one device.
        seeded: as `ServerConfig` has it.
        patience: likewise.
        note: shows a sentence to the user.

    Raises:
        ValueError: if a vLLM server cannot sample with these settings.
    """

    def __init__(
        self,
        server: ServedSampler,
        shared_dir: Path,
        actor: Callable[[Params], Actor],
        template: Template,
        settings: RolloutConfig,
        *,
        mesh: Mesh | None,
        seeded: bool,
        patience: float,
        note: Callable[[str], None],
    ) -> None:
        self.template = template
        self._patience, self._note = patience, note
        self._mesh, self._seeded = mesh, seeded
        self._server, self._shared_dir, self._actor = server, shared_dir, actor
        self._loaded: Any = None  # a leaf of the parameters whose weights the server has
        self._begun: tuple[_Call, _Background[list[ServerCompletions]]] | None = None
        params = _sampling_params(settings)
        with option_names():
            check_params(params, server.vocab)
            usable_modes(params, "policy", server.vocab)

    @property
    def row_shards(self) -> int:
        """Number of devices that rows are spread over; the rows of a call must be a multiple."""
        return row_shards(self._mesh)

    def room(self) -> int:
        """Ask the server how many tokens a row may have there.

        Raises:
            ServerError: if it cannot be reached, or has another model.
        """
        with option_names(self._server.timeout):
            return self._server.room()

    def remove_adapters(self) -> None:
        """Remove adapters that earlier processes have left, here and on the server.

        For a directory that no other run writes to.
        """
        hosts.first_decides(
            "removing old adapters", lambda: self._server.remove_adapters(self._shared_dir)
        )

    def load(self, params: Params) -> None:
        """Have the server load these parameters, unless it has them already.

        A server that is gone or busy is waited for, and told again.

        Raises:
            ServerError: if it cannot, or its log-probabilities are not the policy's.
            LogitsError: if it cannot, and the policy's logits are not finite.
        """
        leaf = jax.tree.leaves(params)[0]
        if leaf is self._loaded:
            return
        self._loaded = None
        actor = self._actor(params)
        end: Deadline | None = None
        while True:
            try:
                with option_names(self._server.timeout):
                    self._server.load(actor, self._shared_dir)
                break
            except (ServerError, ValueError) as error:
                in_all_processes = isinstance(error, ServerError) or not hosts.several()
                if not in_all_processes:
                    raise
                # A server reports NaN in its own way, or none.
                scores = actor.forward_only(inputs=[{"input_ids": list(range(8))}])["logps"]
                check_logits(np.isnan(scores).any(axis=1))
                end = self._wait(end, error)
        self._loaded = leaf

    def _wait(self, end: Deadline | None, error: Exception) -> Deadline:
        return wait_for(
            self._server, end, error, self._patience, option="server.patience", note=self._note
        )

    def draw(
        self,
        params: Params,
        prompts: Sequence[Trajectory],
        key: jax.Array,
        settings: RolloutConfig,
    ) -> PromptCompletions:
        """Draw completions; arrays of the host, or with several processes spread over devices.

        Raises:
            ValueError: if a prompt is too long.
            ServerError: if the server cannot be reached, takes too long, has other weights, or
                answers invalidly.
        """
        self.load(params)
        call = self._call(prompts, key, settings)
        drawn = self.complete(call)
        if hosts.several():  # the process that holds a row decodes and scores it
            drawn = hosts.spread_rows(drawn, self._mesh)
        return PromptCompletions(*pad_prompts(call.rows), drawn)

    def begin(self, prompts: Sequence[Trajectory], key: jax.Array, settings: RolloutConfig) -> None:
        """Ask the server for the completions of a later `draw` with the same arguments.

        The server must not load other weights in between. A thread waits for the answers; it
        computes nothing on devices, where all processes must begin the same in the same order.

        Raises:
            ValueError: if a prompt is too long.
        """
        call = self._call(prompts, key, settings)
        self._begun = call, _Background(lambda: self._ask(call))

    def _call(
        self, prompts: Sequence[Trajectory], key: jax.Array, settings: RolloutConfig
    ) -> "_Call":
        rows = hosts.agreed(
            "encoding prompts",
            lambda: prompt_ids(self.template, prompts, longest=settings.max_prompt_tokens),
        )
        seeds = np.asarray(_row_seeds(jax.random.split(key, len(rows)))).tolist()
        limits = [settings.max_new_tokens] * len(rows)
        return _Call(rows, seeds, limits, settings, settings.num_samples)

    def converse(self, params: Params, count: int, settings: RolloutConfig) -> TurnEngine:
        """Draw turns of `count` rows; the server's cache of prefixes has what it read before."""
        self.load(params)
        return _ServerTurns(self, count, settings)

    def cancel(self) -> None:
        """End what other threads draw, with a ServerError there."""
        self._server.cancel()
        if self._begun is not None:
            self._begun[1].thread.join(_JOIN_SECONDS)

    def complete(self, call: "_Call") -> Completions:
        """Complete rows of token ids with the weights loaded last; host arrays."""
        begun, self._begun = self._begun, None
        answers = begun[1].result if begun is not None and begun[0] == call else None
        end: Deadline | None = None
        completed: list[list[ServerCompletions]] = []

        def attempt() -> str | None:
            """Draw, or return the error of a server that is lost."""
            try:
                with option_names(self._server.timeout):
                    if end is not None:
                        self._server.restore()
                    completed.append(self._ask(call) if answers is None else answers.result())
            except LostServerError as error:
                return str(error)
            return None

        while any(errors := hosts.share("sampling on the server", attempt)):
            # If one process has lost the server, others may have drawn with other weights.
            completed.clear()
            answers = None
            end = self._wait(end, LostServerError(next(filter(None, errors))))
        drawn = self._lay_out(call, completed[0])
        of_prompts = jax.tree.map(lambda x: x.reshape(-1, call.num_samples, *x.shape[1:]), drawn)
        gathered = hosts.gather_rows(of_prompts, len(call.rows))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), gathered)

    def _ask(self, call: "_Call") -> list[ServerCompletions]:
        """Ask for this process's share of the completions."""
        part = hosts.deal(len(call.rows))
        if part.start == part.stop:
            return []
        return self._server.complete(
            call.rows[part],
            _sampling_params(call.settings),
            call.num_samples,
            Stops(list(self.template.tokenizer.stop_token_ids), []),
            call.seeds[part] if self._seeded else [None] * (part.stop - part.start),
            limits=call.limits[part],
            purpose="prompt {}",
        )

    def _lay_out(self, call: "_Call", answers: Sequence[ServerCompletions]) -> Completions:
        # Processes join arrays of one width; otherwise it follows the rows that were drawn.
        width = max(map(len, call.rows)) + max(call.limits) - 1 if hosts.several() else None
        drawn = [one for answer in answers for one in answer.drawn]
        return _on_rows(drawn, call.settings.max_new_tokens, self._server.routing, width)


class _Call(NamedTuple):
    """Completions that all processes together ask for."""

    rows: Sequence[list[int]]
    seeds: Sequence[int]
    limits: Sequence[int]
    settings: RolloutConfig
    num_samples: int


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
        call = _Call(
            [list(row) for row in rows.values()],
            [int(seeds[number]) for number in rows],
            [limits[number] for number in rows],
            self.settings,
            num_samples=1,
        )
        return among_all_rows(self.engine.complete(call), list(rows), self.count)


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

        def send() -> dict[str, Any]:
            try:
                answers = Client.send_requests(self, deadline, [_with_json(x) for x in requests])
            except LostServerError as error:
                return {"lost": str(error)}
            return {"answers": answers}

        try:
            outcome = hosts.first_decides("asking the server", send)
        except hosts.SharedError as error:
            raise SharedServerError(str(error)) from error
        if "lost" in outcome:
            raise LostServerError(outcome["lost"])
        answers = outcome["answers"]
        pairs = zip(requests, answers, strict=True)
        return [request.read and request.read(answer) for request, answer in pairs]


class SharedServerError(ServerError, hosts.SharedError):
    """A server cannot be reached, or answers invalidly; raised in all processes."""


def _with_json(request: Request) -> Request:
    """Have a request return the JSON of its answer, once that is read without an error."""
    read = request.read
    return request if read is None else request._replace(read=lambda json: (read(json), json)[1])


# The rollout of the next step, during the update of this one.

_PAUSE = 5.0  # seconds before a server that is lost is asked again
_POLL = 0.2  # seconds between looks for a signal
_JOIN_SECONDS = 5.0


class _Background(Generic[Made]):
    """Computes something in a daemon: the process may end while a server takes its time."""

    def __init__(self, compute: Callable[[], Made]) -> None:
        self.result: Future[Made] = Future()

        def run() -> None:
            try:
                self.result.set_result(compute())
            except BaseException as error:
                self.result.set_exception(error)

        self.thread = threading.Thread(target=run, name="next rollout", daemon=True)
        self.thread.start()


class Sampled(NamedTuple):
    """A rollout without rewards, and its prompts."""

    prompts: PromptBatch
    rollout: Rollout


class NextRollout:
    """Samples one rollout in a thread, by a policy that the server has.

    The update that runs meanwhile deletes the parameters: the source must not read them once the
    server has loaded them. With several processes only the server works meanwhile, on completions
    of prompts: the source is one of `SingleTurn`, which samples them when they are taken.
    """

    def __init__(
        self, source: RolloutSource, engine: ServerEngine, settings: RolloutConfig
    ) -> None:
        self._source, self._engine, self._settings = source, engine, settings
        self._begun: tuple[PromptBatch, Callable[[], Rollout]] | None = None
        self._sampling: _Background[Rollout] | None = None

    def start(self, params: Params, prompts: PromptBatch, key: jax.Array) -> None:
        """Have the server load these parameters, and begin to sample.

        Raises:
            ServerError: if it cannot load them.
        """
        self._engine.load(params)

        def sample() -> Rollout:
            return self._source.sample(params, prompts, key)

        if hosts.several():
            self._engine.begin(prompts, key, self._settings)
            self._begun = prompts, sample
        else:
            self._sampling = _Background(sample)
            self._begun = prompts, self._sampling.result.result

    def take(self, check: Callable[[], None]) -> Sampled | None:
        """Wait for what was begun, and return it or raise what it raised; None if nothing was.

        In a run of one process, `check` is called meanwhile, and may raise.
        """
        if self._begun is None:
            return None
        while self._sampling and not wait([self._sampling.result], timeout=_POLL).done:
            check()
        (prompts, sample), self._begun = self._begun, None
        return Sampled(prompts, sample())

    def close(self) -> None:
        """Cancel what was begun."""
        if self._begun is not None:
            self._engine.cancel()
        if self._sampling is not None:
            self._sampling.thread.join(_JOIN_SECONDS)


def wait_for(
    server: ServedSampler,
    end: Deadline | None,
    error: Exception,
    patience: float,
    *,
    option: str,
    note: Callable[[str], None],
) -> Deadline:
    """Wait before a server that is gone or busy is asked again; return the end of the patience.

    After the first error, `end` is None. The error, the same in all processes, is raised if there
    is nothing to wait for, or no patience is left, which the user knows as `option`.
    """
    if not isinstance(error, LostServerError):
        hosts.fail(error)
    if end is None:
        end = Deadline(patience)
        note(f"warning: {error}; waiting for it, for up to {option}={patience:g} seconds")
    left = float(hosts.first_decides("waiting for the server", lambda: end.remaining))
    if not left:
        error.args = (f"{error}, for {option}={patience:g} seconds",)
        hosts.fail(error)
    server.wait(min(_PAUSE, left))
    return end


# Errors.

_OPTIONS = (
    (r"^base_url (.*): use api_key", r"server.url \1: set VLLM_API_KEY"),
    (r"^base_url ", "server.url "),
    (r"^api_key ", "VLLM_API_KEY "),
    (r"^shared_dir ", "server.shared_dir "),
    (r": api_key must be the server's", ": VLLM_API_KEY must be the server's"),
    (r"it must see shared_dir, ", "it must see server.shared_dir, "),
    (r"^temperature ", "rollout.temperature "),
    (r"; use logprobs_kind='sampling' or None$", ""),
    (r", as logprobs_kind='policy' asks", ""),
    (r"\(served_name says", "(server.served_name says"),
    (r"the actor's weights", "the policy's weights"),
    (
        r"must differ by at most (\S+) on average",
        r"must differ by at most server.tolerance=\1 on average",
    ),
    (r"the server gives (\S+), and the actor ", r"the server gives \1, and this process "),
    (r"the weights of the last sync_weights", "the weights that this run had it load"),
    (r", and after sync_weights it was ", ", and after loading it was "),
)


@contextmanager
def option_names(timeout: float | None = None, *, section: str = "server") -> Iterator[None]:
    """Name options of a run in the errors of a `ServedSampler`, which name its arguments."""
    try:
        yield
    except OSError as error:
        raise OSError(f"server.shared_dir must be a directory to write to: {error}") from error
    except (ServerError, ValueError) as error:
        # The command prints no notes, such as that the server may be paused still.
        text = ". ".join([str(error), *getattr(error, "__notes__", ())])
        for pattern, named in _OPTIONS:
            text = re.sub(pattern, named.replace("server.", f"{section}."), text)
        if timeout is not None:
            text = text.replace(
                f" within {timeout:g} seconds", f" within {section}.timeout={timeout:g} seconds"
            )
        error.args = (text,)
        raise


# Requests and rows.


def _sampling_params(settings: RolloutConfig) -> SamplingParams:
    return SamplingParams(
        max_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k or -1,  # Twinkle's way to say all
        top_p=settings.top_p,
        min_p=settings.min_p,
        repetition_penalty=settings.repetition_penalty,
    )


def _on_rows(
    drawn: Sequence[DrawnSequence], width: int, routing: Routing | None, longest: int | None
) -> Completions:
    """Lay completions out in rows; experts take `longest` columns, or as many as are needed."""
    tokens = np.zeros((len(drawn), width), np.int32)
    logprobs = np.zeros((len(drawn), width), np.float32)
    lengths = np.asarray([len(one.tokens) for one in drawn], np.int32)
    for i, one in enumerate(drawn):
        tokens[i, : lengths[i]] = one.tokens
        logprobs[i, : lengths[i]] = [pairs[0][1] for pairs in one.logprobs]
    reasons = [LENGTH if one.end == "length" else STOP for one in drawn]
    mask = np.arange(width, dtype=np.int32) < lengths[:, None]
    experts = None
    if routing is not None:
        known = [one.routing for one in drawn if one.routing is not None]
        longest = max(map(len, known)) if longest is None else longest
        shape = len(drawn), longest, routing.layers, routing.chosen
        experts = np.full(shape, routing.experts, routing.dtype)
        for row, values in zip(experts, known, strict=True):
            row[: len(values)] = values
    arrays: Any = tokens, mask, logprobs, logprobs, np.asarray(reasons, np.int32), lengths, experts
    return Completions(*arrays)


@jax.jit
def _row_seeds(keys: jax.Array) -> Int[Array, " rows"]:
    """Make a seed for each key; vLLM adds the number of the sample to that of a prompt."""
    bits = jax.vmap(lambda key: jax.random.bits(jax.random.clone(key), (), jnp.uint32))(keys)
    return (bits >> 1).astype(jnp.int32)
