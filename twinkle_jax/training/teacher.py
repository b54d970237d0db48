"""The teacher of a run: a policy that judges each sampled token, on these devices or a server."""

import os
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from twinkle_jax.data import IGNORE, Batch, SamplingParams, Tokenizer
from twinkle_jax.model import DecoderConfig
from twinkle_jax.model.huggingface.checkpoint_files import ADAPTER_CONFIG, CONFIG, locate, read_json
from twinkle_jax.rollout import hosts
from twinkle_jax.rollout.server_engine import option_names, wait_for
from twinkle_jax.sampler import ServerError
from twinkle_jax.sampler.requests import Stops
from twinkle_jax.sampler.vllm_sampler import ServedSampler
from twinkle_jax.sampler.vllm_server import Client, Deadline, LostServerError
from twinkle_jax.sampler.vllm_weights import names_of
from twinkle_jax.training.config import TrainConfig
from twinkle_jax.training.policy import Policy, load_policy
from twinkle_jax.training.run_directory import holds_run


def read_teacher(
    config: TrainConfig,
    policy: Policy,
    mesh: Mesh | None = None,
    note: Callable[[str], None] = lambda sentence: None,
) -> "Policy | ServedTeacher | None":
    """Read the teacher that a configuration names, in its `dtype`, or find it on its server.

    `note` is called with a warning about tokens that only the policy's tokenizer has, or a server
    that is waited for.

    Raises:
        ValueError: if the teacher has another tokenizer, or the run's rows or mesh do not fit it.
        ServerError: if there is no such server, or it has no room for the longest row.
    """
    settings = config.teacher
    if settings.model is None:
        return None
    if settings.url is not None:
        place = locate(settings.model, argument="teacher.model", weights=False)
        if (place / ADAPTER_CONFIG).exists() or holds_run(place):
            raise ValueError(
                "teacher.model must be a checkpoint with teacher.url, such as the merged one that "
                f"the server has, got {'a run' if holds_run(place) else 'an adapter'}, {place}"
            )
        content = read_json(place, CONFIG)
        known = (content.get("text_config") or content).get("vocab_size")
        if not isinstance(known, int):
            raise ValueError(
                f"vocab_size must be an integer in {place / CONFIG} of teacher.model, got {known!r}"
            )
        _check_tokenizer(
            policy, Tokenizer.from_pretrained(place, argument="teacher.model"), known, note
        )
        teacher = ServedTeacher(config, known, mesh, note)
        teacher.check_room()
        return teacher
    judge = load_policy(
        settings.model,
        dtype=config.dtype,
        mesh=mesh,
        argument="teacher.model",
        chat_template=policy.tokenizer.chat_template,  # base models have none, and need none
    )
    check_decoder(config, judge.config, mesh, "teacher")
    _check_tokenizer(policy, judge.tokenizer, judge.config.vocab_size, note)
    return judge


def _check_tokenizer(
    policy: Policy, tokenizer: Tokenizer, known: int, note: Callable[[str], None]
) -> None:
    """Refuse a teacher for whom the policy's tokens mean something else.

    The teacher's vocabulary has `known` tokens; its tokenizer may lack some, with a warning.
    """
    size = policy.config.vocab_size
    if size > known:
        raise ValueError(
            f"teacher.model must have a vocabulary of at least {size} tokens, the policy's, "
            f"got {known}"
        )
    tokens, others = (x.backend.get_vocab(True) for x in (policy.tokenizer, tokenizer))
    by_id = {token_id: token for token, token_id in others.items()}
    differ = [x for x, token_id in tokens.items() if by_id.get(token_id, x) != x]
    if differ:
        raise ValueError(
            "teacher.model must have the policy's tokenizer, got one with other tokens for "
            f"{len(differ)} of {len(tokens)} ids, such as {by_id[tokens[differ[0]]]!r} for "
            f"{differ[0]!r}"
        )
    missing = [token for token, token_id in tokens.items() if token_id not in by_id]
    if missing:
        note(
            f"warning: the teacher's tokenizer lacks {len(missing)} tokens of the policy's, such "
            f"as {missing[0]!r}, which the teacher may not have been trained on"
        )


