"""The policy on a vLLM server: find it, load weights into it, and verify that it has them."""

import re
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from twinkle_jax.data import SamplingParams
from twinkle_jax.model import Decoder, merge_adapter
from twinkle_jax.model.decoder.lora import walk
from twinkle_jax.model.huggingface.checkpoint import save_checkpoint
from twinkle_jax.model.huggingface.checkpoint_files import CONFIG, read_json
from twinkle_jax.model.huggingface.saving import remove_remains
from twinkle_jax.sampler.requests import Actor, Stops
from twinkle_jax.sampler.vllm_server import (
    Client,
    CompletionSettings,
    Deadline,
    LogprobsMode,
    LostServerError,
    Request,
    Routing,
    ServerCompletions,
    ServerError,
    completion_request,
    read_integer,
    read_list,
    read_object,
    refuse,
)

_TOLERANCES = {"float32": 1e-3}
_OTHER_TOLERANCE = 0.1  # of types with fewer digits
_RESUME_SECONDS = 60.0  # also if the call's deadline has passed
_DEV_HINT = ": start it with VLLM_SERVER_DEV_MODE=1 in its environment"
_LORA_HINT = (
    ": start it with --enable-lora, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment; if "
    "it found no adapter, it must see shared_dir, {}, under the same path"
)
_ADAPTER = re.compile(r"adapter-[0-9a-f]{8}")  # names of `secrets.token_hex(4)`
_LAST_WEIGHTS = "the weights of the last sync_weights"
_SEEN_HINT = ": its log has the cause; it must see shared_dir, {}, under the same path"


class Served(NamedTuple):
    """A model on a server: its name there, the most tokens of a row, all names, its checkpoint."""

    name: str
    max_length: int
    all_names: tuple[Any, ...]
    root: Any


class ServedPolicy:
    """The model on a server that completions are sampled from.

    Args:
        client: sends requests to the server.
        names: what the server may call the model.
        vocab: token ids lie below it.
        max_length: the most tokens of a row.
        tolerance: by how much scores may differ on average; None: by the actor's type.
        timeout: seconds that a call may take.
        loader: sends the requests of `load`; None: the client. Where several processes hold an
            actor, all of them call `load`, and one sends.
        routing: what to read the experts of each token for; None: they are not read.
    """

    def __init__(
        self,
        client: Client,
        names: Sequence[str],
        vocab: int,
        max_length: int,
        *,
        tolerance: float | None,
        timeout: float,
        loader: Client | None = None,
        routing: Routing | None = None,
    ) -> None:
        self.vocab, self.timeout, self.routing = vocab, timeout, routing
        self._client, self._loader = client, loader or client
        self._names, self._max_length, self._tolerance = names, max_length, tolerance
        self._adapter: Path | None = None
        self._checkpoint: Path | None = None
        self._proof: tuple[Probe, TokenScores, float] | None = None
        self._mode: LogprobsMode | None = None
        self._sync_failed = False

    def check(self, deadline: Deadline) -> tuple[Served, LogprobsMode]:
        """Check that the server has the model, and the weights of the last `load`.

        Returns the model's name and room there, and which log-probabilities the server gives.

        Raises:
            ServerError: if it has another model or other weights.
        """
        url = self._client.url
        if self._sync_failed:
            raise ServerError(
                f"{url} must have the actor's weights, got an error from the last sync_weights: "
                "call it again"
            )
        served = self._find_model(self._client, deadline)
        if self._adapter is not None:
            if self._adapter.name not in served.all_names:
                raise LostServerError(
                    f"{url} must have {_LAST_WEIGHTS}, got no adapter {self._adapter.name!r} among "
                    "its models"
                )
            served = served._replace(name=self._adapter.name)
        self._check_weights(self._client, deadline, served, LostServerError)
        if self._mode is None:
            self._mode = find_logprobs_mode(
                self._client, deadline, self._probe(served), served.name
            )
        return served, self._mode

    def _check_weights(
        self, client: Client, deadline: Deadline, served: Served, error: type[ServerError]
    ) -> None:
        """Raise if likely tokens differ from those after the last `load`, if there was one."""
        if self._proof is None:
            return
        probe, last, tolerance = self._proof
        answers = client.send_requests(deadline, probe.first_token_requests(served.name))
        pairs = [
            (new[token], old[token])
            for new, old in zip(first_tokens(answers), last, strict=True)
            for token in sorted(new.keys() & old.keys())
        ]
        table = np.asarray(pairs).reshape(-1, 2)
        source = "after sync_weights it was"
        _compare(client.url, table[:, 0], table[:, 1], tolerance, _LAST_WEIGHTS, source, error)

    def room(self) -> int:
        """Ask the server how many tokens a row may have there.

        Raises:
            ServerError: if it cannot be reached, or has another model.
        """
        return self._find_model(self._client, Deadline(self.timeout)).max_length

    def restore(self) -> None:
        """Have a server that was restarted load what it was last told to load, from its files.

        Raises:
            ServerError: if it cannot, or then has other weights than it had.
        """
        deadline, client = Deadline(self.timeout), self._loader
        served = self._find_model(client, deadline)
        self._mode = None  # it may have been started with other options
        if self._adapter is not None:
            if self._adapter.name not in served.all_names:
                load_adapter(client, deadline, self._adapter)
            served = served._replace(name=self._adapter.name)
        elif self._checkpoint is not None:
            load_checkpoint(client, deadline, self._checkpoint)
        self._check_weights(client, deadline, served, ServerError)

    def load(self, actor: Actor, shared_dir: Path, *, merge: bool = False) -> None:
        """Have the server load an actor's checkpoint or adapter, and verify it.

        Raises:
            ValueError: if a parameter is not finite.
            ServerError: if loading or verification fails; `check` then raises one too, until a
                later call succeeds.
        """
        self._sync_failed, self._mode = True, None
        deadline = Deadline(self.timeout)
        served = self._find_model(self._loader, deadline)
        longest = actor.config.attention.longest_row
        if longest is not None and served.max_length > longest:
            raise ServerError(
                f"{self._loader.url} must have a max_model_len of at most {longest}, got "
                f"{served.max_length}, for which vLLM takes long_factor in all rows: start it with "
                f"--max-model-len {longest}"
            )
        old = self._adapter
        if not merge and any(path[-1] == "lora_A" for path, _ in walk(actor.params)):
            self._adapter = self._load_adapter(deadline, actor, shared_dir, served)
        else:
            self._check_form(actor, served)
            directory = shared_dir / "checkpoint"
            save_for_server(actor, directory)
            load_checkpoint(self._loader, deadline, directory)
            self._prove(deadline, actor, served)
            self._adapter, self._checkpoint = None, directory
        self._sync_failed = False
        if old is not None:
            _unload_adapter(self._loader, deadline, old)

    def _check_form(self, actor: Actor, served: Served) -> None:
        """Refuse a server with the quantised checkpoint that the policy was read from.

        It has no place for the weights that are written: it may keep the old ones without an error.
        """
        source = None if actor.source is None else Path(actor.source)
        if source is None or not (source / CONFIG).is_file():
            return
        config = read_json(source, CONFIG)
        parts = config, config.get("text_config") or {}
        quantised = any(part.get("quantization_config") for part in parts)
        if quantised and _names_directory(served.root, source):
            raise ServerError(
                f"{self._loader.url} must serve a checkpoint in 16 or 32 bits to load weights, got "
                f"{served.root}, with a quantization_config: write one with save_pretrained, and "
                "train and serve that"
            )

    def _load_adapter(
        self, deadline: Deadline, actor: Actor, shared_dir: Path, served: Served
    ) -> Path:
        """Load an adapter under a new name, so that no prefix cached for another one is used."""
        directory = shared_dir / self._loader.decide(lambda: f"adapter-{secrets.token_hex(4)}")
        actor.save(directory)
        try:
            load_adapter(self._loader, deadline, directory)
            self._prove(deadline, actor, served._replace(name=directory.name))
        except BaseException:
            _unload_adapter(self._loader, deadline, directory)
            raise
        return directory

    def remove_adapters(self, shared_dir: Path) -> None:
        """Have the server forget adapters that were written to a directory, and delete them.

        One process calls this, before it loads any, for a directory that no other run writes to.
        """
        deadline = Deadline(self.timeout)
        if shared_dir.is_dir():
            remove_remains(shared_dir, _ADAPTER.pattern)
            for path in sorted(shared_dir.iterdir()):
                if _ADAPTER.fullmatch(path.name):
                    _unload_adapter(self._client, deadline, path)

    def _prove(self, deadline: Deadline, actor: Actor, served: Served) -> None:
        tolerance = self._tolerance or _TOLERANCES.get(actor.dtype.name, _OTHER_TOLERANCE)
        probe = self._probe(served)
        scores = prove(self._loader, deadline, probe, served.name, actor, tolerance)
        self._proof = probe, scores, tolerance

    def _find_model(self, client: Client, deadline: Deadline) -> Served:
        """Ask a server for its name of the model and the most tokens of a row.

        Raises:
            ServerError: if it has another model.
        """
        request = Request("GET", "/v1/models", read=partial(_read_models, self._names))
        return client.send_request(deadline, request)

    def _probe(self, served: Served) -> "Probe":
        return Probe(self.vocab, min(self._max_length, served.max_length))


# Which model a server has.