def check_decoder(
    config: TrainConfig, decoder: DecoderConfig, mesh: Mesh | None, called: str
) -> None:
    """Refuse a model whose heads the mesh does not divide, or for which rows are too long."""
    heads, tensor = decoder.key_value_heads, config.mesh.tensor
    if mesh is not None and heads % tensor:  # else the first update finds it
        fit = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(
            f"mesh.tensor must divide the {called}'s {heads} key-value heads, one of {fit}, "
            f"got {tensor}"
        )
    longest = decoder.attention.longest_row
    if longest is not None and config.longest_row > longest:
        names = "rollout.max_prompt_tokens plus rollout.max_new_tokens"
        names = "rollout.max_episode_tokens" if config.many_turns else names
        raise ValueError(
            f"{names} must be at most {longest}, the longest row of the {called}'s rotary "
            f"scaling, got {config.longest_row}"
        )


class ServedTeacher:
    """A teacher on a vLLM server, which scores the rows that it is sent.

    With several processes, each sends an equal share of the rows.

    Args:
        config: of the run.
        vocab: token ids lie below it.
        mesh: devices that rows are spread over; None for one.
        note: shows a sentence to the user, such as that the server is waited for.

    Raises:
        ValueError: if the address is invalid.
        ImportError: if httpx is not installed.
    """

    def __init__(
        self,
        config: TrainConfig,
        vocab: int,
        mesh: Mesh | None = None,
        note: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        settings = config.teacher
        assert settings.url is not None
        assert settings.model is not None
        self._settings, self._mesh, self._note = settings, mesh, note
        self._room = config.longest_row + 1  # a server draws a token after each row
        with self._option_names():
            self._server = ServedSampler(
                Client(settings.url, api_key=os.environ.get("VLLM_API_KEY") or None),
                names_of(settings.model, settings.served_name),
                vocab,
                self._room,
                tolerance=None,
                timeout=settings.timeout,
            )

    def _option_names(self) -> Any:
        return option_names(self._settings.timeout, section="teacher")

    def check_room(self) -> None:
        """Refuse a server that is not there, or has no room for the longest row of the run."""
        with self._option_names():
            room = self._server.room()
        if room < self._room:
            raise ServerError(
                f"teacher.url must be of a server with room for {self._room} tokens, one more than "
                f"the longest row, got {self._settings.url} with a max_model_len of {room}: start "
                f"it with --max-model-len {self._room}"
            )

    def score(self, batch: Batch) -> Float[Array, "rows time"]:
        """Compute the log-probabilities of a batch's labels at temperature 1.

        All processes must call this.

        Args:
            batch: rows that begin in the first column; each is sent up to its last label.

        Returns:
            Log-probabilities; where there is no label, they have no meaning.

        Raises:
            ServerError: if the server cannot be reached, takes too long, has another model, or
                answers invalidly.
        """
        tokens, labels = (np.asarray(hosts.read_if_spread(x)) for x in (batch.tokens, batch.labels))
        labelled = labels != IGNORE
        asked = np.flatnonzero(labelled.any(axis=1)).astype(np.int32)
        ends = labels.shape[1] - np.argmax(labelled[:, ::-1], axis=1)  # after the last label
        rows = [[*tokens[i, : ends[i]].tolist(), int(labels[i, ends[i] - 1])] for i in asked]
        part = hosts.deal(len(rows))
        end: Deadline | None = None
        answered = np.zeros((part.stop - part.start, labels.shape[1]), np.float32)

        def attempt() -> str | None:
            """Score this process's share, or return the error of a server that is lost."""
            try:
                if part.start < part.stop:
                    with self._option_names():
                        self._ask(rows[part], answered)
            except LostServerError as error:
                return str(error)
            return None

        while any(errors := hosts.share("asking the teacher", attempt)):
            lost = LostServerError(next(filter(None, errors)))
            end = wait_for(
                self._server,
                end,
                lost,
                self._settings.patience,
                option="teacher.patience",
                note=self._note,
            )
        scores = np.zeros(labels.shape, np.float32)
        scores[asked] = hosts.gather_rows(answered, len(rows))
        if self._mesh is None:
            return jnp.asarray(scores)
        return hosts.spread_rows(scores, self._mesh)

    def _ask(self, rows: list[list[int]], answered: np.ndarray[Any, Any]) -> None:
        answers = self._server.complete(
            rows,
            SamplingParams(max_tokens=0, prompt_logprobs=0),
            1,
            Stops([], []),
            [None] * len(rows),
            logprobs_kind=None,
            purpose="row {}",
        )
        for i, answer in enumerate(answers):
            assert answer.prompt is not None
            logps = [pairs[0][1] for pairs in answer.prompt[1:] if pairs]  # its own token is first
            answered[i, : len(logps)] = logps