def names_of(model_id: str | Path, served_name: str | None) -> list[str]:
    """List what a server may call a model."""
    if served_name is not None:
        return [served_name]
    directory = Path(model_id).expanduser()
    return [str(model_id), str(directory.resolve())] if directory.is_dir() else [str(model_id)]


def _names_directory(root: Any, directory: Path) -> bool:
    """Whether what a server calls its checkpoint is a directory here: a path, or its hub id."""
    parts = Path(root).parts if isinstance(root, str) else ()
    if not parts:
        return False
    same = [path.parts[-len(parts) :] == parts for path in (directory, directory.resolve())]
    return any(same) or f"models--{'--'.join(parts)}" in directory.parts  # in the hub's cache


def _read_models(known: Sequence[str], answer: Any) -> Served:
    entries = read_list("data", read_object("an object", answer))
    models = [read_object("models that are objects", x) for x in entries]
    for model in models:
        if model.get("id") in known or model.get("root") in known:
            length = read_integer("an integer as max_model_len", model.get("max_model_len"))
            names = tuple(x.get("id") for x in models)
            return Served(str(model["id"]), length, names, model.get("root"))
    return refuse(
        f"model {known[0]!r} among its models (served_name says what it is called there)",
        [model.get("id") for model in models],
    )


# Loading weights.


def save_for_server(model: Actor, directory: Path) -> None:
    """Write a policy as a checkpoint that a server loads correctly, adapters added to the kernels.

    A head that is tied to the embedding is written as a tensor of its own: after `reload_weights`
    of a tied checkpoint, vLLM 0.32 on a CPU keeps the old head. The files are not read back: the
    server's answers prove what it has read.

    Raises:
        ValueError: if the directory is that of the checkpoint that the policy was read from; and as
            [`save_pretrained`][twinkle_jax.model.save_pretrained].
    """
    if model.source is not None and directory.resolve() == Path(model.source).resolve():
        raise ValueError(
            f"shared_dir must not hold the policy's checkpoint, {model.source}, which would be "
            f"replaced, got {directory.parent}"
        )
    decoder = Decoder(model.config, merge_adapter(model.params), source=model.source)
    save_checkpoint(decoder, directory, dtype=model.dtype, for_server=True)


def load_adapter(client: Client, deadline: Deadline, directory: Path) -> None:
    """Have a server load an adapter, under the name of its directory.

    Raises:
        ServerError: if it cannot.
    """
    body = {"lora_name": directory.name, "lora_path": str(directory)}
    hints = {404: _LORA_HINT.format(directory.parent)}
    request = Request("POST", "/v1/load_lora_adapter", body, hints=hints, repeat=False)
    client.send_request(deadline, request)


def _unload_adapter(client: Client, deadline: Deadline, adapter: Path) -> None:
    body = {"lora_name": adapter.name}
    request = Request("POST", "/v1/unload_lora_adapter", body, repeat=False)
    with suppress(ServerError):  # it may not have been loaded, and costs memory only
        client.send_request(deadline, request)
    shutil.rmtree(adapter, ignore_errors=True)


def load_checkpoint(client: Client, deadline: Deadline, directory: Path) -> None:
    """Have a server pause, load a checkpoint, clear its cache of prefixes, and resume.

    Raises:
        ServerError: if one of these fails; the server is told to resume in any case.
    """
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
    seen = {500: _SEEN_HINT.format(directory.parent)}

    def post(deadline: Deadline, path: str, body: Any = None, read: Any = None) -> None:
        hints = {404: _DEV_HINT} | ({} if body is None else seen)
        client.send_request(deadline, Request("POST", path, body, read, hints=hints))

    try:
        post(deadline, "/pause?mode=wait")
        post(deadline, "/collective_rpc", reload)
        post(deadline, "/reset_prefix_cache", read=_read_success)
    except BaseException as error:
        try:
            post(Deadline(_RESUME_SECONDS), "/resume")
        except ServerError as resume_error:
            error.add_note(f"It may be paused still: {resume_error}")
        raise
    post(Deadline(_RESUME_SECONDS), "/resume")


def _read_success(answer: Any) -> None:
    success = read_object("an object", answer).get("success", True)
    if success is not True:
        refuse("success", success)


# Comparing the log-probabilities that server and actor give the same tokens.

_PROMPTS, _TIME, _NEW, _TOP = 4, 24, 16, 8
_ROUNDING = 1e-3

TokenScores = list[dict[int, float]]


class Probe:
    """Requests about a few prompts of random tokens, always the same.

    Prompts are not scored: vLLM 0.32 on a CPU crashes when it scores prompts with adapters.
    """

    def __init__(self, vocab: int, room: int) -> None:
        rng = np.random.default_rng(0x9806E)
        self._new = min(_NEW, room - 1)
        time = min(_TIME, room - self._new)
        self._prompts: list[list[int]] = rng.integers(vocab, size=(_PROMPTS, time)).tolist()
        token = int(rng.integers(vocab))
        self._pair = token, (token + 1) % vocab
        self._vocab = vocab

    def completion_requests(self, model: str) -> list[Request]:
        """Ask for tokens after each prompt."""
        return [self._request(model, i, self._new, f"probe {i}") for i in range(_PROMPTS)]

    def first_token_requests(self, model: str) -> list[Request]:
        """Ask which tokens are likely after each prompt."""
        return [self._request(model, i, 1, f"probe {i}") for i in range(_PROMPTS)]

    def forced_requests(self, model: str) -> list[Request]:
        """Ask for one token twice, each time with another one as the only one allowed."""
        purpose = "the probe of --logprobs-mode"
        return [self._request(model, 0, 1, purpose, allowed_token_ids=[x]) for x in self._pair]

    def rows(self, answers: Sequence[ServerCompletions]) -> list[list[int]]:
        """Return the tokens of each prompt and its completion."""
        return [
            prompt + answer.drawn[0].tokens
            for prompt, answer in zip(self._prompts, answers, strict=True)
        ]

    def _request(self, model: str, i: int, new: int, purpose: str, **parameters: Any) -> Request:
        params = SamplingParams(logprobs=min(_TOP, self._vocab))
        prompt = self._prompts[i]
        settings = CompletionSettings(
            model, prompt, 1, new, None, params, Stops([], []), self._vocab
        )
        return completion_request(settings, purpose, **parameters)


def find_logprobs_mode(client: Client, deadline: Deadline, probe: Probe, name: str) -> LogprobsMode:
    """Detect whether a server gives raw or processed log-probabilities.

    Processed, the only token allowed has probability 1. Raw, two different tokens cannot both have
    it.

    Raises:
        ServerError: if the values that it gives are not log-probabilities.
    """
    answers: list[ServerCompletions] = client.send_requests(deadline, probe.forced_requests(name))
    firsts = [answer.drawn[0].logprobs[0] for answer in answers]
    if all(first[0][1] >= -_ROUNDING for first in firsts):
        return "processed_logprobs"
    # A server may give logits instead. Values above 0 are refused when they are read, and sums of
    # probabilities above 1 here; logits that are all far below 0 are noticed by `prove` alone.
    totals = [sum(np.exp([logprob for _, logprob in first])) for first in firsts]
    if max(totals) > 1 + _ROUNDING:
        raise ServerError(
            f"{client.url} must give log-probabilities, got values whose exponentials add up to "
            f"{max(totals):.3g}: start it with --logprobs-mode processed_logprobs or raw_logprobs"
        )
    return "raw_logprobs"


def prove(
    client: Client,
    deadline: Deadline,
    probe: Probe,
    name: str,
    actor: Actor,
    tolerance: float,
) -> TokenScores:
    """Have a server draw tokens, and compare its log-probabilities with the actor's.

    They are compared at temperature 1 without filters, where raw and processed ones are the same.
    Returns the server's log-probabilities of likely first tokens, to be compared with later ones.

    Raises:
        ServerError: if they differ by more than the tolerance on average.
    """
    answers: list[ServerCompletions] = client.send_requests(
        deadline, probe.completion_requests(name)
    )
    rows = probe.rows(answers)
    scored = actor.forward_only(inputs=[{"input_ids": row} for row in rows])["logps"]
    expected = [
        scores[: len(row) - 1][-len(answer.drawn[0].tokens) :]
        for scores, row, answer in zip(scored, rows, answers, strict=True)
    ]
    received = np.asarray([x[0][1] for answer in answers for x in answer.drawn[0].logprobs])
    _compare(
        client.url,
        received,
        np.concatenate(expected),
        tolerance,
        "the actor's weights",
        "the actor",
    )
    return first_tokens(answers)


def first_tokens(answers: Sequence[ServerCompletions]) -> TokenScores:
    """Return the log-probabilities of the likely tokens after each prompt."""
    return [dict(answer.drawn[0].logprobs[0]) for answer in answers]


def _compare(
    url: str,
    received: np.ndarray,
    expected: np.ndarray,
    tolerance: float,
    weights: str,
    source: str,
    error: type[ServerError] = ServerError,
) -> None:
    gaps = np.abs(received - expected)
    if not gaps.size:
        raise error(f"{url} must have {weights}, got other likely tokens after every prompt")
    if not np.mean(gaps) <= tolerance:
        worst = int(np.argmax(gaps))
        raise error(
            f"{url} must have {weights}: log-probabilities of {gaps.size} probe tokens must differ "
            f"by at most {tolerance:g} on average, got {np.mean(gaps):.3g}, and at most "
            f"{gaps[worst]:.3g}, where the server gives {received[worst]:.6f}, and {source} "
            f"{expected[worst]:.6f}"
        )
